"""Attention on the devices of a mesh: which rows, heads and tokens each device computes, and how
those whose tokens the mesh divides (`mesh.context`) get the keys and values that they attend to.

    heads    The devices exchange tokens for heads: each then has all tokens of its own heads, and
             every kernel runs as on one device (Ulysses, arXiv:2309.14509). Keys and values are
             repeated until the devices divide their heads.
    gather   Each device has its own queries and the keys and values of all tokens, once for each
             group of heads; their gradients are summed and scattered (arXiv:2407.21783).

Heads are exchanged wherever the devices divide them. Otherwise the first device would have the
least to do under a causal mask, since its queries see the fewest keys. So the tokens are balanced:
each of C devices has the pieces i and 2 C - 1 - i of the 2 C pieces of a row, an early and a late
one.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxformer.arrays.sharding import (
    ACTIVATION_RULES,
    activation,
    constrain,
    entry_axes,
    free_axes,
    on_devices,
)
from jaxformer.layers.masks import AttentionMask, TokenLayout

Kernel = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]
Exchange = Literal["none", "heads", "gather"]

# The axis of the mesh that divides tokens.
CONTEXT = ACTIVATION_RULES["sequence"][0]
DIVIDED_TOKENS = ("batch", "sequence", "heads", None)
DIVIDED_HEADS = ("batch", None, "exchanged_heads", None)
KEYS = ("batch", None, "kv_heads", None)


def exchange_of(queries: int, heads: int, sizes: Mapping[str, int] | None = None) -> Exchange:
    """Return how attention of so many queries and heads gets its keys on a mesh with these sizes
    (None: the mesh in force)."""
    if sizes is None:
        sizes = free_axes()
    # Rows of another length, as those of one token that is decoded, are on all devices.
    context = sizes.get(CONTEXT, 1)
    if context == 1 or queries % context:
        return "none"
    devices = math.prod(sizes.get(name, 1) for name in ACTIVATION_RULES["exchanged_heads"])
    if heads % devices:
        return "gather"
    return "heads"


def placed(run: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Call `run`, which the compiler can divide among devices."""
    exchange = exchange_of(q.shape[1], q.shape[2])
    if exchange == "none":
        return run(q, k, v, mask)
    if exchange == "gather":
        # Each device computes its queries, and XLA gathers the keys of all tokens.
        out = run(constrain(q, DIVIDED_TOKENS), constrain(k, KEYS), constrain(v, KEYS), mask)
        return constrain(out, DIVIDED_TOKENS)
    rate, key = mask.dropout
    if not rate or key is None:
        return on_each_device(run, q, k, v, mask)
    # The compiler divides what is drawn, so that every mesh drops the same weights.
    q, k, v = (constrain(x, DIVIDED_HEADS) for x in before_exchange(q, k, v))
    out = run(q, k, v, mask)
    return constrain(constrain(out, DIVIDED_HEADS), DIVIDED_TOKENS)


