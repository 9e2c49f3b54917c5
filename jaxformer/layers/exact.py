"""Attention whose bits depend on a query's own text alone, for `model.exact`.

Queries are computed in tiles, and the keys of a text in blocks that begin at its first token,
wherever it is in the row. The largest score, the sum of weights and that of values are carried from
block to block, as in FlashAttention (arXiv:2205.14135). A block of which a query sees nothing
changes no bit of these, so that it does not matter how many blocks are read.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.exact import TILE, unknown, with_derivatives_of
from jaxformer.arrays.params import wide_product
from jaxformer.layers.dot_product import plain
from jaxformer.layers.exchange import Kernel, mask_of_device
from jaxformer.layers.masks import AttentionMask, TokenLayout, segment_ids, visible

KEY_BLOCK = 64  # keys
LEAST_SCORE = jnp.finfo(jnp.float32).min
NO_TEXT = jnp.iinfo(jnp.int32).max
LEADING = -1  # the segment of keys that are the first ones of every text


class _Row(NamedTuple):
    """The number of a row, the positions and segments of its keys [S], their places by segment and
    position [S], and the bias of its scores [N, T, S] or None."""

    number: jax.Array
    positions: jax.Array
    segments: jax.Array
    places: jax.Array
    bias: jax.Array | None


class _Tile(NamedTuple):
    """A tile of queries [TILE, N, H], its layout [TILE], and the place of the first one."""

    queries: jax.Array
    layout: TokenLayout
    start: jax.Array


# The largest score and the sum of the weights [K, G, TILE], and the sum of the values
# [K, G, TILE, W], all relative to the largest score.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


def exact_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Map q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] -> [B, T, N, W] without dropout, with the
    derivatives of plain attention."""

    def with_arrays(run: Kernel) -> Callable[..., jax.Array]:
        return lambda q, k, v, *arrays: run(q, k, v, mask_of_device(mask, *arrays))

    run = with_derivatives_of(with_arrays(plain), with_arrays(_by_tiles))
    layouts = (mask.queries, mask.keys)
    out: jax.Array = run(q, k, v, layouts, mask.scoring.sinks, mask.scoring.bias)
    return out


