"""Attention a block of queries at a time, for the train step on a CPU.

            keys 0 ... T
    block 0 [x . . .]
    block 1 [x x . .]
    block 2 [x x x .]
    block 3 [x x x x]

Each block of queries reads only the keys that at least one of its rows may attend to, so half of
the square is never computed, and only one block of scores is in memory at a time. The forward pass
saves the log-sum-exp of each row instead of its weights; the backward pass recomputes the weights
from it (arXiv:2205.14135, arXiv:2307.08691).

Reverse mode only: `jax.jvp` and Hessian-vector products use the plain kernel.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

QUERY_BLOCK = 128  # queries; 64 to 256 run within 10 % of it
MOST_BLOCKS = 16  # the loop is unrolled, so longer sequences get longer blocks

OptionalIndex = jax.Array | None


class Marks(NamedTuple):
    """Where queries [B, T] and keys [B, S] are; None: positions count the tokens, all is one
    segment, no window."""

    q_positions: OptionalIndex
    k_positions: OptionalIndex
    q_segments: OptionalIndex
    k_segments: OptionalIndex
    window: int | jax.Array | None

    def keys_end(self, causal: bool, stop: int, keys: int) -> int:
        """How many keys the queries before `stop` may see at most."""
        by_index = causal and self.q_positions is None and self.k_positions is None
        return min(stop, keys) if by_index else keys

    def mask(self, causal: bool, start: int, stop: int, keys: int) -> jax.Array:
        """bool [B or 1, 1, 1, queries, keys]: who may look at whom."""
        q = (
            jnp.arange(start, stop)[None]
            if self.q_positions is None
            else self.q_positions[:, start:stop]
        )
        k = jnp.arange(keys)[None] if self.k_positions is None else self.k_positions[:, :keys]
        back = q[:, :, None] - k[:, None, :]
        allowed = back >= 0 if causal else jnp.ones(back.shape, bool)
        if self.window is not None:
            allowed &= (back if causal else jnp.abs(back)) < self.window
        if self.q_segments is not None or self.k_segments is not None:
            ones = jnp.ones((1, 1), jnp.int32)
            q_seg = ones if self.q_segments is None else self.q_segments[:, start:stop]
            k_seg = ones if self.k_segments is None else self.k_segments[:, :keys]
            allowed &= (q_seg[:, :, None] == k_seg[:, None, :]) & (k_seg[:, None, :] != 0)
        return allowed[:, None, None]


def blocked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K W"],
    positions: tuple[OptionalIndex, OptionalIndex] = (None, None),
    segments: tuple[OptionalIndex, OptionalIndex] = (None, None),
    *,
    causal: bool = True,
    window: int = 0,
    scale: float = 0.0,
) -> Float[Array, "B T N W"]:
    """softmax(q k^T / sqrt(H)) v under a mask: [B, T, N, H], [B, S, K, H], [B, S, K, W] -> [B, T,
    N, W].

    Positions and segments are int [B, T] of queries and [B, S] of keys: a query sees keys of its
    own segment, at positions up to its own where `causal`, of which the last `window` where that is
    not 0 (both ways where not causal); segment 0 is padding. Without positions a token's index is
    its position, and blocks above the diagonal are left out. `scale` stands for 1/sqrt(H) where it
    is not 0. The softmax is float32; a row that may see nothing gives 0.
    """
    return _attention(
        q,
        k,
        v,
        Marks(*positions, *segments, window or None),
        causal,
        scale or 1 / math.sqrt(q.shape[-1]),
    )


def _heads_first(
    q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, T, N, H] to [B, K, G, T, H], and [B, S, K, H] to [B, K, S, H]."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    return jnp.moveaxis(grouped, 1, 3), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def _heads_last(x: jax.Array) -> jax.Array:
    """[B, K, G, T, H] to [B, T, N, H]."""
    b, k, g, t, h = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(b, t, k * g, h)


def _blocks(
    length: int, keys: int, marks: Marks, causal: bool
) -> Iterator[tuple[slice, slice, jax.Array]]:
    """Slices of queries, slices of the keys they may see, and the mask between them."""
    size = max(QUERY_BLOCK, -(-length // MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        end = marks.keys_end(causal, stop, keys)
        yield slice(start, stop), slice(0, end), marks.mask(causal, start, stop, end)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, marks: Marks, causal: bool, scale: float
) -> jax.Array:
    return _forward(q, k, v, marks, causal, scale)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, marks: Marks, causal: bool, scale: float
) -> tuple[jax.Array, Any]:
    queries, keys, values = _heads_first(q, k, v)
    outs, log_sums = [], []
    for rows, seen, mask in _blocks(q.shape[1], k.shape[1], marks, causal):
        scores = _product("BKGTH,BKSH->BKGTS", queries[..., rows, :], keys[..., seen, :]) * scale
        top = jnp.max(
            scores, axis=-1, keepdims=True, where=mask, initial=jnp.finfo(jnp.float32).min
        )
        weights = jnp.where(mask, jnp.exp(scores - top), 0)
        total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        outs.append(_product("BKGTS,BKSH->BKGTH", weights, values[..., seen, :]) / total)
        log_sums.append(top + jnp.log(total))
    out = _heads_last(jnp.concatenate(outs, axis=-2)).astype(q.dtype)
    return out, (q, k, v, marks, out, jnp.concatenate(log_sums, axis=-2))


def _backward(
    causal: bool, scale: float, saved: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, marks, out, log_sums = saved
    q, k, v, out, log_sums, d_out = jax.lax.optimization_barrier(
        (q, k, v, out, log_sums, d_out)
    )  # no weights before d_out is here
    queries, keys, values = _heads_first(q, k, v)
    d_outs, outs = (_heads_first(a, k, v)[0] for a in (d_out, out))
    inner = jnp.sum(d_outs.astype(jnp.float32) * outs, axis=-1, keepdims=True)
    d_queries = []
    d_keys, d_values = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    for rows, seen, mask in _blocks(q.shape[1], k.shape[1], marks, causal):
        qs, ks, vs, ds = (
            queries[..., rows, :],
            keys[..., seen, :],
            values[..., seen, :],
            d_outs[..., rows, :],
        )
        scores = _product("BKGTH,BKSH->BKGTS", qs, ks) * scale
        weights = jnp.where(mask, jnp.exp(scores - log_sums[..., rows, :]), 0)
        d_scores = weights * (_product("BKGTH,BKSH->BKGTS", ds, vs) - inner[..., rows, :]) * scale
        d_queries.append(_product("BKGTS,BKSH->BKGTH", d_scores, ks))
        rest = ((0, 0), (0, 0), (0, keys.shape[2] - seen.stop), (0, 0))
        d_values += jnp.pad(_product("BKGTS,BKGTH->BKSH", weights, ds), rest)
        d_keys += jnp.pad(_product("BKGTS,BKGTH->BKSH", d_scores, qs), rest)
    d_q = _heads_last(jnp.concatenate(d_queries, axis=-2)).astype(q.dtype)
    return (
        d_q,
        jnp.swapaxes(d_keys, 1, 2).astype(k.dtype),
        jnp.swapaxes(d_values, 1, 2).astype(v.dtype),
        None,
    )


_attention.defvjp(_forward, _backward)
