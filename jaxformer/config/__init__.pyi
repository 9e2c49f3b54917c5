from .adapter import AdapterConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .run import DataConfig, RunConfig, RunSettings, TokenizerConfig
from .train import LaunchConfig, MeshConfig, TrainConfig

__all__ = [
    "AdapterConfig",
    "DataConfig",
    "LaunchConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "RunSettings",
    "TokenizerConfig",
    "TrainConfig",
]
