"""Attention in blocks of queries, for the train step on a CPU.

            keys 0 ... T
    block 0 [x . . .]
    block 1 [x x . .]
    block 2 [x x x .]
    block 3 [x x x x]

Each block of queries of a decoder reads only the keys up to its last row, so half of the square is
never computed, and only one block of scores is in memory at a time. A window masks keys before it
and leaves none out. The forward pass
saves the log-sum-exp of each row instead of its weights; the backward pass recomputes the weights
from it (arXiv:2205.14135, arXiv:2307.08691). Dropout of the weights is drawn a block at a time, and
again in the backward pass, from the key folded with the number of the block.

The small step of benchmarks/train_cpu.py (rows of 256 tokens) is 1.04 times as fast as with plain
attention (0.96 to 1.17, 14 samples in turn) on two cores of an AMD EPYC with AVX-512.

Reverse mode only: `jax.jvp` and Hessian-vector products use the plain kernel.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.arrays.sharding import platform
from jaxformer.layers.linear import dropout as dropped
from jaxformer.layers.masks import AttentionMask, TokenLayout, visible

# Queries in a block; the speed with 64 to 256 is within 10 % of that with 128.
QUERY_BLOCK = 128
# The loop over blocks is unrolled, so longer sequences get longer blocks.
MOST_BLOCKS = 16


class Static(NamedTuple):
    """What is known when the function is traced; `leading` keys come before those of tokens."""

    causal: bool
    window: int
    leading: int
    scale: float
    soft_cap: float
    dropout: float


class Extra(NamedTuple):
    """What is added to the scores: a bias [B or 1, N, T, S], and the sinks [N]."""

    bias: jax.Array | None
    sinks: jax.Array | None


class Layouts(NamedTuple):
    """Where the queries [B, T] and the keys [B, S] are; positions are None where tokens are
    compared by their index in the row, so that the backward pass keeps none."""

    queries: TokenLayout
    keys: TokenLayout


def blocked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K W"],
    mask: AttentionMask,
) -> Float[Array, "B T N W"]:
    """Return softmax(q k^T / sqrt(H)) v under a mask: [B, T, N, H], [B, S, K, H], [B, S, K, W] ->
    [B, T, N, W].

    Ordered tokens are compared by their index, and blocks above the diagonal are skipped. The
    softmax is float32; a fully masked row gives 0.
    """
    scoring = mask.scoring
    layouts = Layouts(mask.queries, mask.keys)
    if mask.queries.ordered and mask.keys.ordered:
        none: Any = None
        layouts = Layouts(*(TokenLayout(none, side.segments) for side in layouts))
    scale = scoring.scale or 1 / math.sqrt(q.shape[-1])
    rate, key = mask.dropout
    static = Static(mask.causal, mask.window, mask.leading, scale, scoring.soft_cap, rate)
    return _attention(q, k, v, Extra(scoring.bias, scoring.sinks), layouts, key, static)


def query_groups(q: jax.Array, key_heads: int) -> jax.Array:
    """Map [B, T, N, H] to [B, K, G, T, H]."""
    return jnp.moveaxis(q.reshape(*q.shape[:2], key_heads, -1, q.shape[3]), 1, 3)


def heads_last(x: jax.Array) -> jax.Array:
    """Map [B, K, G, T, H] to [B, T, N, H]."""
    b, k, g, t, h = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(b, t, k * g, h)


def _blocks(
    length: int, keys: int, layouts: Layouts, static: Static
) -> Iterator[tuple[slice, slice, jax.Array]]:
    """Return slices of queries, slices of the keys they attend to, and the mask between them, bool
    [B or 1, 1, 1, queries, keys]."""
    # Ordered tokens go by their index: no query of a block sees a key beyond its last one.
    skips = static.causal and layouts.queries.positions is None
    size = max(QUERY_BLOCK, -(-length // MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        end = min(stop + static.leading, keys) if skips else keys
        queries = _part(layouts.queries, start, stop)
        keys_layout = _part(layouts.keys, 0, end - static.leading)
        mask = AttentionMask(
            queries, keys_layout, static.causal, static.window, leading=static.leading
        )
        allowed = visible(mask)
        if allowed is None:
            allowed = jnp.ones((1, stop - start, end), bool)
        yield slice(start, stop), slice(0, end), allowed[:, None, None]


def _part(layout: TokenLayout, start: int, stop: int) -> TokenLayout:
    """Return the layout of the tokens `start` to `stop` of each row."""
    positions = layout.positions
    segments = layout.segments
    return TokenLayout(
        jnp.arange(start, stop)[None] if positions is None else positions[:, start:stop],
        None if segments is None else segments[:, start:stop],
    )


def grouped_product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # Operands are as wide as b, such as weights beside values of 16 bits; sums are float32.
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def scores_of(
    queries: jax.Array,
    keys: jax.Array,
    scale: float,
    soft_cap: float,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores [B, K, G, rows, keys] of a block, float32, and tanh(score / cap) with a
    soft-cap.

    `bias` is that of the block, [B or 1, K, G, rows, keys].
    """
    scores = grouped_product("BKGTH,BKSH->BKGTS", queries, keys) * scale
    bent = None
    if soft_cap:
        bent = jnp.tanh(scores / soft_cap)
        scores = soft_cap * bent
    return (scores if bias is None else scores + bias), bent


