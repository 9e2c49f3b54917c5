"""Products of few rows with a quantized weight on a CPU, as in decoding, from its codes: no array
is made, and a quarter or an eighth of the memory is read. The sums are those of the array but for
rounding.

XLA makes a loop of each product, in which the codes become numbers in registers. In the comments, R
is the number of rows, I that of inputs and O that of outputs.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.sharding import explicit_axes, platform

# The most rows: each takes the conversion of the codes, which is most of the work, once more.
MOST_ROWS = 4
ADDED = 8  # products that are added up in a register
BYTES = 32  # bytes of a block of NF4, with two codes each


def inputs_of(equation: str) -> int:
    """How many axes are contracted if these are last in x and first in the weight, as the two of
    "BTNH,NHD->BTD"; else 0."""
    left, right, out = equation.replace("->", ",").split(",")
    inputs = sum(letter in right for letter in left)
    free = left[: len(left) - inputs]
    return inputs if (right[:inputs], out) == (left[len(free) :], free + right[inputs:]) else 0


def reads_codes(x: jax.Array, shape: tuple[int, ...], dtype: str, inputs: int) -> bool:
    """Whether the product of x and a weight of a shape, of which the first `inputs` axes are
    contracted, is made by the sums below: of few rows in float32, on a CPU."""
    if not inputs or platform() != "cpu" or explicit_axes():
        return False
    rows = math.prod(x.shape[: x.ndim - inputs])
    sizes = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    is_divisible = sizes[0] % (2 * ADDED) == 0 and sizes[1] % (2 * BYTES) == 0
    return rows <= MOST_ROWS and {str(x.dtype), dtype} == {"float32"} and is_divisible


def int8_sums(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """x [R, I] times codes [*I, *O] and a scale for each output: float32 [R, O]."""
    grouped = codes.reshape(x.shape[1] // ADDED // 2, 2, ADDED, -1)  # [I / 16, 2, 8, O]

    def terms(row: jax.Array) -> list[jax.Array]:
        numbers = row.reshape(*grouped.shape[:3], 1)
        return [grouped[:, half].astype(jnp.float32) * numbers[:, half] for half in (0, 1)]

    halves = _added([term for row in _written(x) for term in terms(row)])  # 2 R of [I / 16, O]
    totals = [(a + b).sum(0) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    return jnp.stack(totals) * scale.reshape(-1)


def nf4_sums(x: jax.Array, codes: jax.Array, maxima: jax.Array, values: np.ndarray) -> jax.Array:
    """x [R, I] times the values of codes uint8 [I O / 64, 32], two outputs in each, and the maximum
    of each block: float32 [R, O]."""
    grouped = codes.reshape(x.shape[1] // ADDED, ADDED, -1, BYTES)  # [I / 8, 8, O / 64, 32]
    maxima, table = maxima.reshape(*grouped.shape[:3]), jnp.asarray(values)

    def terms(row: jax.Array) -> list[jax.Array]:
        scale = (maxima * row.reshape(*grouped.shape[:2], 1))[..., None]  # [I / 8, 8, O / 64, 1]
        return [table[grouped >> 4] * scale, table[grouped & 15] * scale]

    added = _added([term for row in _written(x) for term in terms(row)])
    totals = [total.sum(0) for total in added]  # 2 R of [O / 64, 32]
    pairs = zip(totals[::2], totals[1::2], strict=True)
    return jnp.stack([jnp.stack(pair, -1).ravel() for pair in pairs])


def _written(x: jax.Array) -> jax.Array:
    """x, unchanged, which XLA has written to memory, since it is a product of matrices. It fuses
    anything else into the loops that read it, where a norm would be computed again for each
    output."""
    return (x.reshape(-1, ADDED) @ jnp.eye(ADDED, dtype=x.dtype)).reshape(x.shape)


def _added(terms: list[jax.Array]) -> Sequence[jax.Array]:
    """The sums of arrays [n, ADDED, ...] over their second axis.

    They are one reduction, because XLA makes one loop of that, which is vectorized: 0.04 ns of
    processor time a code on an AMD EPYC with AVX-512. Of a reduction of one array it makes a call
    of a library, which takes four times as long.
    """
    start = (np.float32(0),) * len(terms)
    return jax.lax.reduce(  # type: ignore[no-any-return]
        tuple(terms), start, lambda totals, numbers: tuple(map(jnp.add, totals, numbers)), (1,)
    )
