"""How a token knows where it is: by its embedding (learned, sinusoidal), by turned queries and keys
(RoPE), by a bias of the scores that follows the distance (ALiBi, T5), or by what it may see alone
(none)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.config_model import ModelConfig, RopeScaling
from jaxformer.layers.masks import TokenLayout
from jaxformer.params import Spec, Specs, lookup, normal
from jaxformer.settings import Table


def sinusoids(
    positions: Int[Array, "... T"], width: int, order: str = "interleaved"
) -> Float[Array, "... T D"]:
    """sin and cos of position / 10000^(2i/D), in turn or all sines first: [..., T] -> [..., T, D]
    (arXiv:1706.03762)."""
    half = -(-width // 2)
    angle = positions[..., None].astype(jnp.float32) * 10_000.0 ** (
        -2 * jnp.arange(half, dtype=jnp.float32) / width
    )
    waves = jnp.sin(angle), jnp.cos(angle)
    if order == "half":
        return jnp.concatenate(waves, axis=-1)[..., :width]
    return jnp.stack(waves, axis=-1).reshape(*positions.shape, 2 * half)[..., :width]


def rope_frequencies(width: int, theta: Any = 10_000.0) -> Float[Array, "W"]:
    """theta^(-2i/width), i < width/2: the angle that each pair turns by from one position to the
    next."""
    return theta ** (-2 * jnp.arange(-(-width // 2), dtype=jnp.float32) / width)


def rope(
    x: Float[Array, "... T N H"],
    positions: Int[Array, "... T"],
    theta: float = 10_000.0,
    pairing: str = "half",
    frequencies: Float[Array, "W"] | None = None,
) -> Float[Array, "... T N H"]:
    """Rotary position embedding (arXiv:2104.09864): [..., T, N, H], [..., T] -> [..., T, N, H].

    Pair i turns by `position * frequencies[i]`, by default theta^(-2i/H). "interleaved" pairs
    dimensions (2i, 2i + 1), as in the paper; "half" pairs (i, i + W), as in Llama's published
    weights. W frequencies fewer than H/2 leave the dimensions from 2W on as they are. Angles are
    float32.
    """
    frequencies = rope_frequencies(x.shape[-1], theta) if frequencies is None else frequencies
    width = 2 * frequencies.shape[0]
    angle = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    y = x[..., :width].astype(jnp.float32)
    if pairing == "half":
        a, b = y[..., : width // 2], y[..., width // 2 :]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = y[..., ::2], y[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, x[..., width:]], axis=-1) if width < x.shape[-1] else turned


def _plain(config: ModelConfig, positions: jax.Array) -> jax.Array:
    return rope_frequencies(config.rotated_width, config.rope_theta)


def _linear(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """All frequencies divided by the factor (arXiv:2306.15595)."""
    return _plain(config, positions) / config.rope_factor


def _dynamic(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """The base grows with the longest position of the call, once that exceeds the original length
    L: with s the factor and n the length, theta (s n / L - s + 1)^(W / (W - 2)). Keys that a cache
    holds keep the base they were turned with.
    """
    original, width, s = config.original_length, config.rotated_width, config.rope_factor
    length = jnp.maximum(jnp.max(positions) + 1, original)
    return rope_frequencies(
        width, config.rope_theta * (s * length / original - s + 1) ** (width / max(width - 2, 1))
    )


def _yarn(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """Pairs that turn more than beta_fast times within the original length stay, those under
    beta_slow turn slower by the factor, those between by a mixture linear in their index
    (arXiv:2309.00071)."""
    width, original = config.rotated_width, config.original_length

    def index(turns: float) -> float:
        return (
            width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        )

    low = max(math.floor(index(config.rope_beta_fast)), 0)
    high = min(math.ceil(index(config.rope_beta_slow)), width - 1)
    stretched = jnp.clip((jnp.arange(-(-width // 2)) - low) / max(high - low, 1e-3), 0, 1)
    plain = _plain(config, positions)
    return plain / config.rope_factor * stretched + plain * (1 - stretched)


def _llama3(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """As YaRN's, but mixed linearly in the turns within the original length (Llama 3.1,
    arXiv:2407.21783)."""
    plain = _plain(config, positions)
    turns = config.original_length * plain / (2 * math.pi)
    low, high = config.rope_low_frequency, config.rope_high_frequency
    kept = jnp.clip((turns - low) / max(high - low, 1e-9), 0, 1)
    return plain * kept + plain / config.rope_factor * (1 - kept)


FREQUENCIES: Table[Callable[[ModelConfig, jax.Array], jax.Array]] = Table(
    RopeScaling,
    {"none": _plain, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3},
)


def rotate(
    config: ModelConfig, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """Queries or keys as the config of their layer turns them: [B, T, N, H], [B, T] -> [B, T, N,
    H]."""
    if config.positions != "rope":
        return x
    frequencies = FREQUENCIES[config.rope_scaling](config, positions)
    turned = rope(x, positions, pairing=config.rope_pairing, frequencies=frequencies)
    if config.rope_scaling != "yarn":
        return turned
    w = 2 * frequencies.shape[0]
    return jnp.concatenate(
        [(config.rope_scale * turned[..., :w]).astype(x.dtype), turned[..., w:]], axis=-1
    )


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8i/N), i = 1 .. N (arXiv:2108.12409); where N is no power of two, those of the power P
    below it, then every other of those of 2P."""
    power = 2 ** int(math.log2(n_heads))
    return [2 ** (-8 * i / power) for i in range(1, power + 1)] + [
        2 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)
    ]


