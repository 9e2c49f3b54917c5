"""The cross-entropy of many tokens in tiles, each with its gradients in the same pass, so that the
logits of all tokens are never in memory together."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec

from jaxformer.arrays.params import CustomLeaf, contract, is_custom
from jaxformer.arrays.sharding import ACTIVATION_RULES, PARAMETERS, explicit_axes, free_axes
from jaxformer.losses.logits import (
    Extras,
    ObjectiveAndNats,
    gathered,
    logits_of,
    slope_of,
    summed,
    sums_of_logits,
)


def _tiles(a: jax.Array, tile: int) -> jax.Array:
    """[B, T, ...] to [tiles, B, tile, ...], padded with zeros; their weight is 0."""
    padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % tile)) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(padded.reshape(a.shape[0], -1, tile, *a.shape[2:]), 1, 0)


class TokenRows(NamedTuple):
    """What belongs to each row: x [B, T, D], targets and weights [B, T]."""

    x: jax.Array
    targets: jax.Array
    weights: jax.Array

    def tiles(self, tile: int) -> "TokenRows":
        return TokenRows(*(_tiles(array, tile) for array in self))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def tiled(
    x: jax.Array,
    head: Any,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    extras: Extras,
    tile: int,
) -> ObjectiveAndNats:
    def sums_of(rows: TokenRows, matrix: Any, bias: jax.Array | None) -> Any:
        def add(total: ObjectiveAndNats, item: TokenRows) -> tuple[ObjectiveAndNats, None]:
            logits = logits_of(item.x, matrix, bias)
            objective, nats, _ = sums_of_logits(logits, item.targets, item.weights, extras, taken)
            return (total[0] + objective, total[1] + nats), None

        zero = jnp.float32(0)
        sums, _ = jax.lax.scan(add, (zero, zero), rows.tiles(tile))
        return sums, None, [None, None]

    taken = target_logits()
    sums, _, _ = by_device(sums_of, TokenRows(x, targets, weights), head.astype(x.dtype), bias)
    return sums  # type: ignore[no-any-return]


def tiled_forward(
    x: Any, head: Any, bias: Any, targets: Any, weights: Any, extras: Extras, tile: int
) -> tuple[ObjectiveAndNats, Any]:
    """The sums and their gradients by x, head and bias, from one set of logits per tile.

    The objective is one scalar, so the backward pass only scales gradients that are made here,
    where the logits of a tile [B, tile, V] are at hand. They are never stored or computed again.
    """
    learns = perturbed(head)
    rows = TokenRows(*(values_of(a) for a in (x, targets, weights)))
    return tiled_gradients(rows, values_of(head), values_of(bias), learns, extras, tile)


def tiled_gradients(
    rows: TokenRows,
    head: Any,
    bias: jax.Array | None,
    learns: list[bool],
    extras: Extras,
    tile: int,
) -> tuple[ObjectiveAndNats, Any]:
    """The sums, and what `tiled_backward` makes the gradients of; `learns` says of which leaves of
    the head there is one."""
    product: Any = _matrix_product
    if not any(learns):
        product = _fixed_product
    elif is_custom(head):
        product = functools.partial(_custom_product, learns=learns)
    taken = target_logits()

    def gradients_of(rows: TokenRows, matrix: Any, bias: jax.Array | None) -> Any:
        def add(total: Any, item: TokenRows) -> tuple[Any, jax.Array]:
            logits, pull = product(item.x, matrix)
            logits = logits if bias is None else logits + bias
            objective, nats, shares = sums_of_logits(
                logits, item.targets, item.weights, extras, taken
            )
            d_logits = slope_of(shares, item.targets, item.weights, extras)
            d_rows, d_head = pull(d_logits.astype(item.x.dtype))
            d_bias = None if bias is None else d_logits.sum((0, 1))
            sums = (objective, nats, d_head, d_bias)
            return jax.tree.map(jnp.add, total, sums), d_rows

        zero, parts = jnp.float32(0), (_learning(matrix, learns), bias)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), parts)
        # The carry holds the sums and the gradients of head and bias in float32, which every tile
        # adds to; the gradient of x is one piece per tile, [tiles, B, tile, D] -> [B, T, D].
        (objective, nats, *slopes), d_x = jax.lax.scan(
            add, (zero, zero, *nothing), rows.tiles(tile)
        )
        shape = rows.x.shape
        d_x = jnp.moveaxis(d_x, 0, 1).reshape(shape[0], -1, shape[2])[:, : shape[1]]
        return (objective, nats), d_x, slopes

    own = head if is_custom(head) else head.astype(rows.x.dtype)
    sums, d_x, slopes = by_device(gradients_of, rows, own, bias)
    given = iter(slopes[0])
    of_parts = [next(given) if kept else None for kept in learns]
    return sums, (d_x, of_parts, slopes[1], head, bias)


def _is_primal(entry: Any) -> bool:
    return isinstance(entry, CustomVJPPrimal)


def perturbed(head: Any) -> list[bool]:
    """Whether anything is differentiated by each leaf: an output layer that does not learn, as
    below an adapter, has no gradient."""
    return [entry.perturbed for entry in jax.tree.leaves(head, is_leaf=_is_primal)]


def values_of(entries: Any) -> Any:
    """The arrays of a `custom_vjp` with symbolic zeros, which come with such a bool."""
    return jax.tree.map(lambda entry: entry.value, entries, is_leaf=_is_primal)


def target_logits() -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A gather, unless the mesh in force splits the vocabulary."""
    axes = free_axes()
    split = explicit_axes() or any(axes.get(name, 1) > 1 for name in PARAMETERS["vocab"])
    return summed if split else gathered