def before_exchange(
    q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values by tokens, the heads of keys and values as many as an
    exchange needs. They are placed before and after heads are repeated, or else the compiler would
    divide the heads of weights, too, as those after the exchange."""
    heads = activation(q.shape, DIVIDED_HEADS)[2]
    q, k, v = (constrain(x, DIVIDED_TOKENS) for x in (q, k, v))
    k, v = (constrain(repeated(x, heads), DIVIDED_TOKENS) for x in (k, v))
    return q, k, v


def devices_along(entry: tuple[str, ...] | str | None) -> int:
    """Return the number of devices along an entry of a partition."""
    return math.prod(free_axes()[name] for name in entry_axes(entry))


def repeated(x: jax.Array, axes: tuple[str, ...] | str | None) -> jax.Array:
    """Return keys or values [B, S, K, W], their heads repeated until the devices along the axes
    that divide the query heads divide them too: each device then has the key heads of its
    groups."""
    devices = devices_along(axes)
    return jnp.repeat(x, devices // math.gcd(devices, x.shape[2]), axis=2)


def _to_heads(x: jax.Array) -> jax.Array:
    """Exchange some tokens of each head [B, T / C, N, W] -> all tokens of some heads [B, T, N / C,
    W]."""
    return jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=1, tiled=True)


def mask_of_device(
    mask: AttentionMask,
    sides: tuple[TokenLayout, TokenLayout],
    sinks: jax.Array | None,
    bias: jax.Array | None = None,
) -> AttentionMask:
    """Return the mask with the queries and keys, the sinks [N] and the bias [B, N, T, S] of one
    device."""
    scoring = mask.scoring._replace(bias=bias, sinks=sinks)
    return mask._replace(scoring=scoring, queries=sides[0], keys=sides[1])


def on_each_device(
    run: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
    """Call `run` on the rows and heads of each device of the mesh in force. Tokens are exchanged
    for heads where the mesh divides them."""
    axes = free_axes()
    if jax.sharding.get_abstract_mesh().size == 1 or not axes:
        return run(q, k, v, mask)
    exchanges = exchange_of(q.shape[1], q.shape[2]) == "heads"
    # Keys whose number the devices do not divide are on all of them already.
    exchanges_keys = exchanges and k.shape[1] % axes[CONTEXT] == 0
    # Where queries and keys are before `local`; after an exchange they are by heads.
    by_heads = activation(q.shape, DIVIDED_HEADS if exchanges else ("batch", None, "heads", None))
    of_queries = by_heads
    of_keys = by_heads
    batch, _, heads, _ = by_heads
    if exchanges:
        q, k, v = before_exchange(q, k, v)
        of_queries = activation(q.shape, DIVIDED_TOKENS)
        if exchanges_keys:
            of_keys = of_queries
    else:
        k, v = (repeated(x, heads) for x in (k, v))
    scoring = mask.scoring
    bias_sharding = None
    if scoring.bias is not None:
        # [B, N, T, S], or [1, N, T, S] for all rows; each device has the scores of all its tokens.
        rows = batch if scoring.bias.shape[0] > 1 else None
        bias_sharding = PartitionSpec(rows, heads)

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sides: tuple[TokenLayout, TokenLayout],
        bias: jax.Array | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        if exchanges:
            q = _to_heads(q)
        if exchanges_keys:
            k = _to_heads(k)
            v = _to_heads(v)
        out = run(q, k, v, mask_of_device(mask, sides, sinks, bias))
        if not exchanges:
            return out
        # The inverse of `_to_heads`.
        return jax.lax.all_to_all(out, CONTEXT, split_axis=1, concat_axis=2, tiled=True)

    by_rows = PartitionSpec(batch)
    per_head = PartitionSpec(heads)
    in_specs = (of_queries, of_keys, of_keys, by_rows, bias_sharding, per_head)
    layouts = (mask.queries, mask.keys)
    return on_devices(local, in_specs, of_queries)(q, k, v, layouts, scoring.bias, scoring.sinks)


def balanced(x: jax.Array) -> jax.Array:
    """Return an activation [B, T, ...] with an early and a late piece of each row on every device
    of mesh.context."""
    return _rearranged(_to_early_and_late, x)


def in_order(x: jax.Array) -> jax.Array:
    """Return the inverse of `balanced`."""
    return _rearranged(_from_early_and_late, x)


def balanced_index(length: int, devices: int) -> np.ndarray:
    """Return the index in its row of each token of a balanced row, int32 [T]."""
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)  # [2 C, T / 2 C]
    early = pieces[:devices]
    late = pieces[devices:][::-1]
    return np.stack([early, late], axis=1).reshape(-1)


def _rearranged(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    by_tokens = activation(x.shape, ("batch", "sequence", *[None] * (x.ndim - 2)))
    return on_devices(run, by_tokens, by_tokens)(x)


def _destinations(devices: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (from, to) for the first piece of each device, which is piece 2 i of the row, and for
    its second, 2 i + 1. Piece p goes to device p or 2 C - 1 - p."""
    # Each is a permutation: a device sends one piece and gets one.
    first = [(i, min(2 * i, 2 * devices - 1 - 2 * i)) for i in range(devices)]
    second = [(i, min(2 * i + 1, 2 * devices - 2 - 2 * i)) for i in range(devices)]
    return first, second


def _to_early_and_late(x: jax.Array) -> jax.Array:
    """Move the pieces 2 i and 2 i + 1 of a row [B, T / C, ...] on device i -> the pieces i and
    2 C - 1 - i."""
    even, odd = jnp.split(x, 2, axis=1)
    of_even, of_odd = _destinations(jax.lax.axis_size(CONTEXT))
    even = jax.lax.ppermute(even, CONTEXT, of_even)
    odd = jax.lax.ppermute(odd, CONTEXT, of_odd)
    return jnp.concatenate(_in_turn(even, odd), axis=1)


def _in_turn(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the even and the odd piece of a device as the early and the late one, or the reverse:
    on every second device the early one is odd."""
    early_is_even = jax.lax.axis_index(CONTEXT) % 2 == 0
    early = jnp.where(early_is_even, first, second)
    late = jnp.where(early_is_even, second, first)
    return early, late


def _from_early_and_late(x: jax.Array) -> jax.Array:
    """Return the inverse of `_to_early_and_late`."""
    even, odd = _in_turn(*jnp.split(x, 2, axis=1))
    of_even, of_odd = _destinations(jax.lax.axis_size(CONTEXT))
    even = jax.lax.ppermute(even, CONTEXT, [(to, start) for start, to in of_even])
    odd = jax.lax.ppermute(odd, CONTEXT, [(to, start) for start, to in of_odd])
    return jnp.concatenate([even, odd], axis=1)


def gathered_in_order(x: jax.Array, in_pieces: bool) -> jax.Array:
    """Return the keys or values of all devices [B, S, K, W], in the order of their rows, from those
    of one [B, S / C, K, W], inside `jax.shard_map`; `in_pieces`: they are balanced. Their gradients
    are summed and scattered."""
    if not in_pieces:
        return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)
    # [C, B, S / 2 C, K, W] each, by device.
    early, late = (jax.lax.all_gather(piece, CONTEXT) for piece in jnp.split(x, 2, axis=1))
    # [2 C, B, S / 2 C, K, W]: the late pieces come from the last device first.
    pieces = jnp.moveaxis(jnp.concatenate([early, late[::-1]]), 0, 1)
    return pieces.reshape(x.shape[0], -1, *x.shape[2:])
