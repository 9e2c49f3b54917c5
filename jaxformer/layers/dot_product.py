"""Attention as plain mathematics, which every transform and device understands: the reference of
all kernels."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.layers.masks import AttentionMask, visible


def dot_product_attention(
    q: Float[Array, "... T N H"],
    k: Float[Array, "... S K H"],
    v: Float[Array, "... S K W"],
    mask: Bool[Array, "... T S"] | None = None,
    *,
    scale: float = 0.0,
    soft_cap: float = 0.0,
    bias: Float[Array, "... N T S"] | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "... T N W"]:
    """softmax(q k^T / sqrt(H)) v: [..., T, N, H], [..., S, K, H], [..., S, K, W], bool [..., T, S]
    -> [..., T, N, W].

    N is a multiple of K: query heads share key heads in groups of N/K. The softmax is float32; a
    row that may see nothing gives 0. `scale` stands for 1/sqrt(H) where it is not 0; `soft_cap` c
    makes scores s c tanh(s / c) (arXiv:2408.00118); `bias` [..., N, T, S] is added to them; `sinks`
    [N] are scores that take weight and give nothing (arXiv:2309.17453). (arXiv:1706.03762,
    arXiv:2305.13245)
    """
    change = _Change(scale, soft_cap, bias, sinks)
    return _values(_weights(q, k, mask, change), v)


class _Change(NamedTuple):
    scale: float
    soft_cap: float
    bias: jax.Array | None
    sinks: jax.Array | None


def _weights(q: jax.Array, k: jax.Array, mask: jax.Array | None, change: _Change) -> jax.Array:
    """The attention weights, float32 [..., K, N/K, T, S]."""
    *_, n, h = q.shape
    heads = (k.shape[-2], n // k.shape[-2])
    grouped = q.reshape(*q.shape[:-2], *heads, h)
    scores = jnp.einsum("...TKGH,...SKH->...KGTS", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * change.scale if change.scale else scores / math.sqrt(h)
    if change.soft_cap:
        scores = change.soft_cap * jnp.tanh(scores / change.soft_cap)
    if change.bias is not None:
        scores = scores + change.bias.reshape(
            *change.bias.shape[:-3], *heads, *change.bias.shape[-2:]
        )
    if mask is not None:
        mask = mask[..., None, None, :, :]
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    if change.sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sinks = jnp.broadcast_to(change.sinks.reshape(*heads, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(
            jnp.concatenate([scores, sinks.astype(jnp.float32)], axis=-1), axis=-1
        )[..., :-1]
    return weights if mask is None else jnp.where(mask, weights, 0)


def _values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """What the weights take of v: [..., K, N/K, T, S], [..., S, K, W] -> [..., T, N, W]."""
    out = jnp.einsum("...KGTS,...SKH->...TKGH", weights.astype(v.dtype), v)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])


def plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """The reference."""
    change = _Change(mask.scale, mask.soft_cap, mask.bias, mask.sinks)
    return _values(_weights(q, k, visible(mask), change), v)


def attention_weights(q: jax.Array, k: jax.Array, mask: AttentionMask) -> jax.Array:
    """The weights of `plain`, float32: q [B, T, N, H], k [B, S, K, H] -> [B, N, T, S]."""
    change = _Change(mask.scale, mask.soft_cap, mask.bias, mask.sinks)
    weights = _weights(q, k, visible(mask), change)
    return weights.reshape(weights.shape[0], -1, *weights.shape[3:])


def weighted_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """What `plain` does with its weights: [B, N, T, S], v [B, S, K, W] -> [B, T, N, W]."""
    return _values(weights.reshape(weights.shape[0], v.shape[2], -1, *weights.shape[2:]), v)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """The plain mathematics in float32, that every kernel is held against."""
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    return plain(q, k, v, mask)