def by_device(run: Callable[..., Any], rows: TokenRows, head: Any, bias: jax.Array | None) -> Any:
    """`run(rows, head, bias)` -> (sums, gradient of x or None, gradients of head and bias or None),
    by each device for its own rows.

    So the head is gathered once, and its gradients are added up over the devices once, not in every
    tile.
    """
    axes = free_axes()
    over = tuple(name for name in ACTIVATION_RULES["batch"] if axes.get(name, 1) > 1)
    split = math.prod(axes[name] for name in over)
    if explicit_axes() or split == 1 or rows.x.shape[0] % split:
        return run(rows, head, bias)

    # The gradient of the matrix [V, D] goes to where the parameter is, which is split along D.
    columns = tuple(axis for axis in over if axis in PARAMETERS["embed"])
    fits = columns and not is_custom(head) and head.shape[1] % axes[columns[0]] == 0
    whole, by_row = PartitionSpec(), PartitionSpec(over)

    def local(rows: TokenRows, head: Any, bias: jax.Array | None) -> Any:
        sums, d_x, slopes = run(rows, head, bias)
        if fits and slopes[0]:
            ((d_matrix,), d_bias), (column,) = slopes, columns
            part = jax.lax.psum_scatter(d_matrix, column, scatter_dimension=1, tiled=True)
            # The step goes on when the sum is made, and not with the whole gradient in memory until
            # its end; some TPU topologies sum all of it and slice the sum.
            d_x, part = jax.lax.optimization_barrier((d_x, part))
            rest = tuple(axis for axis in over if axis != column)
            slopes = [[jax.lax.psum(part, rest)], jax.lax.psum(d_bias, over)]
        else:
            slopes = jax.lax.psum(slopes, over)
        return jax.lax.psum(sums, over), d_x, slopes

    of_matrix = PartitionSpec(None, columns) if fits else whole
    return jax.shard_map(
        local,
        in_specs=(by_row, whole, whole),
        out_specs=(whole, by_row, [of_matrix, whole]),
        axis_names=set(over),
        check_vma=False,
    )(rows, head, bias)


Pull = Callable[[jax.Array], tuple[jax.Array, list[jax.Array]]]


def _matrix_product(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Pull]:
    """The logits of a tile, and the function from their gradient to that of rows and, in float32,
    of the matrix."""

    def pull(d_logits: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        d_rows = contract("BTV,VD->BTD", d_logits, matrix, to=("batch", None, None))
        # [B tile, V]^T [B tile, D] -> [V, D]
        flat, d_flat = (a.reshape(-1, a.shape[-1]) for a in (rows, d_logits))
        over_tokens, dtype = (((0,), (0,)), ((), ())), jnp.float32
        d_matrix = jax.lax.dot_general(d_flat, flat, over_tokens, preferred_element_type=dtype)
        return d_rows, [d_matrix]

    return logits_of(rows, matrix, None), pull


def _fixed_product(rows: jax.Array, head: Any) -> tuple[jax.Array, Pull]:
    """`_matrix_product` of an output layer that does not learn, an array or a custom leaf."""
    logits, back = jax.vjp(lambda rows: logits_of(rows, head.astype(rows.dtype), None), rows)
    return logits, lambda d_logits: (*back(d_logits.astype(jnp.float32)), [])


def _custom_product(
    rows: jax.Array, head: CustomLeaf, learns: list[bool]
) -> tuple[jax.Array, Pull]:
    """`_matrix_product` of a custom leaf; its parts that learn have a gradient."""
    leaves, treedef = jax.tree.flatten(head)

    def of_parts(rows: jax.Array, parts: list[jax.Array]) -> jax.Array:
        given = iter(parts)
        whole = [next(given) if kept else leaf for leaf, kept in zip(leaves, learns, strict=True)]
        return logits_of(rows, jax.tree.unflatten(treedef, whole).astype(rows.dtype), None)

    logits, back = jax.vjp(of_parts, rows, _learning(head, learns))

    def pull(d_logits: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        d_rows, d_parts = back(d_logits.astype(jnp.float32))
        return d_rows, [part.astype(jnp.float32) for part in d_parts]

    return logits, pull


def _learning(head: Any, learns: list[bool]) -> list[jax.Array]:
    return [leaf for leaf, kept in zip(jax.tree.leaves(head), learns, strict=True) if kept]


def tiled_backward(
    extras: Extras, tile: int, saved: Any, slopes: ObjectiveAndNats
) -> tuple[Any, ...]:
    d_x, of_parts, d_bias, head, bias = saved
    slope = slopes[0]  # nats has no gradient
    if isinstance(slope, SymbolicZero):  # the objective is not used
        slope = jnp.zeros(slope.shape, slope.dtype)
    of_head = []
    leaves, treedef = jax.tree.flatten(head)
    for leaf, own in zip(leaves, of_parts, strict=True):
        if own is not None:
            of_head.append((slope * own).astype(leaf.dtype))
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            of_head.append(jnp.zeros_like(leaf))  # which nothing reads
        else:  # float0 is JAX's type of the gradient of integers
            of_head.append(np.zeros(leaf.shape, jax.dtypes.float0))
    of_bias = None if bias is None else (slope * d_bias).astype(bias.dtype)
    of_x = (slope * d_x).astype(d_x.dtype)
    return of_x, jax.tree.unflatten(treedef, of_head), of_bias, None, None


tiled.defvjp(tiled_forward, tiled_backward, symbolic_zeros=True)
