"""Positional schemes that add a bias to the scores: ALiBi, T5's relative buckets, and DeBERTa's
disentangled attention, whose bias depends on queries and keys."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxformer.arrays.exact import by_tiles, is_exact
from jaxformer.arrays.params import Params, Spec, Specs, lookup, normal, product
from jaxformer.config.model import ModelConfig
from jaxformer.config.variants import BIASED_SCORES
from jaxformer.layers.linear import INITIALIZERS
from jaxformer.layers.masks import AttentionMask, Scoring
from jaxformer.layers.norm import norm, norm_specs


def alibi_slopes(n_heads: int) -> list[float]:
    """Return 2^(-8i/N), i = 1 .. N (arXiv:2108.12409). If N is not a power of two: the slopes of
    the next lower power P, then every other slope of 2P heads."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)]


def relative_bucket(
    distance: Int[Array, "..."], both_ways: bool, buckets: int, far: int
) -> Int[Array, "..."]:
    """Return T5's row of the bias table for key minus query position (arXiv:1910.10683): half of
    the rows (of each side, if `both_ways`) are for single distances, the others grow by a ratio to
    `far`."""
    side = jnp.zeros_like(distance)
    if both_ways:
        buckets //= 2
        side = jnp.where(distance > 0, buckets, 0)
    back = jnp.abs(distance) if both_ways else jnp.maximum(-distance, 0)
    # Half of the rows are for single distances, and log(1) avoids that of 0.
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(back, 1).astype(jnp.float32) / exact) / math.log(far / exact)
    large = jnp.minimum(exact + (ratio * (buckets - exact)).astype(distance.dtype), buckets - 1)
    return side + jnp.where(back < exact, back, large)


def relative_bias_specs(config: ModelConfig) -> Specs:
    """Return T5's table [buckets, N], of a stack or of a layer; ALiBi has nothing to learn."""
    if config.positions != "t5":
        return {}
    shape = (config.relative.buckets, config.n_heads)
    axes = ("buckets", "heads")
    init = normal(config.d_model**-0.5)
    return {"relative_bias": Spec(shape, axes, init, inputs=("buckets",), lookup=True)}


def has_layer_bias(config: ModelConfig) -> bool:
    """Return whether each layer has a bias of its own."""
    return is_disentangled(config) or (config.positions == "t5" and config.relative.bias == "layer")


def is_disentangled(config: ModelConfig) -> bool:
    """Return whether a layer computes its bias from its queries and keys, for each row."""
    return config.positions == "disentangled"


def has_shared_bias(config: ModelConfig) -> bool:
    """Return whether all layers of a stack add the same bias to their scores."""
    return config.positions in BIASED_SCORES and not has_layer_bias(config)


def stack_bias_specs(config: ModelConfig) -> Specs:
    """Return the rows of what all layers of a stack score with: T5's table, or of disentangled
    attention the rows of relative positions [2 buckets, D] and their norm."""
    if has_shared_bias(config):
        return relative_bias_specs(config)
    if not is_disentangled(config):
        return {}
    shape = (2 * config.relative.buckets, config.d_model)
    init = INITIALIZERS[config.init](config)
    table = Spec(shape, ("buckets", "embed"), init.positions, inputs=("buckets",), lookup=True)
    return {"relative_embedding": table, "relative_norm": norm_specs(config)}


def stack_scoring(
    params: Params, config: ModelConfig, mask: AttentionMask, dtype: DTypeLike
) -> Scoring:
    """Return what all layers of a stack score with, computed once: a bias, or the normed rows of
    relative positions [1, R, D], of which every layer makes queries and keys."""
    if has_shared_bias(config):
        return Scoring(bias=score_bias(params.get("relative_bias"), config, mask))
    if not is_disentangled(config):
        return Scoring()
    ids = jnp.arange(2 * config.relative.buckets, dtype=jnp.int32)[None]
    rows = lookup(params["relative_embedding"], ids, (None, None, None))
    rows = norm(params.get("relative_norm", {}), config, rows).astype(dtype)
    return Scoring(relative_rows=rows)


def log_bucket(distance: Int[Array, "..."], buckets: int, far: int) -> Int[Array, "..."]:
    """Return DeBERTa's row of 2 `buckets` for query minus key position (arXiv:2111.09543, appendix
    A.5): half of each side is for single distances, the others grow by a ratio to `far`."""
    middle = buckets // 2
    # A constant of the program: the row of each length [2 far], made by NumPy when it is traced.
    lengths = np.arange(2 * far, dtype=np.float32)
    with np.errstate(divide="ignore"):
        ratio = np.log(lengths / middle) / np.log(np.float32((far - 1) / middle))
    large = np.ceil(np.maximum(ratio, 0) * (middle - 1)) + middle
    of_length = np.where(lengths <= middle, lengths, np.minimum(large, buckets)).astype(np.int32)
    side = jnp.asarray(of_length)[jnp.minimum(jnp.abs(distance), len(lengths) - 1)]
    return jnp.clip(jnp.sign(distance) * side + buckets, 0, 2 * buckets - 1)