def _bias_of_block(extra: Extra, key_heads: int, rows: slice, columns: slice) -> jax.Array | None:
    """Return the bias of a block, [B or 1, N, T, S] -> [B or 1, K, G, rows, columns]."""
    if extra.bias is None:
        return None
    bias = extra.bias[..., rows, columns]
    return bias.reshape(bias.shape[0], key_heads, -1, *bias.shape[2:])


def _key_of_block(key: jax.Array | None, rows: slice) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, rows.start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(*arguments: Any) -> jax.Array:
    return _forward(*arguments)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extra: Extra,
    layouts: Layouts,
    key: jax.Array | None,
    static: Static,
) -> tuple[jax.Array, Any]:
    queries = query_groups(q, k.shape[2])  # [B, K, G, T, H]
    keys = jnp.swapaxes(k, 1, 2)  # [B, K, S, H]
    values = jnp.swapaxes(v, 1, 2)  # [B, K, S, W]
    lowest = jnp.finfo(jnp.float32).min
    least = jnp.finfo(jnp.float32).tiny
    sinks = extra.sinks
    if sinks is not None:
        # [N] to [K, G, 1, 1], which broadcasts over the scores of a block.
        sinks = sinks.reshape(k.shape[2], -1, 1, 1)
    outs = []  # [B, K, G, rows, W] each
    log_sums = []
    for rows, columns, mask in _blocks(q.shape[1], k.shape[1], layouts, static):
        bias = _bias_of_block(extra, k.shape[2], rows, columns)
        scores, _ = scores_of(
            queries[..., rows, :], keys[..., columns, :], static.scale, static.soft_cap, bias
        )
        # Subtracting the maximum of a row keeps exp finite; a fully masked row has no weights, and
        # its total is kept above 0 so that it gives 0 / tiny = 0.
        top = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=lowest)
        # A sink is one more key, whose weight has no value.
        if sinks is not None:
            top = jnp.maximum(top, sinks)
        weights = jnp.where(mask, jnp.exp(scores - top), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks - top)
        # The total is that of the weights before dropout.
        total = jnp.maximum(total, least)
        weights = dropped(weights, static.dropout, _key_of_block(key, rows))
        outs.append(grouped_product("BKGTS,BKSH->BKGTH", weights, values[..., columns, :]) / total)
        log_sums.append(top + jnp.log(total))  # [B, K, G, rows, 1]
    out = heads_last(jnp.concatenate(outs, axis=-2)).astype(q.dtype)
    # The name lets a policy of `model.remat` save them instead of running the kernel twice.
    out = checkpoint_name(out, "attention")
    log_sum = checkpoint_name(jnp.concatenate(log_sums, axis=-2), "attention")
    return out, (q, k, v, extra, layouts, key, out, log_sum)


