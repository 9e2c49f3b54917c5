"""What a model, a stack or a block returns: the residual stream, the cache, and additional sums and
captures."""

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
    """`x` is the residual stream [B, T, D]. `cache` is the `KVCache` (of a block its `LayerCache`)
    with these tokens in it, None for a call without one. `aux` is the union of those of the layers.
    """

    x: jax.Array
    cache: Any
    aux: Aux


def merged(auxes: Iterable[Aux]) -> Aux:
    """The union of several: sums of the same name are added; captures have distinct names."""
    losses: AuxSums = {}
    metrics: AuxSums = {}
    captures: Captures = {}
    for aux in auxes:
        _add(losses, aux.losses)
        _add(metrics, aux.metrics)
        captures |= aux.captures
    return Aux(losses, metrics, captures)


def _add(totals: AuxSums, sums: AuxSums) -> None:
    """Adds the sums of one layer to the totals."""
    for name, (value, weight) in sums.items():
        if name in totals:
            total, total_weight = totals[name]
            totals[name] = (total + value, total_weight + weight)
        else:
            totals[name] = (value, weight)
