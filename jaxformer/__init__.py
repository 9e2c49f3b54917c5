"""jaxformer: transformers as pure functions in JAX.

Names load when they are first used, so `import jaxformer` costs next to nothing over `import jax`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer import layers, tokenizer
    from jaxformer.config import ConfigError, ModelConfig, RunConfig
    from jaxformer.config_file import load_config
    from jaxformer.models.decoder import forward, init

_HOMES = {
    "ConfigError": "jaxformer.config",
    "ModelConfig": "jaxformer.config",
    "RunConfig": "jaxformer.config",
    "forward": "jaxformer.models.decoder",
    "init": "jaxformer.models.decoder",
    "load_config": "jaxformer.config_file",
}
_ROOMS = ("layers", "tokenizer")

__all__ = ["ConfigError", "ModelConfig", "RunConfig", "forward", "init", "layers", "load_config", "tokenizer"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"jaxformer.{name}")
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
