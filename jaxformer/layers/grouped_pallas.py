"""Grouped matrix products by Pallas: megablox of JAX for TPUs, and kernels of our own for GPUs.

Both multiply rows only by the matrix of their group. What they compute beside that are the tiles of
rows at the borders of groups: a tile more for each group at most.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxformer.arrays.sharding import platform
from jaxformer.layers.grouped import GroupedRow, row_blocks
from jaxformer.layers.pallas import LANES

# A TPU has vector registers of 8 x LANES floats, two of which have so many rows of 16 bits. Blocks
# are multiples of that or all of an axis.
SUBLANES = 16
# Bytes of the blocks of a kernel in vector memory, of 16 MiB that it may use on a v5e.
VECTOR_MEMORY = 12 * 2**20
# The border of a group costs one tile of rows more, and there are at least so many for each group.
TILES_OF_GROUP = 12


def _halves(size: int) -> list[int]:
    """Return the lengths of blocks of an axis: all of it, or multiples of LANES that divide it,
    padded."""
    blocks = -(-size // LANES)
    return [size, *(LANES * n for n in range(1, blocks) if blocks % n == 0)]


def _tile_of_rows(m: int, groups: int) -> int:
    share = max(m // (groups * TILES_OF_GROUP), 1)
    fitting = 1 << (share.bit_length() - 1)
    return min(max(fitting, 128), 512, -(-m // SUBLANES) * SUBLANES)


def product_tiles(m: int, k: int, n: int, groups: int, itemsize: int) -> tuple[int, int, int]:
    """Return the rows, the depth and the width of a block of x [M, K] times w [E, K, N]: those that
    read the fewest bytes. A matrix is read once if a block has all of its depth."""
    rows = _tile_of_rows(m, groups)

    def memory(depth: int, width: int) -> int:
        # Blocks are there twice, so that one is read during the product of the one before.
        blocks = 2 * itemsize * (rows * depth + depth * width + rows * width)
        return blocks + 2 * 4 * rows * width

    def read(sizes: tuple[int, int]) -> int:
        depth, width = sizes
        # A matrix that is cut in depth is read again for each tile of rows.
        reads = groups if depth == k else m // rows + groups
        # Numbers; x is read once for each column of blocks.
        return m * k * -(-n // width) + reads * k * n

    pairs = itertools.product(_halves(k), _halves(n))
    fitting = [sizes for sizes in pairs if memory(*sizes) <= VECTOR_MEMORY]
    return rows, *min(fitting, key=read)


def outer_tiles(m: int, k: int, n: int, groups: int, itemsize: int) -> tuple[int, int, int]:
    """Return the rows, and the sides of a block of x^T dy [E, K, N] for x [M, K] and dy [M, N]."""
    rows = _tile_of_rows(m, groups)

    # Two blocks of each input and of the output, one that is read or written beside the one that is
    # computed; inputs once more and the sum twice in float32.
    def memory(depth: int, width: int) -> int:
        inputs = (2 * itemsize + 4) * rows * (depth + width)
        return inputs + (2 * itemsize + 2 * 4) * depth * width

    pairs = itertools.product(_halves(k), _halves(n))
    fitting = [sizes for sizes in pairs if memory(*sizes) <= VECTOR_MEMORY]
    # x is read once for each column of blocks, and dy once for each row of blocks.
    return rows, *min(
        fitting, key=lambda sizes: m * (k * -(-n // sizes[1]) + n * -(-k // sizes[0]))
    )


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % rows), (0, 0)))


def tpu_product(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
    """Map x [M, A], w [E, A, B] (transposed: [E, B, A]) -> [M, B], 0 in the rows of no group."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    width = w.shape[1 if transposed else 2]
    m, depth = x.shape
    tiles = product_tiles(m, depth, width, len(w), x.dtype.itemsize)
    y = gmm(
        _padded(x, tiles[0]),
        w,
        sizes.astype(jnp.int32),
        preferred_element_type=x.dtype,
        tiling=tiles,
        transpose_rhs=transposed,
        interpret=platform() == "cpu",
    )[: len(x)]
    # The kernel leaves the rows of no group unwritten.
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], y, 0)


