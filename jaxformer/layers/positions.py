"""Positional schemes: sinusoids, rotated queries and keys (RoPE), score biases (ALiBi, T5)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import RopeScaling


def sinusoids(
    positions: Int[Array, "... T"], width: int, order: str = "interleaved"
) -> Float[Array, "... T D"]:
    """Return sin and cos of position / 10000^(2i/D), interleaved or with order "half" all sines
    first: [..., T] -> [..., T, D] (arXiv:1706.03762). With "half_closed" the exponent is i / (D //
    2 - 1), so that the last frequency is 1/10000, and an odd D ends with a 0 (fairseq)."""
    is_closed = order == "half_closed"
    half = width // 2 if is_closed else -(-width // 2)
    index = jnp.arange(half, dtype=jnp.float32)
    exponent = -index / max(half - 1, 1) if is_closed else -2 * index / width
    # [..., T, half], float32 as in `rope`.
    angle = positions[..., None].astype(jnp.float32) * 10_000.0**exponent
    waves = jnp.sin(angle), jnp.cos(angle)
    if order != "interleaved":
        x = jnp.concatenate(waves, axis=-1)[..., :width]
    else:
        x = jnp.stack(waves, axis=-1).reshape(*positions.shape, 2 * half)[..., :width]
    missing = width - x.shape[-1]
    if missing:
        # An odd width has one dimension without a wave.
        x = jnp.pad(x, [(0, 0)] * positions.ndim + [(0, missing)])
    return x


def rope_frequencies(width: int, theta: Any = 10_000.0) -> Float[Array, "*each W"]:
    """Return theta^(-2i/width), i < width/2: the angle by which each pair turns from one position
    to the next. theta is a number, or an array [..., 1]."""
    return theta ** (-2 * jnp.arange(-(-width // 2), dtype=jnp.float32) / width)


def rope(
    x: Float[Array, "... T N H"],
    positions: Int[Array, "... T"],
    theta: float = 10_000.0,
    pairing: str = "half",
    frequencies: Float[Array, "*each W"] | None = None,
) -> Float[Array, "... T N H"]:
    """Apply rotary position embedding (arXiv:2104.09864): [..., T, N, H], [..., T] -> [..., T, N,
    H].

    Pair i is rotated by `position * frequencies[..., i]`, by default theta^(-2i/H), in float32;
    frequencies are [W], or of each token [..., T, W].
    "interleaved" pairs dimensions (2i, 2i + 1), as in the paper; "half" pairs (i, i + W), as in
    Llama's published weights. With W < H/2 frequencies, the dimensions from 2W on stay as they are.
    """
    if frequencies is None:
        frequencies = rope_frequencies(x.shape[-1], theta)
    width = 2 * frequencies.shape[-1]
    # [..., T, W]. In float32: 16 bits cannot tell far positions from their neighbors.
    angle = positions[..., None].astype(jnp.float32) * frequencies
    # [..., T, 1, W], the same for all heads.
    cos = jnp.cos(angle)[..., None, :]
    sin = jnp.sin(angle)[..., None, :]
    # The first `width` of H dimensions are rotated, in float32; the others pass.
    y = x[..., :width].astype(jnp.float32)
    if pairing == "half":
        a = y[..., : width // 2]
        b = y[..., width // 2 :]  # [..., T, N, W], as a
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a = y[..., ::2]
        b = y[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
    rotated = rotated.astype(x.dtype)
    if width < x.shape[-1]:
        rotated = jnp.concatenate([rotated, x[..., width:]], axis=-1)
    return rotated


Segments = Int[Array, "B T"] | None


def _plain(config: ModelConfig, positions: jax.Array, segments: Segments = None) -> jax.Array:
    return rope_frequencies(config.rotated_width, config.rope.theta)


def _linear(config: ModelConfig, positions: jax.Array, segments: Segments = None) -> jax.Array:
    """Return all frequencies divided by the factor (arXiv:2306.15595)."""
    return _plain(config, positions, segments) / config.rope.factor


def _segment_lengths(positions: jax.Array, segments: Segments) -> jax.Array:
    """Return [B, T, 1], or [B, 1, 1] without segments: the length of each token's segment up to its
    last token in this call. Other segments of the row have no effect."""
    if segments is None:
        last = positions.max(axis=-1, keepdims=True)  # [B, 1]
    else:
        # [B, T, T]: whether two tokens are of one segment, which XLA fuses into the maximum.
        together = segments[..., :, None] == segments[..., None, :]
        last = jnp.where(together, positions[..., None, :], 0).max(axis=-1)
    return (last + 1)[..., None]


def _dynamic(config: ModelConfig, positions: jax.Array, segments: Segments = None) -> jax.Array:
    """Return [B, T, W], or [B, 1, W] without segments: the base is theta (s n / L - s + 1)^(W / (W
    - 2)), with s the factor, L the original length, and n the length of the token's segment in this
    call, at least L. Cached keys keep the base of the call in which they were computed."""
    original = config.original_length
    width = config.rotated_width
    s = config.rope.factor
    length = jnp.maximum(_segment_lengths(positions, segments), original)
    # The exponent divides the frequency of the slowest pair by s n / L - s + 1; that of the
    # fastest stays 1.
    growth = (s * length / original - s + 1) ** (width / max(width - 2, 1))
    return rope_frequencies(width, config.rope.theta * growth)


def _yarn(config: ModelConfig, positions: jax.Array, segments: Segments = None) -> jax.Array:
    """Return the frequencies: those with more than rope.fast rotations within the original length
    are unchanged, those with fewer than rope.slow are divided by the factor, and between these two
    bounds both are mixed, linearly in the index of the pair (arXiv:2309.00071)."""
    width = config.rotated_width
    original = config.original_length
    period = 2 * math.log(config.rope.theta)

    # The pair that turns so often within the original length; not a whole number.
    # From rotations = L theta^(-2i / width) / (2 pi).
    def index(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / period

    low = index(config.rope.fast_rotations)
    high = index(config.rope.slow)
    if config.rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    # 0 for pairs that keep their frequency, 1 for those whose frequency is divided. [W]
    # Where the bounds meet, 1e-3 makes a step of the ramp, without a division by 0.
    scaled = jnp.clip((jnp.arange(-(-width // 2)) - low) / max(high - low, 1e-3), 0, 1)
    plain = _plain(config, positions, segments)
    return plain / config.rope.factor * scaled + plain * (1 - scaled)


def _llama3(config: ModelConfig, positions: jax.Array, segments: Segments = None) -> jax.Array:
    """Return frequencies as YaRN's, but mixed linearly in the number of rotations (Llama 3.1,
    arXiv:2407.21783)."""
    plain = _plain(config, positions, segments)
    rotations = config.original_length * plain / (2 * math.pi)  # [W], of each pair
    low = config.rope.slow
    high = config.rope.fast_rotations
    unscaled = jnp.clip((rotations - low) / max(high - low, 1e-9), 0, 1)
    return plain * unscaled + plain / config.rope.factor * (1 - unscaled)


def _longrope(config: ModelConfig, positions: jax.Array, segments: Segments = None) -> jax.Array:
    """Return [B, T, W], or [B, 1, W] without segments: each pair has a divisor of its frequency for
    tokens of segments within the original length, and one for those of longer segments
    (arXiv:2402.13753). The length is that in this call; cached keys keep the divisors of the call
    in which they were computed."""
    short, long = (jnp.array(factors, jnp.float32) for factors in config.rope.factors)
    is_long = _segment_lengths(positions, segments) > config.original_length
    return _plain(config, positions, segments) / jnp.where(is_long, long, short)


FREQUENCIES: Table[Callable[..., jax.Array]] = Table(
    RopeScaling,
    {
        "none": _plain,
        "linear": _linear,
        "dynamic": _dynamic,
        "yarn": _yarn,
        "llama3": _llama3,
        "longrope": _longrope,
    },
)


def rotate(
    config: ModelConfig,
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    segments: Segments = None,
) -> Float[Array, "B T N H"]:
    """Return queries or keys after RoPE, if the config has it: [B, T, N, H], [B, T] -> [B, T, N,
    H]. Without `segments` each row is one segment."""
    if config.positions != "rope":
        return x
    frequencies = FREQUENCIES[config.rope.scaling](config, positions, segments)
    rotated = rope(x, positions, pairing=config.rope.pairing, frequencies=frequencies)
    if config.rope_scale == 1:
        return rotated
    # YaRN scales queries and keys, so that scores grow by the square; what is not rotated stays.
    width = 2 * frequencies.shape[-1]
    scaled = (config.rope_scale * rotated[..., :width]).astype(x.dtype)
    return jnp.concatenate([scaled, rotated[..., width:]], axis=-1)


def tempered(
    config: ModelConfig, q: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """Return queries times 1 + s ln(1 + floor(position / L)), with s model.attention.temperature
    and L the original length of RoPE: [B, T, N, H], [B, T] -> [B, T, N, H]."""
    if not config.attention.temperature:
        return q
    lengths = (positions // config.original_length).astype(jnp.float32)
    factor = 1 + config.attention.temperature * jnp.log1p(lengths)
    return (q * factor[:, :, None, None]).astype(q.dtype)
