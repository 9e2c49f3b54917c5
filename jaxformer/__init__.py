"""jaxformer: transformers as pure functions in JAX.

Names load when they are first used, so `import jaxformer` costs next to nothing over `import jax`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer import layers, tokenizer
    from jaxformer.config import ConfigError, ModelConfig, RunConfig
    from jaxformer.config_file import load_config
    from jaxformer.generation.beam import beam_search
    from jaxformer.generation.decode import generate
    from jaxformer.interop.pretrained import save_pretrained
    from jaxformer.loading import Loaded, load
    from jaxformer.models.inspect import attention_maps, inspect
    from jaxformer.models.transformer import forward, init
    from jaxformer.runs.run import Result, train

_MODULES = {
    "ConfigError": "jaxformer.config",
    "Loaded": "jaxformer.loading",
    "ModelConfig": "jaxformer.config",
    "Result": "jaxformer.runs.run",
    "RunConfig": "jaxformer.config",
    "attention_maps": "jaxformer.models.inspect",
    "beam_search": "jaxformer.generation.beam",
    "forward": "jaxformer.models.transformer",
    "generate": "jaxformer.generation.decode",
    "init": "jaxformer.models.transformer",
    "inspect": "jaxformer.models.inspect",
    "load": "jaxformer.loading",
    "load_config": "jaxformer.config_file",
    "save_pretrained": "jaxformer.interop.pretrained",
    "train": "jaxformer.runs.run",
}
_PACKAGES = ("layers", "tokenizer")

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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"jaxformer.{name}")
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_PACKAGES])
