"""What a model, a stack or a block returns: the residual stream, the cache, and the rest."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from flax import struct

from jaxformer.layers.capture import Captures

AuxSums = dict[str, tuple[jax.Array, jax.Array]]


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


class Output(NamedTuple):
    """`x` is the residual stream [B, T, D]; `cache` is the `KVCache` (of a block its `LayerCache`)
    with these tokens in it, None if none was given; `aux` is the union of what the layers added."""

    x: jax.Array
    cache: Any
    aux: Aux


def merged(parts: Iterable[Aux]) -> Aux:
    """The union of several: sums of one name are added, captures have distinct names."""
    losses: AuxSums = {}
    metrics: AuxSums = {}
    captures: Captures = {}
    for part in parts:
        _add(losses, part.losses)
        _add(metrics, part.metrics)
        captures |= part.captures
    return Aux(losses, metrics, captures)


def _add(total: AuxSums, part: AuxSums) -> None:
    for name, (value, weight) in part.items():
        known = total.get(name)
        total[name] = (value, weight) if known is None else (known[0] + value, known[1] + weight)