def _backward(static: Static, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, extra, layouts, key, out, log_sums = saved
    # The barrier keeps XLA from computing the weights, or their dropout masks, before d_out exists:
    # they would take up memory until then.
    waiting = (q, k, v, key, out, log_sums, d_out)
    q, k, v, key, out, log_sums, d_out = jax.lax.optimization_barrier(waiting)
    if platform() == "cpu":
        # On a CPU XLA removes the barrier. It does not remove the sum with 0 d_out, because that
        # may be NaN. Making k alone depend on d_out is enough, since every score needs it. On an
        # AMD EPYC the small train step is 1.01 times as fast as with q, k and v, in the same
        # memory.
        k = k + (d_out[:, :1, :1, :1] * 0).astype(k.dtype)
    queries, d_outs, outs = (query_groups(a, k.shape[2]) for a in (q, d_out, out))
    keys = jnp.swapaxes(k, 1, 2)
    values = jnp.swapaxes(v, 1, 2)
    # The softmax's gradient is weights * (d_weights - inner), where inner is the sum of
    # weights * d_weights over the keys, which equals the sum of d_out * out over H; with dropout
    # too, which scales or zeroes a weight and its gradient alike.
    inner = jnp.sum(d_outs.astype(jnp.float32) * outs, axis=-1, keepdims=True)
    d_queries = []
    d_bias = []
    # [B, K, S, H] and [B, K, S, W]. Float32, since each is a sum over all blocks of queries.
    d_keys = jnp.zeros(keys.shape, jnp.float32)
    d_values = jnp.zeros(values.shape, jnp.float32)
    for rows, columns, mask in _blocks(q.shape[1], k.shape[1], layouts, static):
        qs = queries[..., rows, :]
        ds = d_outs[..., rows, :]
        ks = keys[..., columns, :]
        vs = values[..., columns, :]
        bias = _bias_of_block(extra, k.shape[2], rows, columns)
        scores, bent = scores_of(qs, ks, static.scale, static.soft_cap, bias)
        weights = jnp.where(mask, jnp.exp(scores - log_sums[..., rows, :]), 0)
        drop = functools.partial(dropped, rate=static.dropout, key=_key_of_block(key, rows))
        d_weights = drop(grouped_product("BKGTH,BKSH->BKGTS", ds, vs))
        d_scores = weights * (d_weights - inner[..., rows, :])
        # Keys beyond this block's end have no gradient from it: zeros up to S.
        beyond = keys.shape[2] - columns.stop
        if bias is not None:
            # A bias [1, ...] is shared by all rows, so its gradient is the sum over them.
            shared = len(bias) == 1
            d_block = jnp.sum(d_scores, axis=0, keepdims=True) if shared else d_scores
            d_bias.append(jnp.pad(d_block, ((0, 0),) * 4 + ((0, beyond),)))
        if bent is not None:
            # The derivative of tanh. The bias is added behind the cap, and its gradient is above.
            d_scores = d_scores * (1 - jnp.square(bent))
        # Through the scale, to the products of queries and keys.
        d_scores = d_scores * static.scale
        d_queries.append(grouped_product("BKGTS,BKSH->BKGTH", d_scores, ks))
        padding = ((0, 0), (0, 0), (0, beyond), (0, 0))
        d_values += jnp.pad(grouped_product("BKGTS,BKGTH->BKSH", drop(weights), ds), padding)
        d_keys += jnp.pad(grouped_product("BKGTS,BKGTH->BKSH", d_scores, qs), padding)
    # Blocks of queries are joined. Those of keys were summed: blocks of queries share keys.
    d_q = heads_last(jnp.concatenate(d_queries, axis=-2)).astype(q.dtype)
    d_k = jnp.swapaxes(d_keys, 1, 2)
    d_v = jnp.swapaxes(d_values, 1, 2)
    d_extra = Extra(None, None)
    if extra.bias is not None:
        whole = jnp.concatenate(d_bias, axis=-2)  # [B or 1, K, G, T, S]
        d_extra = d_extra._replace(bias=whole.reshape(extra.bias.shape).astype(extra.bias.dtype))
    if extra.sinks is not None:
        d_extra = d_extra._replace(sinks=sink_gradients(extra.sinks, log_sums, inner))
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_extra, None, None


_attention.defvjp(_forward, _backward)


def sink_gradients(sinks: jax.Array, log_sum: jax.Array, inner: jax.Array) -> jax.Array:
    """Return the gradients of the sinks of the heads, from the log-sum-exp and the inner sum of all
    queries [B, K, G, T, 1]. A sink has the weight exp(sink - log_sum) and no value, so its
    d_weights is 0."""
    by_group = sinks.reshape(*log_sum.shape[1:3], 1, 1)
    by_head = -jnp.sum(jnp.exp(by_group - log_sum) * inner, axis=(0, 3, 4))  # [K, G]
    return by_head.reshape(sinks.shape).astype(sinks.dtype)