def _by_tiles(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    batch, length, heads, _ = q.shape
    tiles = -(-length // TILE)

    def padded(x: jax.Array, axis: int = 1) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, tiles * TILE - length)
        return jnp.pad(x, widths)

    segments, key_segments = segment_ids(mask)
    key_positions = mask.keys.positions
    if mask.leading:
        first = jnp.arange(mask.leading, dtype=key_positions.dtype)
        key_positions = _behind(first, key_positions)
        key_segments = _behind(jnp.full_like(first, LEADING), key_segments)
    bias = mask.scoring.bias
    if bias is not None:
        bias = padded(jnp.broadcast_to(bias, (batch, *bias.shape[1:])), axis=2)
    # A cache has the keys of a text in any order, and without those that its window has passed.
    places = jnp.lexsort((key_positions, key_segments))
    rows = _Row(jnp.arange(batch), key_positions, key_segments, places, bias)
    queries = padded(q)
    # The queries added here have the segment 0, which is no text.
    layout = TokenLayout(padded(mask.queries.positions), padded(segments))

    def run(i: jax.Array, out: jax.Array) -> jax.Array:
        index = i // tiles
        start = i % tiles * TILE

        def of_tile(x: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
            return jax.lax.dynamic_slice_in_dim(row, start, TILE)

        row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), rows)
        tile = _Tile(of_tile(queries), jax.tree.map(of_tile, layout), start)
        texts = tile.layout.segments
        assert texts is not None

        def add_text(done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            text, of_texts = done
            new = _of_text(text, tile, row, k, v, mask)
            of_texts = jnp.where((texts == text)[:, None, None], new, of_texts)
            return _next_text(texts, text), of_texts

        nothing = jnp.zeros((TILE, heads, v.shape[-1]), v.dtype)
        begin = (_next_text(texts, jnp.int32(0)), nothing)
        _, found = jax.lax.while_loop(lambda done: done[0] != NO_TEXT, add_text, begin)
        return jax.lax.dynamic_update_slice(out, found[None], (index, start, 0, 0))

    out = jnp.zeros((batch, tiles * TILE, heads, v.shape[-1]), v.dtype)
    return jax.lax.fori_loop(0, unknown(batch * tiles, q), run, out)[:, :length]


def _behind(first: jax.Array, rows: jax.Array) -> jax.Array:
    """Return [B, P + S] from what is the same in all rows [P], and [B, S]."""
    return jnp.concatenate([jnp.broadcast_to(first, (rows.shape[0], len(first))), rows], axis=1)


def _next_text(segments: jax.Array, after: jax.Array) -> jax.Array:
    """Return the least segment above `after`, NO_TEXT if there is none."""
    return jnp.min(jnp.where(segments > after, segments, NO_TEXT))


def _of_text(
    text: jax.Array, tile: _Tile, row: _Row, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
    """Return the attention of a tile of queries to the keys of one text, [TILE, N, W], where k
    [B, S, K, H] and v [B, S, K, W] are those of all rows."""
    heads = (k.shape[2], tile.queries.shape[1] // k.shape[2])  # K, G
    width = tile.queries.shape[-1]
    grouped = tile.queries.reshape(TILE, *heads, width)
    count = mask.leading + (row.segments == text).sum()
    # Where the text's own keys begin among the places, behind the leading keys.
    own_keys = (row.segments < text).sum()

    def places_of(index: jax.Array) -> jax.Array:
        """Return the places of the keys that have these numbers among those of the text."""
        number = jnp.where(index < mask.leading, index, own_keys + index - mask.leading)
        return row.places[jnp.clip(number, 0, len(row.places) - 1)]

    first = row.positions[places_of(jnp.int32(0))]
    # Without segments, which `is_key` below has.
    near = mask._replace(queries=TokenLayout(tile.layout.positions), leading=0)
    scale, cap, _, sinks, _ = mask.scoring

    def add_block(j: jax.Array, sums: _Sums) -> _Sums:
        most, total, out = sums
        # The keys at the positions of this block, as far as the text has them: [KEY_BLOCK].
        index = j * KEY_BLOCK + jnp.arange(KEY_BLOCK) - first
        is_key = (index >= 0) & (index < count)
        at = places_of(index)
        sees = visible(near._replace(keys=TokenLayout(row.positions[at])))  # [TILE, KEY_BLOCK]
        sees = is_key if sees is None else is_key & (sees | (at < mask.leading))
        equation = "TKGH,SKH->KGTS"
        if tile.queries.dtype == k.dtype == jnp.float32:
            scores = jnp.einsum(equation, grouped, k[row.number, at])
        else:
            scores = wide_product(equation, grouped, k[row.number, at])
        scores = scores * scale if scale else scores / math.sqrt(width)
        if cap:
            scores = cap * jnp.tanh(scores / cap)
        if row.bias is not None:
            bias = jax.lax.dynamic_slice_in_dim(row.bias, tile.start, TILE, axis=1)[..., at]
            scores = scores + bias.reshape(scores.shape)
        scores = jnp.where(sees, scores, LEAST_SCORE)
        new_most = jnp.maximum(most, scores.max(axis=-1))
        weights = jnp.where(sees, jnp.exp(scores - new_most[..., None]), 0)
        values = wide_product("KGTS,SKW->KGTW", weights.astype(v.dtype), v[row.number, at])
        kept = jnp.exp(most - new_most)
        return new_most, total * kept + weights.sum(axis=-1), out * kept[..., None] + values

    # A sink is the score of a key without a value.
    most = jnp.full((*heads, TILE), LEAST_SCORE)
    total = jnp.zeros((*heads, TILE))
    if sinks is not None:
        most = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(*heads, 1), most.shape)
        total = jnp.ones((*heads, TILE))
    out = jnp.zeros((*heads, TILE, v.shape[-1]))
    # From the text's first key to its last, less what no query of the tile sees.
    own = tile.layout.segments == text
    begin = first
    last = first + count - 1
    if mask.causal:
        last = jnp.minimum(last, jnp.where(own, tile.layout.positions, 0).max())
    if mask.window and not mask.leading:
        nearest = jnp.where(own, tile.layout.positions, NO_TEXT).min()
        begin = jnp.maximum(begin, nearest - mask.window + 1)
    _, total, out = jax.lax.fori_loop(
        begin // KEY_BLOCK, last // KEY_BLOCK + 1, add_block, (most, total, out)
    )
    # A query that sees nothing gets 0.
    out = jnp.where(total[..., None] > 0, out / total[..., None], 0)
    return jnp.moveaxis(out, 2, 0).reshape(TILE, -1, out.shape[-1]).astype(v.dtype)
