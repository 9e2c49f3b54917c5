"""Captures: which intermediates of a model are returned, and which are replaced.

A `Request` is passed down, and what it asks for comes back in each block's `Aux`, so that scans,
recomputation and every transform of JAX apply. Full names are stack.layer.what, as in
"decoder.3.mlp_out": the stacks are encoder and decoder, and `jaxformer.tools.inspect` describes
each what. A block knows only its own names ("mlp_out").
"""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Captures = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Request:
    """Intermediates by name. An empty request is false and leaves the program as it is.

    `capture` holds names, full or without stack and layer, or patterns with *; `replace` maps full
    names to an array that replaces the intermediate, or to a function of it. `stack` and `layers`
    are those of the block that reads the request. In a scan one program serves several layers, and
    `index` (a traced int32 scalar) is the number of the one that runs.
    """

    capture: tuple[str, ...] = ()
    replace: Mapping[str, Any] = field(default_factory=dict)
    stack: str = ""
    layers: Sequence[int] = ()
    index: jax.Array | None = None

    def __bool__(self) -> bool:
        return bool(self.capture or self.replace)

    def within(self, stack: str) -> "Request":
        """The request as a stack reads it."""
        return dataclasses.replace(self, stack=stack)

    def at(self, layers: Sequence[int], index: jax.Array | None = None) -> "Request":
        """The request as one block reads it: the only one of `layers`, or in a scan `index`."""
        return dataclasses.replace(self, layers=layers, index=index)

    def wants(self, what: str) -> bool:
        """Whether the intermediate is captured or replaced in any of the layers."""
        return any(self._returns(self._full(what, layer)) for layer in self.layers)

    def apply(self, what: str, value: jax.Array) -> tuple[jax.Array, Captures]:
        """`value` or what replaces it, and the capture of it by `what`, if it is wanted."""
        for layer in self.layers:
            name = self._full(what, layer)
            if name in self.replace:
                value = self._replaced(self.replace[name], layer, value)
        return value, {what: value} if self.wants(what) else {}

    def _replaced(self, new: Any, layer: int, value: jax.Array) -> jax.Array:
        other = new(value) if callable(new) else jnp.asarray(new)
        other = jnp.broadcast_to(other, value.shape).astype(value.dtype)
        return other if self.index is None else jnp.where(self.index == layer, other, value)

    def named(self, captures: Captures, layer: int) -> Captures:
        """A block's captures by their full names, those that are wanted of this layer."""
        full = {self._full(what, layer): value for what, value in captures.items()}
        return {name: value for name, value in full.items() if self._returns(name)}

    def _full(self, what: str, layer: int) -> str:
        return f"{self.stack}.{layer}.{what}"

    def _returns(self, name: str) -> bool:
        """What is replaced comes back too, so that a name without an intermediate is found."""
        return name in self.replace or self.captures(name)

    def captures(self, name: str) -> bool:
        """Whether an intermediate of this full name is asked for."""
        return any(fits(name, wanted) for wanted in self.capture)


def fits(name: str, wanted: str) -> bool:
    """Whether a full name is the one that is wanted, ends in it, or fits it as a pattern."""
    return fnmatch.fnmatchcase(name, wanted) or name.endswith(f".{wanted}")


NOTHING = Request()
