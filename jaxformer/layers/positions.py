"""How a token knows where it is."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.config import ModelConfig


def rope(
    x: Float[Array, "... T N H"], positions: Int[Array, "... T"], theta: float = 10_000.0, pairing: str = "half"
) -> Float[Array, "... T N H"]:
    """Rotary position embedding (arXiv:2104.09864): [..., T, N, H], [..., T] -> [..., T, N, H].

    Pair i turns by `position * theta^(-2i/H)`. "interleaved" pairs dimensions (2i, 2i + 1), as in the paper; "half" pairs
    (i, i + H/2), as in Llama's published weights. Angles are float32.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    y = x.astype(jnp.float32)
    if pairing == "half":
        a, b = y[..., :half], y[..., half:]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = y[..., ::2], y[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return turned.astype(x.dtype)


ROTATIONS = {
    "rope": lambda config, x, positions: rope(x, positions, config.rope_theta, config.rope_pairing),
    "learned": lambda config, x, positions: x,
    "none": lambda config, x, positions: x,
}


def rotate(config: ModelConfig, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
    """Queries or keys as the config's positions turn them: [B, T, N, H], [B, T] -> [B, T, N, H]."""
    return ROTATIONS[config.positions](config, x, positions)
