"""Data types of few bits: ascending values in [-1, 1], of which the nearest stands for a number
divided by the largest absolute value of its block."""

import jax
import jax.numpy as jnp
import numpy as np

TINY = 1e-38  # in place of the absolute maximum of a block of zeros
# The 16 values of NF4 (appendix E of the paper).
NF4_VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


def _dynamic_values() -> np.ndarray:
    """The 256 values of the signed dynamic data type, ascending (arXiv:2110.02861): 0, 1, and
    +-10^e times the centers of 2^(e + 6) equal parts of [0.1, 1], for e = -6 .. 0.

    The ends of the parts are float32 steps from the nearer end of [0.1, 1], each rounded once: then
    the values are those of bitsandbytes to the last bit.
    """
    low, values = np.float32(0.1), [0.0, 1.0]
    for exponent in range(-6, 1):
        count = 2 ** (exponent + 6)
        at, step = np.arange(count + 1), np.float64((1 - low) / np.float32(count))
        exact = np.where(at <= count // 2, low + at * step, 1 - (count - at) * step)
        ends = exact.astype(np.float32)
        centers = np.float32(10.0**exponent) * ((ends[1:] + ends[:-1]) / np.float32(2))
        values += [*centers, *-centers]
    return np.sort(np.array(values, np.float32))


DYNAMIC_VALUES = _dynamic_values()


def nearest(x: jax.Array, values: np.ndarray) -> jax.Array:
    """The index, uint8, of the nearest of some ascending values; between two the lower one."""
    middles = jnp.asarray((values[:-1] + values[1:]) / 2)
    return jnp.searchsorted(middles, x, side="left", method="compare_all").astype(jnp.uint8)


def in_blocks(flat: jax.Array, size: int) -> jax.Array:
    """[..., n] -> [..., B, size], filled up with zeros."""
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % size)]
    return jnp.pad(flat, padding).reshape(*flat.shape[:-1], -1, size)


def scaled_codes(blocks: jax.Array, values: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The codes [..., B, n] of blocks divided by their absolute maxima, and these [..., B]."""
    absmax = jnp.abs(blocks).max(-1)
    return nearest(blocks * (1 / jnp.maximum(absmax, TINY))[..., None], values), absmax
