"""Sums whose bits depend on nothing but the row that they are of: `model.exact`.

A compiler picks the order of a sum by the shape of the whole array, so that a row has other bits
beside other rows. Here rows are computed in tiles of one shape, in a loop, so that one program of
one shape is all that ever computes a row.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxformer.arrays.sharding import activation, free_axes, on_devices

# Rows of a tile. Fewer make a step of decoding faster, more make long texts faster.
TILE = 16

_is_exact = contextvars.ContextVar("_is_exact", default=False)


@contextlib.contextmanager
def exactly(on: bool) -> Iterator[None]:
    """Compute what is traced inside by rows of tiles, if `on`."""
    token = _is_exact.set(on)
    try:
        yield
    finally:
        _is_exact.reset(token)


def is_exact() -> bool:
    """Return whether products, norms and softmaxes have to be computed in tiles here."""
    return _is_exact.get()


def unknown(x: jax.Array | int, beside: jax.Array) -> jax.Array:
    """Return the whole numbers `x` so that the compiler does not know them, though they are
    constants: it would take a loop apart that it knows to run once, and compile it as a part of
    what is around it, and it computes functions of constants by other rules. `beside` is any array
    of the program."""
    first = beside[(0,) * beside.ndim]
    limits = jnp.iinfo if jnp.issubdtype(first.dtype, jnp.integer) else jnp.finfo
    # 0, since neither a token nor an activation is the least number.
    return x + (first == limits(first.dtype).min).astype(jnp.int32)


def by_tiles(f: Callable[..., jax.Array], x: jax.Array, lead: int, *shared: Any) -> jax.Array:
    """Return `f(x, *shared)` of a function of rows, where the first `lead` axes of x and of the
    result count the rows, and `shared` is the same for all. Its derivatives are those of `f`."""

    def plain(x: jax.Array, *shared: Any) -> jax.Array:
        with exactly(False):
            return f(x, *shared)

    def tiled(x: jax.Array, *shared: Any) -> jax.Array:
        rows = math.prod(x.shape[:lead])
        tiles = -(-rows // TILE)
        flat = x.reshape(rows, *x.shape[lead:])
        flat = jnp.pad(flat, [(0, tiles * TILE - rows)] + [(0, 0)] * (flat.ndim - 1))
        # [tiles, 1, .., TILE, ...]: a tile has as many axes as x.
        ones = (1,) * (lead - 1)
        flat = flat.reshape(tiles, *ones, TILE, *x.shape[lead:])
        of_tile = jax.eval_shape(plain, flat[0], *shared)

        def run(i: jax.Array, out: jax.Array) -> jax.Array:
            tile = jax.lax.dynamic_index_in_dim(flat, i, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(out, plain(tile, *shared), i, 0)

        start = jnp.zeros((tiles, *of_tile.shape), of_tile.dtype)
        out = jax.lax.fori_loop(0, unknown(tiles, x), run, start)
        rest = of_tile.shape[lead:]
        return out.reshape(tiles * TILE, *rest)[:rows].reshape(*x.shape[:lead], *rest)

    def on_mesh(x: jax.Array, *shared: Any) -> jax.Array:
        if not free_axes() or jax.sharding.get_abstract_mesh().size == 1:
            return tiled(x, *shared)
        # Each device computes its rows, with all of what is shared.
        of_rows = PartitionSpec(activation(x.shape, ("batch", *[None] * (x.ndim - 1)))[0])
        of_shared = (PartitionSpec(),) * len(shared)
        return on_devices(tiled, (of_rows, *of_shared), of_rows)(x, *shared)

    out: jax.Array = with_derivatives_of(plain, on_mesh)(x, *shared)
    return out


def with_derivatives_of(plain: Callable[..., Any], exact: Callable[..., Any]) -> Callable[..., Any]:
    """Return `exact` with the derivatives of `plain`, which computes the same up to rounding."""
    run = jax.custom_jvp(exact)

    def tangent(primals: Any, tangents: Any) -> Any:
        return exact(*primals), jax.jvp(plain, primals, tangents)[1]

    run.defjvp(tangent)
    return run


def rounded(x: jax.Array) -> jax.Array:
    """Return `x` as it is in its dtype: XLA keeps numbers of 16 bits in 32 where it fuses what
    writes them with what reads them."""
    if x.dtype.itemsize != 2:
        return x
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def sum_in_order(x: jax.Array, axis: int) -> jax.Array:
    """Return the sum over an axis of a few numbers, one after the other where it is exact."""
    if not is_exact():
        return x.sum(axis)
    terms = jnp.moveaxis(x.astype(jnp.float32), axis, 0)
    return functools.reduce(jnp.add, terms).astype(x.dtype)


def sum_of_powers(x: jax.Array) -> jax.Array:
    """Return the sum of exp(x) over the last axis, [..., V] -> [..., 1]."""

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(x), axis=-1, keepdims=True)

    if not is_exact():
        return total(x)
    return by_tiles(total, x, x.ndim - 1)


def log_softmax(logits: jax.Array, exact: bool) -> jax.Array:
    """Return the log-probabilities [..., V] of logits [..., V]."""
    if not exact:
        return jax.nn.log_softmax(logits, axis=-1)
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    with exactly(True):
        return shifted - jnp.log(sum_of_powers(shifted))
