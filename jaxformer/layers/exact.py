"""Attention whose bits depend on a query's own text alone: the kernel of `model.exact`.

Keys are read in blocks that begin at the first token of the text, wherever it is in the row, and a
query's maximum, sum and values are carried from block to block. A block of which a query sees
nothing changes no bit, so that it does not matter how many are read.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.arrays.exact import TILE, as_plain, unknown
from jaxformer.arrays.params import wide_product
from jaxformer.layers.dot_product import plain
from jaxformer.layers.exchange import Kernel, mask_of_device
from jaxformer.layers.masks import AttentionMask, TokenLayout, segment_ids, visible

BLOCK = 64  # keys
LEAST = jnp.finfo(jnp.float32).min
NO_TEXT = jnp.iinfo(jnp.int32).max


def exact_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Map q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] -> [B, T, N, W], with the derivatives of
    plain attention."""

    def with_arrays(run: Kernel) -> Callable[..., jax.Array]:
        return lambda q, k, v, *arrays: run(q, k, v, mask_of_device(mask, *arrays))

    run = as_plain(with_arrays(_by_texts), with_arrays(plain))
    return run(q, k, v, (mask.queries, mask.keys), mask.scoring.sinks, mask.scoring.bias)


def _by_texts(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    batch, length, heads, _ = q.shape
    width = v.shape[-1]
    tiles = -(-length // TILE)
    segments, key_segments = segment_ids(mask)
    key_positions = mask.keys.positions
    if mask.leading:
        # Leading keys are the first ones of every text, marked by the segment -1.
        first = jnp.arange(mask.leading, dtype=key_positions.dtype)
        key_positions = _behind(first, key_positions)
        key_segments = _behind(jnp.full_like(first, -1), key_segments)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, tiles * TILE - length)] + [(0, 0)] * (x.ndim - 2))

    queries = padded(q)
    # Padding has the segment 0, which is no text.
    segments = padded(segments)
    positions = padded(mask.queries.positions)

    def run(i: jax.Array, out: jax.Array) -> jax.Array:
        row = i // tiles
        start = i % tiles * TILE

        def tile_of(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(_row(x, row), start, TILE)

        own = tile_of(segments)

        def next_text(done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            text, tile = done
            layout = TokenLayout(tile_of(positions), own)
            one = _of_text(
                text, tile_of(queries), layout, (k, v, key_positions, key_segments), mask, row, start
            )
            tile = jnp.where((own == text)[:, None, None], one, tile)
            return _first_text(own, text), tile

        nothing = jnp.zeros((TILE, heads, width), v.dtype)
        begin = (_first_text(own, jnp.int32(0)), nothing)
        _, tile = jax.lax.while_loop(lambda done: done[0] != NO_TEXT, next_text, begin)
        return jax.lax.dynamic_update_slice(out, tile[None], (row, start, 0, 0))

    out = jnp.zeros((batch, tiles * TILE, heads, width), v.dtype)
    return jax.lax.fori_loop(0, unknown(batch * tiles, q), run, out)[:, :length]


def _behind(first: jax.Array, rows: jax.Array) -> jax.Array:
    """Return [B, P + S] from what is the same in all rows [P], and [B, S]."""
    return jnp.concatenate([jnp.broadcast_to(first, (rows.shape[0], len(first))), rows], axis=1)


def _row(x: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, jnp.minimum(row, x.shape[0] - 1), keepdims=False)


def _first_text(segments: jax.Array, after: jax.Array) -> jax.Array:
    """Return the least segment above `after`."""
    return jnp.min(jnp.where(segments > after, segments, NO_TEXT))


def _of_text(text, q, layout, keys, mask, row, start):
    """Return the attention of a tile of queries [TILE, N, H] to the keys of one text."""
    k, v, positions, segments = keys
    heads = (k.shape[2], q.shape[1] // k.shape[2])  # K, G
    grouped = q.reshape(TILE, *heads, q.shape[-1])
    positions = _row(positions, row)
    belongs = _row(segments, row)
    belongs = (belongs == text) | (belongs == -1)
    # The places of the text's keys in the order of their positions, before all others.
    order = jnp.argsort(jnp.where(belongs, positions, NO_TEXT))
    count = belongs.sum()
    first = positions[order[0]]
    scale, cap, bias, sinks, _ = mask.scoring

    def block(j: jax.Array, carry):
        most, total, out = carry
        # [BLOCK]: the keys at these positions, as far as the text has them.
        at = j * BLOCK + jnp.arange(BLOCK) - first
        places = order[jnp.clip(at, 0, len(order) - 1)]
        is_key = (at >= 0) & (at < count)
        near = mask._replace(
            queries=TokenLayout(layout.positions), keys=TokenLayout(positions[places]), leading=0
        )
        sees = visible(near)  # [TILE, BLOCK]
        sees = is_key if sees is None else is_key & (sees | (places < mask.leading))
        equation = "TKGH,SKH->KGTS"
        block_k = _row(k, row)[places]
        if q.dtype == jnp.float32:
            scores = jnp.einsum(equation, grouped, block_k)
        else:
            scores = wide_product(equation, grouped, block_k)
        scores = scores * scale if scale else scores / math.sqrt(q.shape[-1])
        if cap:
            scores = cap * jnp.tanh(scores / cap)
        if bias is not None:
            rows = jax.lax.dynamic_slice_in_dim(_row(padded_bias, row), start, TILE, axis=1)
            scores = scores + rows[..., places].reshape(*heads, TILE, BLOCK)
        scores = jnp.where(sees, scores, LEAST)
        peak = jnp.maximum(most, scores.max(-1))
        weights = jnp.where(sees, jnp.exp(scores - peak[..., None]), 0)
        kept = jnp.exp(most - peak)
        values = wide_product("KGTS,SKW->KGTW", weights.astype(v.dtype), _row(v, row)[places])
        total = total * kept + weights.sum(-1)
        return peak, total, out * kept[..., None] + values

    if bias is not None:
        tiles = -(-bias.shape[2] // TILE) * TILE
        padded_bias = jnp.pad(bias, [(0, 0), (0, 0), (0, tiles - bias.shape[2]), (0, 0)])
    most = jnp.full((*heads, TILE), LEAST)
    total = jnp.zeros((*heads, TILE))
    if sinks is not None:
        most = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(*heads, 1), most.shape)
        total = total + 1
    out = jnp.zeros((*heads, TILE, v.shape[-1]))
    # No key behind the last one, and with a causal mask behind the last query.
    last = first + count - 1
    if mask.causal:
        last = jnp.minimum(last, jnp.where(layout.segments == text, layout.positions, 0).max())
    begin = first // BLOCK
    if mask.window and not mask.leading:
        own = jnp.where(layout.segments == text, layout.positions, NO_TEXT).min()
        begin = jnp.maximum(begin, (own - mask.window + 1) // BLOCK)
    _, total, out = jax.lax.fori_loop(begin, last // BLOCK + 1, block, (most, total, out))
    out = jnp.where(total[..., None] > 0, out / total[..., None], 0)
    return jnp.moveaxis(out, 2, 0).reshape(TILE, -1, v.shape[-1]).astype(v.dtype)
