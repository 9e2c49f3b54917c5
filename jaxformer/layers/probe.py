"""Seeing inside a model: a probe is shown every named intermediate, keeps those asked for, and may put another in place.

Names are stack.layer.what, as in "decoder.3.mlp_out": the stacks are encoder and decoder, and `jaxformer.models.inspect`
tells of each what. With a probe that asks for something the layers are unrolled; else the program is the ordinary one.
"""

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ConfigError


class Probe:
    """Intermediates by name. `keep` holds names, full or after their layer, or patterns with *; `put` maps full names to an
    array that takes the place of the intermediate, or to a function of it."""

    def __init__(self, keep: Sequence[str] = (), put: Mapping[str, Any] | None = None) -> None:
        self.keep = tuple(keep)
        self.put = dict(put or {})
        self.kept: dict[str, jax.Array] = {}
        self.seen: set[str] = set()
        self._inside = ""

    def within(self, place: str) -> "Probe":
        """The probe as a part of the model sees it, whose names begin with `place`."""
        inner = copy.copy(self)  # what is kept and seen stays shared
        inner._inside = f"{self._inside}{place}."
        return inner

    def __bool__(self) -> bool:
        return bool(self.keep or self.put)

    def wants(self, name: str) -> bool:
        full = self._inside + name
        return full in self.put or self._keeps(full)

    def _keeps(self, name: str) -> bool:
        return any(_fits(name, wanted) for wanted in self.keep)

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        """The value to go on with, after it was kept or another put in its place."""
        if not self:
            return value
        name = self._inside + name
        self.seen.add(name)
        if name in self.put:
            new = self.put[name]
            value = jnp.broadcast_to(new(value) if callable(new) else jnp.asarray(new), value.shape).astype(value.dtype)
        if self._keeps(name):
            self.kept[name] = value
        return value

    def require_all_met(self) -> None:
        """ConfigError for a name that the model has not."""
        missing = [name for name in self.put if name not in self.seen]
        missing += [wanted for wanted in self.keep if not any(_fits(name, wanted) for name in self.seen)]
        if missing:
            raise ConfigError(
                f"this model has no {', '.join(map(repr, missing))}: names are stack.layer.what, here "
                f"{', '.join(sorted(self.seen)[:12])}, and so on; what alone, or a pattern with *, means all layers."
            )


def _fits(name: str, wanted: str) -> bool:
    return fnmatch.fnmatchcase(name, wanted) or name.endswith(f".{wanted}")


SILENT = Probe()
