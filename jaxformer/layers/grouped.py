"""Grouped matrix products, as experts compute them: rows in groups, each times a matrix of its own.

Every kernel maps rows x [M, A] sorted by group, matrices w [E, A, B] and the sizes int32 [E] of the
groups to [M, B]. `xla` is the reference, for every transform and device, with the work of all
experts for all rows; the others have gradients of their own, and no forward-mode derivative. The
rows after the last group belong to none: every kernel gives 0 for them, whatever they contain.
`runs/resolve.py` selects a kernel for a training run.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.exact import TILE, is_exact, with_derivatives_of
from jaxformer.arrays.params import product
from jaxformer.config.settings import ImportedRow, Table
from jaxformer.config.variants import ExpertKernel

# product(x, w, sizes, transposed) -> [M, B], or with w [E, B, A] transposed.
Product = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
# outer(x, dy, sizes) -> [E, A, B]: for each group the product of its rows x^T [A, m] and dy [m, B].
Outer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class GroupedRow(NamedTuple):
    """A kernel: its product and that of the gradients of its matrices, its description, and the
    features that it lacks, by their names in `kernels.features`."""

    product: Product
    outer: Outer
    what: str
    lacks: frozenset[str] = frozenset()


def _dense(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Return the product of all rows with each matrix in turn, of which the rows of its group are
    kept."""
    ends = jnp.cumsum(sizes)
    index = jnp.arange(len(x))
    # JAX's own gradient of w multiplies the rows of no group by 0, and they may be NaN.
    x = jnp.where((index < ends[-1])[:, None], x, 0)
    equation = "MA,BA->MB" if transposed else "MA,AB->MB"

    def add(total: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        matrix, start, end = group
        of_group = (index >= start) & (index < end)
        y = product(equation, x, matrix)
        return jnp.where(of_group[:, None], y, total), None

    zeros = jnp.zeros((len(x), w.shape[1 if transposed else 2]), x.dtype)
    return jax.lax.scan(add, zeros, (w, ends - sizes, ends))[0]


def _dense_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    ends = jnp.cumsum(sizes)
    index = jnp.arange(len(x))

    def of_group(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows = ((index >= bounds[0]) & (index < bounds[1]))[:, None]
        x_of_group, dy_of_group = (jnp.where(rows, array, 0) for array in (x, dy))
        return product("MA,MB->AB", x_of_group, dy_of_group)

    return jax.lax.map(of_group, (ends - sizes, ends))


def _ragged(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    return jax.lax.ragged_dot(x, w.swapaxes(1, 2) if transposed else w, sizes)


def _ragged_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    # The contracted axis is the ragged one: each group's part of the sum is a matrix of its own.
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return jax.lax.ragged_dot_general(x, dy, sizes, dimensions)


class BlocksOfRows(NamedTuple):
    """Groups cut into blocks of `rows` rows, the last of a group maybe shorter: how many there are,
    and for each its group, its first row, and how many of its rows are of the group."""

    rows: int
    number: jax.Array
    group: jax.Array
    start: jax.Array
    real: jax.Array


def row_blocks(m: int, sizes: jax.Array, least: int = 8, most: int = 512) -> BlocksOfRows:
    """Return blocks of about the mean size of a group, of `least` to `most` rows."""
    groups = len(sizes)
    # A power of two, as the kernels for GPUs need.
    rows = min(max(1 << (max(m // groups, 1) - 1).bit_length(), least), most)
    # [E], the blocks of each group.
    counts = -(-sizes // rows)
    ends = jnp.cumsum(counts)
    # The most blocks that there can be: each group has at most one that is not full.
    index = jnp.arange(m // rows + groups, dtype=sizes.dtype)
    after_group = jnp.searchsorted(ends, index, side="right", method="compare_all")
    group = jnp.minimum(after_group, groups - 1)
    # [blocks] each: the first row of a block in its group, and that of the group.
    in_group = (index - (ends - counts)[group]) * rows
    first = (jnp.cumsum(sizes) - sizes)[group]
    return BlocksOfRows(
        rows, ends[-1], group, first + in_group, jnp.clip(sizes[group] - in_group, 0)
    )


def _loop(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiply in a loop over blocks of rows of one group. A block writes all its rows, those that
    are not of its group as 0, and the next group then writes over those of its own."""
    blocks = row_blocks(len(x), sizes)
    if is_exact():
        blocks = row_blocks(len(x), sizes, TILE, TILE)
    width = w.shape[1 if transposed else 2]
    # A block that begins in the last rows reads and writes beyond them.
    padded = jnp.pad(x, ((0, blocks.rows), (0, 0)))
    equation = "MA,BA->MB" if transposed else "MA,AB->MB"

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, blocks.start[i], blocks.rows)
        matrix = jax.lax.dynamic_index_in_dim(w, blocks.group[i], keepdims=False)
        of_block = (jnp.arange(blocks.rows) < blocks.real[i])[:, None]
        y = jnp.where(of_block, product(equation, rows, matrix), 0)
        return jax.lax.dynamic_update_slice_in_dim(out, y, blocks.start[i], 0)

    out = jnp.zeros((len(padded), width), x.dtype)
    return jax.lax.fori_loop(0, blocks.number, add, out)[: len(x)]


def _loop_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    blocks = row_blocks(len(x), sizes)
    x, dy = (jnp.pad(array, ((0, blocks.rows), (0, 0))) for array in (x, dy))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        of_block = jnp.arange(blocks.rows) < blocks.real[i]
        rows, gradient = (
            jax.lax.dynamic_slice_in_dim(array, blocks.start[i], blocks.rows) for array in (x, dy)
        )
        # Both, because what is not of the group may be NaN.
        rows, gradient = (jnp.where(of_block[:, None], array, 0) for array in (rows, gradient))
        y = product("MA,MB->AB", rows, gradient, jnp.float32)
        before = jax.lax.dynamic_index_in_dim(total, blocks.group[i], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + y, blocks.group[i], 0)

    total = jnp.zeros((len(sizes), x.shape[1], dy.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.number, add, total).astype(x.dtype)


GROUPED_KERNELS: Table[GroupedRow] = Table(
    ExpertKernel,
    {
        "xla": GroupedRow(_dense, _dense_outer, "all rows times each expert"),
        "loop": GroupedRow(_loop, _loop_outer, "a loop over blocks of rows of one expert"),
        "ragged": GroupedRow(_ragged, _ragged_outer, "XLA's ragged product"),
        "tpu": ImportedRow("jaxformer.layers.grouped_pallas:MEGABLOX"),
        "gpu": ImportedRow("jaxformer.layers.grouped_pallas:TRITON"),
    },
    besides=("auto",),
)
# In the order in which auto prefers them.
# The reference serves where all others have failed.
PREFERRED_KERNELS = {
    "cpu": ("loop", "xla"),
    "gpu": ("gpu", "loop", "xla"),
    "tpu": ("tpu", "ragged", "loop", "xla"),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradients(name: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return GROUPED_KERNELS[name].product(x, w, sizes, False)


def _forward(name: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _with_gradients(name, x, w, sizes), (x, w, sizes)


def _backward(name: str, arrays: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = arrays
    row = GROUPED_KERNELS[name]
    # dx = dy w^T of the group of each row, and dw = x^T dy of each group.
    return row.product(dy, w, sizes, True), row.outer(x, dy, sizes), None


_with_gradients.defvjp(_forward, _backward)


class GroupedRows(NamedTuple):
    """Rows sorted by group: `sizes` int32 [E] of the groups, and the kernel of their products."""

    sizes: jax.Array
    kernel: str

    def product(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Map x [M, A], w [E, A, B] -> [M, B]: the rows of group e times w[e]."""

        def plain(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
            if self.kernel == "xla":
                return _dense(x, w, sizes)
            return _with_gradients("loop" if self.kernel == "auto" else self.kernel, x, w, sizes)

        def in_tiles(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
            return _loop(x, w, sizes)

        run = plain
        if is_exact():
            run = with_derivatives_of(plain, in_tiles)
        return run(x, w, self.sizes)