def tpu_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """Map x [M, A], dy [M, B] -> [E, A, B], 0 for a group without rows."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    m, depth = x.shape
    tiles = outer_tiles(m, depth, dy.shape[1], len(sizes), x.dtype.itemsize)
    dw: jax.Array = tgmm(
        _padded(x, tiles[0]).swapaxes(0, 1),
        _padded(dy, tiles[0]),
        sizes.astype(jnp.int32),
        preferred_element_type=x.dtype,
        tiling=tiles,
        interpret=platform() == "cpu",
    )
    return dw


class _Tiles(NamedTuple):
    """The rows, the depth and the width of the blocks of a GPU, and its warps for one."""

    rows: int
    depth: int
    width: int
    warps: int


def _gpu_tiles(rows: int, depth: int, width: int, dtype: Any) -> _Tiles:
    """Return blocks that fit into 227 KiB of shared memory in three stages, and into the registers.
    They are powers of two of at least 16, which matrix units take."""

    def fitting(size: int, most: int) -> int:
        return min(max(1 << (size - 1).bit_length(), 16), most)

    if dtype == jnp.float32:
        return _Tiles(fitting(rows, 128), fitting(depth, 32), fitting(width, 64), 8)
    widest = 256 if rows >= 128 else 128
    return _Tiles(fitting(rows, 128), fitting(depth, 64), fitting(width, widest), widest // 32)


def _dot(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    # Without a precision Triton rounds float32 to TF32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product: jax.Array = triton.dot(a, b, precision=precision, **transposed)
    return product


def _block(ref: Any, start: tuple[Any, ...], shape: tuple[int, int], end: Any) -> tuple[Any, Any]:
    """Return a block of the last two axes of an array, and which of its elements are in rows before
    `end` and in columns of the array."""
    *leading, row, column = start
    inside = (row + jnp.arange(shape[0]) < end)[:, None]
    if ref.shape[-1] % shape[1]:
        inside &= (column + jnp.arange(shape[1]) < ref.shape[-1])[None]
    block = ref.at[(*leading, pl.ds(row, shape[0]), pl.ds(column, shape[1]))]
    return block, jnp.broadcast_to(inside, shape)


def _load(ref: Any, start: tuple[Any, ...], shape: tuple[int, int], end: Any) -> jax.Array:
    """Return a block, 0 outside."""
    block, inside = _block(ref, start, shape, end)
    return triton.load(block, mask=inside, other=0)


def _store(ref: Any, start: tuple[Any, ...], values: jax.Array, end: Any) -> None:
    block, inside = _block(ref, start, (values.shape[0], values.shape[1]), end)
    triton.store(block, values.astype(ref.dtype), mask=inside)


def gpu_product(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
    """Map x [M, A], w [E, A, B] (transposed: [E, B, A]) -> [M, B].

    A program of the grid has a block of rows of one group, and stores those alone. The rows after
    the last group are group E, which has no matrix, and are 0.
    """
    all_sizes = jnp.append(sizes, len(x) - sizes.sum(dtype=sizes.dtype))
    rows, _, group, start, real = row_blocks(len(x), all_sizes, 16, 128)
    depth = x.shape[1]
    width = w.shape[1 if transposed else 2]
    tiles = _gpu_tiles(rows, depth, width, x.dtype)

    def grouped_product(
        group_ref: Any, start_ref: Any, real_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any
    ) -> None:
        column = pl.program_id(0) * tiles.width
        block = pl.program_id(1)
        first = start_ref[block]
        end = first + real_ref[block]
        # The rows of no group read the last matrix in no step.
        matrix = jnp.minimum(group_ref[block], len(w) - 1)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            k = step * tiles.depth
            a = _load(x_ref, (first, k), (tiles.rows, tiles.depth), end)
            if transposed:
                b = _load(w_ref, (matrix, column, k), (tiles.width, tiles.depth), width)
            else:
                b = _load(w_ref, (matrix, k, column), (tiles.depth, tiles.width), depth)
            return total + _dot(a, b, trans_b=transposed)

        @pl.when(real_ref[block] > 0)
        def _() -> None:
            has_matrix = (group_ref[block] < len(w)).astype(jnp.int32)
            steps = has_matrix * pl.cdiv(depth, tiles.depth)
            zeros = jnp.zeros((tiles.rows, tiles.width), jnp.float32)
            total = jax.lax.fori_loop(0, steps, add, zeros)
            _store(y_ref, (first, column), total, end)

    y: jax.Array = pl.pallas_call(
        grouped_product,
        jax.ShapeDtypeStruct((len(x), width), x.dtype),
        grid=(pl.cdiv(width, tiles.width), len(group)),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=3),
        interpret=platform() == "cpu",
    )(group, start, real, x, w)
    return y


def gpu_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """Map x [M, A], dy [M, B] -> [E, A, B], 0 for a group without rows. A program of the grid has a
    block of one matrix, for which it reads all rows of the group, so that the order of the sum is
    always the same."""
    depth = x.shape[1]
    width = dy.shape[1]
    # The rows that are summed are the depth of this product.
    tiles = _gpu_tiles(depth, len(x), width, x.dtype)
    columns = pl.cdiv(width, tiles.width)

    def grouped_outer(end_ref: Any, size_ref: Any, x_ref: Any, dy_ref: Any, dw_ref: Any) -> None:
        tile = pl.program_id(0)
        group = pl.program_id(1)
        # The blocks of a matrix are numbered row by row.
        row = tile // columns * tiles.rows
        column = tile % columns * tiles.width
        end = end_ref[group]
        start = end - size_ref[group]

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            first = start + step * tiles.depth
            a = _load(x_ref, (first, row), (tiles.depth, tiles.rows), end)
            b = _load(dy_ref, (first, column), (tiles.depth, tiles.width), end)
            return total + _dot(a, b, trans_a=True)

        steps = pl.cdiv(size_ref[group], tiles.depth)
        zeros = jnp.zeros((tiles.rows, tiles.width), jnp.float32)
        total = jax.lax.fori_loop(0, steps, add, zeros)
        _store(dw_ref, (group, row, column), total, depth)

    dw: jax.Array = pl.pallas_call(
        grouped_outer,
        jax.ShapeDtypeStruct((len(sizes), depth, width), x.dtype),
        grid=(pl.cdiv(depth, tiles.rows) * columns, len(sizes)),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=3),
        interpret=platform() == "cpu",
    )(jnp.cumsum(sizes), sizes, x, dy)
    return dw


MEGABLOX = GroupedRow(tpu_product, tpu_outer, "Pallas megablox", frozenset({"off tpu"}))
TRITON = GroupedRow(
    gpu_product, gpu_outer, "Pallas kernels by Triton", frozenset({"off gpu", "before Ampere"})
)
