from .adapter import AdapterConfig
from .model import ModelConfig
from .records import Attention, Embedding, Experts, Head, Latent, Recurrent, RelativePositions, Rope
from .run import DataConfig, RunConfig, RunSettings, TokenizerConfig
from .settings import with_settings
from .train import DistillConfig, GRPOConfig, LaunchConfig, MeshConfig, OptimizerConfig, TrainConfig

__all__ = [
    "AdapterConfig",
    "Attention",
    "DataConfig",
    "DistillConfig",
    "Embedding",
    "Experts",
    "GRPOConfig",
    "Head",
    "Latent",
    "LaunchConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Recurrent",
    "RelativePositions",
    "Rope",
    "RunConfig",
    "RunSettings",
    "TokenizerConfig",
    "TrainConfig",
    "with_settings",
]
