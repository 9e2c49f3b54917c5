"""jaxformer: transformers as pure functions in JAX.

Names load when they are first used, so `import jaxformer` costs next to nothing over `import jax`.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer import layers, tokenizer
    from jaxformer.checkpoint import Loaded, load
    from jaxformer.config import ConfigError, ModelConfig, RunConfig
    from jaxformer.config_file import load_config
    from jaxformer.generate.beam import beam_search
    from jaxformer.generate.decode import generate
    from jaxformer.interop.pretrained import save_pretrained
    from jaxformer.models.inspect import attention_maps, inspect
    from jaxformer.models.transformer import forward, init
    from jaxformer.train.loop import Result, train

_HOMES = {
    "ConfigError": "jaxformer.config",
    "Loaded": "jaxformer.checkpoint",
    "ModelConfig": "jaxformer.config",
    "Result": "jaxformer.train.loop",
    "RunConfig": "jaxformer.config",
    "attention_maps": "jaxformer.models.inspect",
    "beam_search": "jaxformer.generate.beam",
    "forward": "jaxformer.models.transformer",
    "generate": "jaxformer.generate.decode",
    "init": "jaxformer.models.transformer",
    "inspect": "jaxformer.models.inspect",
    "load": "jaxformer.checkpoint",
    "load_config": "jaxformer.config_file",
    "save_pretrained": "jaxformer.interop.pretrained",
    "train": "jaxformer.train.loop",
}
_ROOMS = ("layers", "tokenizer")

__all__ = [
    "ConfigError",
    "Loaded",
    "ModelConfig",
    "Result",
    "RunConfig",
    "attention_maps",
    "beam_search",
    "forward",
    "generate",
    "init",
    "inspect",
    "layers",
    "load",
    "load_config",
    "save_pretrained",
    "tokenizer",
    "train",
]


class _Package(ModuleType):
    """A package whose names win over its rooms: `jf.train` stays the function after `jaxformer/train/` was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"jaxformer.{name}")
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
