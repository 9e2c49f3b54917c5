"""jaxformer: transformers as pure functions in JAX.

Names load when they are first used, so `import jaxformer` costs next to nothing over `import jax`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer import layers, tokenizer
    from jaxformer.adapters import adapt
    from jaxformer.checkpoints import Checkpoints
    from jaxformer.config import ConfigError, ModelConfig, RunConfig
    from jaxformer.generation.beam import beam_search
    from jaxformer.generation.decode import generate
    from jaxformer.interop.pretrained import save_pretrained
    from jaxformer.loading import Loaded, load
    from jaxformer.models.inspect import attention_maps, inspect
    from jaxformer.models.transformer import forward, init, specs
    from jaxformer.objectives import loss_of
    from jaxformer.runs.config import load_config
    from jaxformer.runs.run import Result, train
    from jaxformer.sharding import make_mesh
    from jaxformer.training.evaluate import make_evaluate
    from jaxformer.training.loop import Diverged, Interrupted, fit
    from jaxformer.training.state import TrainState, init_state
    from jaxformer.training.step import make_step

_MODULES = {
    "Checkpoints": "jaxformer.checkpoints",
    "ConfigError": "jaxformer.config",
    "Diverged": "jaxformer.training.loop",
    "Interrupted": "jaxformer.training.loop",
    "Loaded": "jaxformer.loading",
    "ModelConfig": "jaxformer.config",
    "Result": "jaxformer.runs.run",
    "RunConfig": "jaxformer.config",
    "TrainState": "jaxformer.training.state",
    "adapt": "jaxformer.adapters",
    "attention_maps": "jaxformer.models.inspect",
    "beam_search": "jaxformer.generation.beam",
    "fit": "jaxformer.training.loop",
    "forward": "jaxformer.models.transformer",
    "generate": "jaxformer.generation.decode",
    "init": "jaxformer.models.transformer",
    "init_state": "jaxformer.training.state",
    "inspect": "jaxformer.models.inspect",
    "load": "jaxformer.loading",
    "load_config": "jaxformer.runs.config",
    "loss_of": "jaxformer.objectives",
    "make_evaluate": "jaxformer.training.evaluate",
    "make_mesh": "jaxformer.sharding",
    "make_step": "jaxformer.training.step",
    "save_pretrained": "jaxformer.interop.pretrained",
    "specs": "jaxformer.models.transformer",
    "train": "jaxformer.runs.run",
}
_PACKAGES = ("layers", "tokenizer")

__all__ = [
    "Checkpoints",
    "ConfigError",
    "Diverged",
    "Interrupted",
    "Loaded",
    "ModelConfig",
    "Result",
    "RunConfig",
    "TrainState",
    "adapt",
    "attention_maps",
    "beam_search",
    "fit",
    "forward",
    "generate",
    "init",
    "init_state",
    "inspect",
    "layers",
    "load",
    "load_config",
    "loss_of",
    "make_evaluate",
    "make_mesh",
    "make_step",
    "save_pretrained",
    "specs",
    "tokenizer",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"jaxformer.{name}")
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_PACKAGES])
