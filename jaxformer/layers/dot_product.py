"""Attention in plain jax.numpy, for every transform and device: the reference of all kernels."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.arrays.params import product, wide_product
from jaxformer.layers.linear import dropout
from jaxformer.layers.masks import AttentionMask, Scoring, visible


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
    """Return softmax(q k^T / sqrt(H)) v, where `mask` has the keys that a query attends to.

    N is a multiple of K: query heads share key heads in groups of N/K. The softmax is float32; a
    fully masked row gives 0. `scale` replaces 1/sqrt(H) unless it is 0; `soft_cap` c changes scores
    s to c tanh(s / c) (arXiv:2408.00118); `bias` [..., N, T, S] is added to them; `sinks` [N] are
    the scores of a key without a value (arXiv:2309.17453). (arXiv:1706.03762, arXiv:2305.13245)
    """
    return _values(_weights(q, k, mask, Scoring(scale, soft_cap, bias, sinks)), v)


def _weights(q: jax.Array, k: jax.Array, mask: jax.Array | None, scoring: Scoring) -> jax.Array:
    """Return the attention weights, float32 [..., K, G, T, S] with G = N/K."""
    *_, n, h = q.shape
    heads = (k.shape[-2], n // k.shape[-2])  # K, G
    scale, cap, bias, sinks, _ = scoring
    grouped = q.reshape(*q.shape[:-2], *heads, h)  # [..., T, K, G, H]
    equation = "...TKGH,...SKH->...KGTS"
    # Scores are float32 for any dtype, and the gradients of 16-bit operands stay products of
    # 16 bits.
    if q.dtype == k.dtype == jnp.float32:
        scores = jnp.einsum(equation, grouped, k)
    else:
        scores = wide_product(equation, grouped, k)
    scores = scores * scale if scale else scores / math.sqrt(h)
    if cap:
        # Before the bias and the mask, which the tanh would bend.
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.reshape(*bias.shape[:-3], *heads, *bias.shape[-2:])
    if mask is not None:
        mask = mask[..., None, None, :, :]  # [..., 1, 1, T, S]
        # The least number and not -inf, which would make NaN of a row that sees nothing.
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    # A sink is one more key, whose weight is removed after the softmax.
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.reshape(*heads, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks.astype(jnp.float32)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    if mask is None:
        return weights
    # A row that sees nothing has equal weights, which become 0.
    return jnp.where(mask, weights, 0)


def _values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Map [..., K, G, T, S], [..., S, K, W] -> [..., T, N, W]."""
    # The softmax was float32; the product with the values is in their dtype.
    weights = weights.astype(v.dtype)
    if weights.shape[-2] == 1:
        # One query, as in decoding. XLA for CPUs would transpose all values for the other equation.
        out = product("...KGTS,...SKH->...KGTH", weights, v)
        return out.reshape(*out.shape[:-4], 1, -1, out.shape[-1])
    out = product("...KGTS,...SKH->...TKGH", weights, v)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])


def plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Apply `dot_product_attention` under an `AttentionMask`."""
    return _values(dropout(_weights(q, k, visible(mask), mask.scoring), *mask.dropout), v)


def attention_weights(q: jax.Array, k: jax.Array, mask: AttentionMask) -> jax.Array:
    """Return the undropped weights of `plain`, float32: [B, T, N, H], [B, S, K, H] -> [B, N, T,
    S]."""
    return jax.lax.collapse(_weights(q, k, visible(mask), mask.scoring), 1, 3)


def weighted_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Compute `plain` from its weights on: [B, N, T, S], v [B, S, K, W] -> [B, T, N, W]."""
    return _values(weights.reshape(weights.shape[0], v.shape[2], -1, *weights.shape[2:]), v)
