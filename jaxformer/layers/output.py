"""What a model, a stack or a block returns: the residual stream, the cache, additional sums, and
the intermediates that a request asks for.

A `Request` is passed down, and the intermediates that it names are returned in the `Aux` of each
block, so that scans, recomputation and every transform of JAX apply. A full name is
stack.layer.what, as in "decoder.3.mlp_out", where the stack is encoder or decoder;
`jaxformer.tools.inspect` describes each "what". A block uses only that last name ("mlp_out").
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

AuxSums = dict[str, tuple[jax.Array, jax.Array]]
Captures = dict[str, jax.Array]


@struct.dataclass
class Aux:
    """What a layer returns beside its output; empty for most layers.

    `losses` are sums to add to the loss, as name -> (sum, weight), two float32 scalars (a router's
    balance); `metrics` are the same to be logged only. `captures` are the intermediates that a
    `Request` asked for: in a block by their own names, from a stack on by their full names.
    """

    losses: AuxSums = struct.field(default_factory=dict)
    metrics: AuxSums = struct.field(default_factory=dict)
    captures: Captures = struct.field(default_factory=dict)

    def added(self, objective: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the sum `objective` of a loss, of this weight, plus the losses of the layers. The
        mean of each is to be added to its mean, which is this sum over `weight`."""
        for total, count in self.losses.values():
            objective += weight * total / count
        return objective


class Output(NamedTuple):
    """`x` is the residual stream [B, T, D]. `cache` is the `Cache` (of a block its `LayerCache`)
    with these tokens in it, None for a call without one. `aux` is the union of those of the layers.
    """

    x: jax.Array
    cache: Any
    aux: Aux


def merged(auxes: Iterable[Aux]) -> Aux:
    """Return the union of several: sums of the same name are added; captures have distinct
    names."""
    losses: AuxSums = {}
    metrics: AuxSums = {}
    captures: Captures = {}
    for aux in auxes:
        _add(losses, aux.losses)
        _add(metrics, aux.metrics)
        captures |= aux.captures
    return Aux(losses, metrics, captures)


def _add(totals: AuxSums, sums: AuxSums) -> None:
    """Add the sums of one layer to the totals."""
    for name, (value, weight) in sums.items():
        if name in totals:
            total, total_weight = totals[name]
            totals[name] = (total + value, total_weight + weight)
        else:
            totals[name] = (value, weight)


@dataclass(frozen=True, eq=False)
class Request:
    """Intermediates by name. An empty request is false and leaves the program as it is.

    `capture` holds names, full or without stack and layer, or patterns with *; `replace` maps full
    names to an array that replaces the intermediate, or to a function of it. With a `summary`,
    what is returned is summary(stack, what, intermediate), so that no layer's has to be kept.
    `stack` and `layers` are those of the block that reads the request. In a scan one program serves
    several layers, and `index` (a traced int32 scalar) is the number of the one that runs.
    """

    capture: tuple[str, ...] = ()
    replace: Mapping[str, Any] = field(default_factory=dict)
    summary: Callable[[str, str, jax.Array], jax.Array] | None = None
    stack: str = ""
    layers: Sequence[int] = ()
    index: jax.Array | None = None

    def __bool__(self) -> bool:
        return bool(self.capture or self.replace)

    def within(self, stack: str) -> "Request":
        """Return the request as a stack reads it."""
        return dataclasses.replace(self, stack=stack)

    def at(self, layers: Sequence[int], index: jax.Array | None = None) -> "Request":
        """Return the request as one block reads it: the only one of `layers`, or in a scan
        `index`."""
        return dataclasses.replace(self, layers=layers, index=index)

    def wants(self, what: str) -> bool:
        """Return whether the intermediate is captured or replaced in any of the layers."""
        return any(self._returns(self._full(what, layer)) for layer in self.layers)

    def apply(self, what: str, value: jax.Array) -> tuple[jax.Array, Captures]:
        """Return `value` or what replaces it, and that value, or its summary, by the name `what`,
        if it is captured."""
        for layer in self.layers:
            name = self._full(what, layer)
            if name in self.replace:
                value = self._replaced(self.replace[name], layer, value)
        # Nothing is computed for what nobody asked for.
        if not self.wants(what):
            return value, {}
        returned = value if self.summary is None else self.summary(self.stack, what, value)
        return value, {what: returned}

    def _replaced(self, new: Any, layer: int, value: jax.Array) -> jax.Array:
        replacement = new(value) if callable(new) else jnp.asarray(new)
        replacement = jnp.broadcast_to(replacement, value.shape).astype(value.dtype)
        if self.index is None:
            return replacement
        # One program serves several layers: the replacement is for the layer `layer` alone.
        return jnp.where(self.index == layer, replacement, value)

    def named(self, captures: Captures, layer: int) -> Captures:
        """Return those of a block's captures that are asked for in this layer, by their full
        names."""
        full = {self._full(what, layer): value for what, value in captures.items()}
        return {name: value for name, value in full.items() if self._returns(name)}

    def _full(self, what: str, layer: int) -> str:
        return f"{self.stack}.{layer}.{what}"

    def _returns(self, name: str) -> bool:
        """Return whether the intermediate is returned. Replaced ones are too, so that a name in
        `replace` for which there is no intermediate can be reported."""
        return name in self.replace or self.captures(name)

    def captures(self, name: str) -> bool:
        """Return whether an intermediate of this full name is asked for."""
        return any(fits(name, pattern) for pattern in self.capture)


def fits(name: str, pattern: str) -> bool:
    """Return whether a full name equals `pattern`, ends in it after a dot, or matches it with its
    *."""
    return fnmatch.fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


NOTHING = Request()
