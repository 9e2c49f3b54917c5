"""Products of few rows with a quantized weight, as in decoding, from its codes: no array is made,
and a quarter or an eighth of the memory of float32 is read. The sums are those of the array but for
rounding.

XLA for GPUs makes one reduction of a product, in which the codes become numbers in registers (of
NF4 where the inputs are adjacent, as `output_major_codes.py` has them; of int8 beside float32), and
kernels of matrix products that read int8 codes where x has 16 bits, as XLA for TPUs does. XLA for
CPUs makes a loop of each product: 13 to 19 billion codes a second on a core of an AMD EPYC with
AVX-512 in int8, and 4 in NF4, whose values are looked up one by one; of float32 it reads 9 billion
weights. After the first token GPT-2 124M writes 2.4 times as many tokens a second in int8 as in
float32 and 0.92 times as many in NF4, SmolLM2-135M 1.9 and 0.85 times (in turn, on two quiet
cores). What else a token takes is the same for all: in SmolLM2-135M a third of the time of int8.

In the comments, R is the number of rows, I that of inputs and O that of outputs.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import contract
from jaxformer.arrays.sharding import explicit_axes, platform

# The most rows: each takes the conversion of the codes, which is most of the work, once more.
MOST_ROWS = 4
SUMMED = 8  # products that are added up in a register
NF4_BYTES = 32  # bytes of a block of NF4, with two codes each

Platforms = tuple[str, ...]


def leading_inputs(equation: str) -> int:
    """Return how many axes are contracted if these are last in x and first in the weight, as the
    two of "BTNH,NHD->BTD"; else 0."""
    left, right, out = equation.replace("->", ",").split(",")
    inputs = sum(letter in right for letter in left)
    free = left[: len(left) - inputs]
    if right[:inputs] != left[len(free) :] or out != free + right[inputs:]:
        return 0
    return inputs


def contracts_last(equation: str) -> bool:
    """Return whether the last axis of x and the last of a matrix are contracted, as those of a
    head: "BTD,VD->BTV"."""
    left, right, out = equation.replace("->", ",").split(",")
    return len(right) == 2 and left[-1] == right[1] and out == left[:-1] + right[0]


def inputs_first(equation: str) -> str:
    """Return the product of `contracts_last` with the transposed matrix: "BTD,DV->BTV"."""
    left, right, out = equation.replace("->", ",").split(",")
    return f"{left},{right[::-1]}->{out}"


def reads_codes(
    x: jax.Array, shape: tuple[int, ...], dtype: str, inputs: int, platforms: Platforms
) -> bool:
    """Return whether the product of x and a weight of a shape, of which the first `inputs` axes are
    contracted, is made by sums from its codes: of few rows, on one of the platforms; on a CPU in
    float32."""
    if not inputs or platform() not in platforms or explicit_axes():
        return False
    rows = math.prod(x.shape[: x.ndim - inputs])
    if platform() == "cpu":
        sizes = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        is_divisible = sizes[0] % (2 * SUMMED) == 0 and sizes[1] % (2 * NF4_BYTES) == 0
        if not is_divisible or {str(x.dtype), dtype} != {"float32"}:
            return False
    return rows <= MOST_ROWS


def high_and_low(codes: jax.Array, axis: int) -> jax.Array:
    """Return the two codes of 4 bits in each of uint8 codes, along an axis of size 1: the high
    bits, then the low ones."""
    shape = tuple(2 if i == axis else 1 for i in range(codes.ndim))
    return (codes >> 4 * (1 - jax.lax.broadcasted_iota(jnp.uint8, shape, axis))) & 15


def looked_up(codes: jax.Array, values: np.ndarray) -> jax.Array:
    """Return values[codes] for 16 values. A GPU and a TPU choose by one bit after the other, as
    part of the loop that reads the codes; a table would be a gather, for which a TPU makes
    arrays."""
    if platform() == "cpu":
        return jnp.asarray(values)[codes]
    choices = [jnp.float32(value) for value in values]
    for bit in (1, 2, 4, 8):
        pairs = zip(choices[::2], choices[1::2], strict=True)
        is_set = (codes & bit) != 0
        choices = [jnp.where(is_set, second, first) for first, second in pairs]
    return choices[0]


def int8_sums(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply x [R, I] by codes [*I, *O] and a scale for each output: float32 [R, O]."""
    if platform() != "cpu" and x.dtype.itemsize == 2:
        # The codes are exact in 16 bits, and XLA converts them inside the kernels of products.
        matrix = codes.reshape(x.shape[1], -1).astype(x.dtype)
        return contract("RI,IO->RO", x, matrix, dtype=jnp.float32) * scale.reshape(-1)
    x = x.astype(jnp.float32)
    if platform() != "cpu":
        matrix = codes.reshape(x.shape[1], -1).astype(jnp.float32)
        return jnp.stack([(matrix * row[:, None]).sum(0) for row in x]) * scale.reshape(-1)
    # Twice as many in a register halve what is written between the sums, where the inputs allow it.
    size = SUMMED if x.shape[1] % (4 * SUMMED) else 2 * SUMMED
    numbers = _written(x, size)  # two of [R, I / 2 size, size]
    halves = _halves(numbers, codes.reshape(x.shape[1], -1))  # two of [I / 2 size, size, O]

    def terms(row: int) -> list[jax.Array]:
        pairs = zip(halves, numbers, strict=True)
        return [half.astype(jnp.float32) * factors[row, ..., None] for half, factors in pairs]

    # 2 R of [I / 2 size, O]
    totals = _totals([term for row in range(len(x)) for term in terms(row)])
    return jnp.stack(totals) * scale.reshape(-1)


