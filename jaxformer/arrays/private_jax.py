"""What JAX has no public name for: the one place that imports from `jax._src`."""

import pkgutil
from typing import Any

import jax

from jaxformer.files import ConfigError


def private(name: str, use: str) -> Any:
    """Return a module of `jax._src`, or what it defines, by its dotted name. Raises ConfigError
    where this version of JAX lacks it; `use` is what then cannot be done."""
    try:
        return pkgutil.resolve_name(f"jax._src.{name}")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{use} needs jax._src.{name}, which jax {jax.__version__} does not have: install"
            " another version, jax>=0.10.1,<0.13."
        ) from error
