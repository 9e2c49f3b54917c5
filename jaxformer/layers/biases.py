"""Positional schemes that add a bias to the scores: ALiBi, and T5's relative buckets."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.arrays.params import Spec, Specs, lookup, normal
from jaxformer.config.model import BIASED_SCORES, ModelConfig
from jaxformer.layers.masks import AttentionMask


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8i/N), i = 1 .. N (arXiv:2108.12409). If N is not a power of two: the slopes of the next
    lower power P, then every other slope of 2P heads."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)]


def relative_bucket(
    distance: Int[Array, "..."], both_ways: bool, buckets: int, far: int
) -> Int[Array, "..."]:
    """T5's row of the bias table for key minus query position (arXiv:1910.10683): half of the rows
    (of each side, if `both_ways`) are for single distances, the others grow by a ratio to `far`."""
    side = jnp.zeros_like(distance)
    if both_ways:
        buckets //= 2
        side = jnp.where(distance > 0, buckets, 0)
    back = jnp.abs(distance) if both_ways else jnp.maximum(-distance, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(back, 1).astype(jnp.float32) / exact) / math.log(far / exact)
    large = jnp.minimum(exact + (ratio * (buckets - exact)).astype(distance.dtype), buckets - 1)
    return side + jnp.where(back < exact, back, large)


def relative_bias_specs(config: ModelConfig) -> Specs:
    """T5's table [buckets, N], of a stack or of a layer; ALiBi has nothing to learn."""
    if config.positions != "t5":
        return {}
    shape, axes = (config.relative_buckets, config.n_heads), ("buckets", "heads")
    init = normal(config.d_model**-0.5)
    return {"relative_bias": Spec(shape, axes, init, inputs=("buckets",), lookup=True)}


def has_layer_bias(config: ModelConfig) -> bool:
    """Whether each layer has a table of its own."""
    return config.positions == "t5" and config.relative_bias == "layer"


def score_bias(
    table: Float[Array, "buckets N"] | None, config: ModelConfig, mask: AttentionMask
) -> Float[Array, "B N T S"]:
    """The bias of the scores, float32 [B or 1, N, T, S], or with P leading keys
    [B or 1, N, T, P + S]."""
    queries, keys = mask.queries.positions, mask.keys.positions
    if mask.queries.ordered and mask.keys.ordered:
        # Two tokens of a segment are as far apart as their indices in the row, so that one bias
        # [1, N, T, S] serves all rows.
        queries, keys = jnp.arange(queries.shape[1])[None], jnp.arange(keys.shape[1])[None]
    bias_of = BIASES[config.positions]
    distance = keys[:, None, :] - queries[:, :, None]  # [B or 1, T, S]
    of_tokens = bias_of(table, config, distance, mask.causal)
    if not mask.leading:
        return of_tokens
    # The distance of a token from the leading keys depends on its position in its segment.
    positions = mask.queries.positions
    if mask.queries.ordered and mask.queries.segments is None:
        positions = positions[:1]
    distance = jnp.arange(mask.leading)[None, None, :] - positions[:, :, None]  # [B or 1, T, P]
    of_leading = bias_of(table, config, distance, mask.causal)
    rows = max(len(of_leading), len(of_tokens))
    of_leading = jnp.broadcast_to(of_leading, (rows, *of_leading.shape[1:]))
    of_tokens = jnp.broadcast_to(of_tokens, (rows, *of_tokens.shape[1:]))
    return jnp.concatenate([of_leading, of_tokens], axis=-1)


def _alibi(
    table: jax.Array | None, config: ModelConfig, distance: jax.Array, causal: bool
) -> jax.Array:
    slopes = jnp.asarray(alibi_slopes(config.n_heads), jnp.float32)
    return -slopes[:, None, None] * jnp.abs(distance)[:, None].astype(jnp.float32)


def _t5(
    table: jax.Array | None, config: ModelConfig, distance: jax.Array, causal: bool
) -> jax.Array:
    buckets, far = config.relative_buckets, config.relative_distance
    bucket = relative_bucket(distance, not causal, buckets, far)
    rows = lookup(table, bucket, ("batch", "sequence", None, "heads"))  # type: ignore[arg-type]
    return jnp.moveaxis(rows, -1, 1)


Bias = Callable[[jax.Array | None, ModelConfig, jax.Array, bool], jax.Array]
BIASES: dict[str, Bias] = dict(zip(BIASED_SCORES, (_alibi, _t5), strict=True))
