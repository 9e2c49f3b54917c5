"""The versions of the packages whose files and numbers a run depends on."""

import functools
import importlib.metadata
import platform


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python, jaxformer, JAX and Orbax, as a checkpoint records them."""
    names = ("jaxformer", "jax", "jaxlib", "orbax-checkpoint")
    return {"python": platform.python_version()} | {name: version_of(name) for name in names}


def version_of(name: str) -> str:
    """The version of an installed package; empty where it is not installed, as in a checkout."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
