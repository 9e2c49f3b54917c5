"""jaxformer: transformers as pure functions in JAX.

Names load when they are first used, so `import jaxformer` costs next to nothing over `import jax`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer import layers, tokenizer
    from jaxformer.adapters import adapt
    from jaxformer.checkpoints import Checkpoints
    from jaxformer.config import RunConfig
    from jaxformer.config_model import ModelConfig
    from jaxformer.generation.beam import beam_search
    from jaxformer.generation.decode import generate
    from jaxformer.interop.pretrained import save_pretrained
    from jaxformer.loading import Loaded, load
    from jaxformer.mesh import make_mesh
    from jaxformer.models.inspect import attention_maps, inspect
    from jaxformer.models.transformer import forward, init, specs
    from jaxformer.objectives import loss_of
    from jaxformer.runs.config import load_config
    from jaxformer.runs.run import Result, train
    from jaxformer.settings import ConfigError
    from jaxformer.training.evaluate import make_evaluate
    from jaxformer.training.loop import Diverged, Interrupted, fit
    from jaxformer.training.state import TrainState, init_state
    from jaxformer.training.step import make_step

# The names of each module, apart by spaces.
_NAMES = {
    "adapters": "adapt",
    "checkpoints": "Checkpoints",
    "config": "RunConfig",
    "config_model": "ModelConfig",
    "generation.beam": "beam_search",
    "generation.decode": "generate",
    "interop.pretrained": "save_pretrained",
    "loading": "Loaded load",
    "mesh": "make_mesh",
    "models.inspect": "attention_maps inspect",
    "models.transformer": "forward init specs",
    "objectives": "loss_of",
    "runs.config": "load_config",
    "runs.run": "Result train",
    "settings": "ConfigError",
    "training.evaluate": "make_evaluate",
    "training.loop": "Diverged Interrupted fit",
    "training.state": "TrainState init_state",
    "training.step": "make_step",
}
_MODULES = {
    name: f"jaxformer.{module}" for module, names in _NAMES.items() for name in names.split()
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
