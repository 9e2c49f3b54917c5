from .adapter import AdapterConfig
from .model import ModelConfig
from .run import DataConfig, RunConfig, RunSettings, TokenizerConfig
from .train import LaunchConfig, MeshConfig, OptimizerConfig, TrainConfig

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