def relative_bucket(
    distance: Int[Array, "..."], both_ways: bool, buckets: int, far: int
) -> Int[Array, "..."]:
    """T5's row of the bias table for key position minus query position (arXiv:1910.10683).

    Half the rows (of each side, where both are seen) are for single distances, the other half grow
    by a constant ratio up to `far`, from where on the last row serves.
    """
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
    """T5's table [buckets, N], one for all layers of a stack; nothing in other schemes."""
    if config.positions != "t5":
        return {}
    shape, start = (config.relative_buckets, config.n_heads), normal(config.d_model**-0.5)
    return {
        "relative_bias": Spec(shape, ("buckets", "heads"), start, inputs=("buckets",), lookup=True)
    }


def score_bias(
    table: Float[Array, "buckets N"] | None,
    config: ModelConfig,
    queries: TokenLayout,
    keys: TokenLayout,
    causal: bool,
) -> Float[Array, "B N T S"] | None:
    """What the config's positions add to the scores, float32 [B or 1, N, T, S]; None where they add
    nothing."""
    if config.positions not in BIASES:
        return None
    same = all(layout.ordered and layout.segments is None for layout in (queries, keys))
    rows = slice(0, 1) if same else slice(None)  # every row is numbered alike
    distance = keys.positions[rows, None, :] - queries.positions[rows, :, None]
    return BIASES[config.positions](table, config, distance, causal)


def _alibi(
    table: jax.Array | None, config: ModelConfig, distance: jax.Array, causal: bool
) -> jax.Array:
    slopes = jnp.asarray(alibi_slopes(config.n_heads), jnp.float32)
    return -slopes[:, None, None] * jnp.abs(distance)[:, None].astype(jnp.float32)


def _t5(
    table: jax.Array | None, config: ModelConfig, distance: jax.Array, causal: bool
) -> jax.Array:
    bucket = relative_bucket(
        distance, not causal, config.relative_buckets, config.relative_distance
    )
    rows = lookup(table, bucket, ("batch", None, None, "heads"))  # type: ignore[arg-type]
    return jnp.moveaxis(rows, -1, 1)


BIASES: dict[str, Callable[[jax.Array | None, ModelConfig, jax.Array, bool], jax.Array]] = {
    "alibi": _alibi,
    "t5": _t5,
}