def nf4_sums(x: jax.Array, codes: jax.Array, maxima: jax.Array, values: np.ndarray) -> jax.Array:
    """Multiply x [R, I] by the values of codes uint8 [I O / 64, 32], two outputs in each, and the
    maximum of each block: float32 [R, O]."""
    numbers = _written(x.astype(jnp.float32), SUMMED)  # two of [R, I / 16, 8]
    table = jnp.asarray(values)
    maxima = maxima.reshape(-1, 2, SUMMED, codes.size // x.shape[1] // NF4_BYTES, 1)
    halves = _halves(numbers, codes.reshape(x.shape[1], -1, NF4_BYTES))  # [I / 16, 8, O / 64, 32]

    def terms(row: int) -> list[jax.Array]:
        # Each is [I / 16, 8, O / 64, 1].
        scales = [maxima[:, i] * numbers[i][row, ..., None, None] for i in (0, 1)]
        pairs = list(zip(halves, scales, strict=True))
        firsts = [table[half >> 4] * scale for half, scale in pairs]
        return firsts + [table[half & 15] * scale for half, scale in pairs]

    # 4 R of [I / 16, O / 64, 32]
    totals = _totals([term for row in range(len(x)) for term in terms(row)])
    pairs = zip(totals[::2], totals[1::2], strict=True)
    return jnp.stack([jnp.stack(pair, -1).ravel() for pair in pairs])


def _totals(terms: list[jax.Array]) -> list[jax.Array]:
    """Return the sums of arrays [m, n, ...] over their first two axes, of two arrays each together.
    Those over the first axis are another reduction as in `_added`; XLA's library takes four times
    as long for them too, as much as for all codes."""
    added = _added(terms)
    count = added[0].shape[0]
    size = max(k for k in range(1, 2 * SUMMED + 1) if count % k == 0)
    groups = _added([a.reshape(-1, size, *a.shape[1:]) for a in added])
    rows = [row for group in groups for row in group]
    length = 2 * count // size
    return [
        functools.reduce(jnp.add, rows[start : start + length])
        for start in range(0, len(rows), length)
    ]


def _halves(numbers: Sequence[jax.Array], codes: jax.Array) -> list[jax.Array]:
    """Return the even and the odd groups of inputs of codes [I, ...], as [I / 2 size, size, ...]
    each, for numbers as `_written` gives them.

    They seem to depend on the numbers: XLA would make the array of all codes before the loop over
    tokens, and read that in it. No number is above infinity.
    """
    never = (numbers[0][0, 0, 0] > jnp.inf).astype(jnp.int32)
    groups = codes.reshape(-1, 2, numbers[0].shape[-1], *codes.shape[1:])
    return [jax.lax.dynamic_index_in_dim(groups, i + never, 1, keepdims=False) for i in (0, 1)]


def _written(x: jax.Array, size: int) -> Sequence[jax.Array]:
    """Return the even and the odd groups of `size` inputs of x [R, I], as [R, I / 2 size, size]
    each, which XLA has written to memory, since they are a reduction of several arrays: of each
    number and a zero. It fuses anything else into the loops that read it, where a norm would be
    computed again for each output. Products of the same x, as of queries and keys, write it once.
    """
    one_and_zero = np.array([1, 0], np.float32).reshape(2, 1, 1, 1)
    groups = x.reshape(len(x), 1, -1, 2, size) * one_and_zero  # [R, 2, I / 2 size, 2, size]
    return _added([groups[..., i, :] for i in (0, 1)])


def _added(terms: list[jax.Array]) -> Sequence[jax.Array]:
    """Return the sums of arrays [n, m, ...] over their second axis.

    They are one reduction, because XLA makes one loop of that, which is vectorized: 0.04 ns of
    processor time a code on an AMD EPYC with AVX-512. Of a reduction of one array it makes a call
    of a library, which takes four times as long.
    """
    start = (np.float32(0),) * len(terms)
    return jax.lax.reduce(  # type: ignore[no-any-return]
        tuple(terms), start, lambda totals, numbers: tuple(map(jnp.add, totals, numbers)), (1,)
    )
