from .adapter import AdapterConfig
from .model import ModelConfig
from .run import DataConfig, OptimizerConfig, RunConfig, RunSettings, TokenizerConfig
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