@jax.named_scope("positions")
def disentangled_bias(
    config: ModelConfig,
    content: tuple[Float[Array, "B T N H"], Float[Array, "B S K H"]],
    relative: tuple[Float[Array, "1 R N H"], Float[Array, "1 R K H"]],
    mask: AttentionMask,
) -> Float[Array, "B N T S"]:
    """Return (q_t . k'_r + k_s . q'_r) times the scale of the scores, float32, where r is the row
    of the distance of s from t, and q', k' are the queries and keys of the rows
    (arXiv:2006.03654)."""
    q, k = content
    q_rows, k_rows = relative
    heads = (k.shape[2], q.shape[2] // k.shape[2])  # K, G
    # [B, T, K, G, H] and [1, R, K, G, H].
    q, q_rows = (x.reshape(*x.shape[:2], *heads, x.shape[-1]) for x in (q, q_rows))
    row = log_bucket(-key_distances(mask), config.relative.buckets, config.relative.distance)
    row = row[:, None, None]  # [B or 1, 1, 1, T, S]
    # [B, T, K, G, R] and [B, S, K, G, R] for all R rows, of which each pair then takes one.
    of_queries = _of_all_rows("BTKGH,RKH->BTKGR", q, k_rows[0])
    of_keys = _of_all_rows("BSKH,RKGH->BSKGR", k, q_rows[0])
    # That is R products of width H for each query and each key, instead of one for each pair, and
    # R (T + S) numbers in memory for each head.
    bias = jnp.take_along_axis(of_queries.transpose(0, 2, 3, 1, 4), row, axis=-1)
    bias = bias + jnp.take_along_axis(of_keys.transpose(0, 2, 3, 4, 1), row, axis=-2)
    scale = config.score_scale or config.head_width**-0.5
    return scale * jax.lax.collapse(bias, 1, 3)


def _of_all_rows(equation: str, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the products of tokens [B, T, ...] with all rows of relative positions, float32."""

    def run(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        return product(equation, tokens, rows).astype(jnp.float32)

    if is_exact():
        return by_tiles(run, tokens, 2, rows)
    return run(tokens, rows)


def score_bias(
    table: Float[Array, "buckets N"] | None, config: ModelConfig, mask: AttentionMask
) -> Float[Array, "B N T S"]:
    """Return the bias of the scores, float32 [B or 1, N, T, S], or with P leading keys [B or 1, N,
    T, P + S]."""
    distance = key_distances(mask)
    if config.positions == "alibi":
        # [B or 1, N, T, S]
        slopes = jnp.asarray(alibi_slopes(config.n_heads), jnp.float32)
        return -slopes[:, None, None] * jnp.abs(distance)[:, None].astype(jnp.float32)
    buckets = config.relative.buckets
    far = config.relative.distance
    bucket = relative_bucket(distance, not mask.causal, buckets, far)
    rows = lookup(table, bucket, ("batch", "sequence", None, "heads"))  # type: ignore[arg-type]
    # [B or 1, T, S, N] -> [B or 1, N, T, S].
    return jnp.moveaxis(rows, -1, 1)


def key_distances(mask: AttentionMask) -> Int[Array, "B T S"]:
    """Return the position of each key less that of the query, [B or 1, T, S], or with P leading
    keys [B or 1, T, P + S]."""
    queries = mask.queries.positions
    keys = mask.keys.positions
    if mask.queries.ordered and mask.keys.ordered:
        # Two tokens of a segment are as far apart as their indices in the row, so that one bias
        # [1, N, T, S] serves all rows.
        queries = jnp.arange(queries.shape[1])[None]
        keys = jnp.arange(keys.shape[1])[None]
    of_tokens = keys[:, None, :] - queries[:, :, None]  # [B or 1, T, S]
    if not mask.leading:
        return of_tokens
    # The distance of a token from the leading keys depends on its position in its segment.
    positions = mask.queries.positions
    if mask.queries.ordered and mask.queries.segments is None:
        positions = positions[:1]
    of_leading = jnp.arange(mask.leading)[None, None, :] - positions[:, :, None]  # [B or 1, T, P]
    rows = max(len(of_leading), len(of_tokens))
    of_leading = jnp.broadcast_to(of_leading, (rows, *of_leading.shape[1:]))
    of_tokens = jnp.broadcast_to(of_tokens, (rows, *of_tokens.shape[1:]))
    return jnp.concatenate([of_leading, of_tokens], axis=-1)
