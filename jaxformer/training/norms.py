"""Squares of gradients and updates by leaf and layer."""

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params, Specs, dotted, rows


def layered_paths(specs: Specs) -> frozenset[str]:
    """The paths of the parameters that have several layers, on their first axis."""
    return frozenset(path for path, spec in rows(specs).items() if spec.is_stacked)


def squares_by_leaf(tree: Params, layered: frozenset[str] = frozenset()) -> dict[str, jax.Array]:
    """The sum of the squares of each leaf by its path, float32: [], or [L] for one of L layers."""
    squares = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        # The axis of layers stays.
        first = 1 if dotted(path) in layered else 0
        square = jnp.square(leaf.astype(jnp.float32))
        squares[dotted(path)] = square.sum(tuple(range(first, leaf.ndim)))
    return squares
