"""Squares of gradients and updates by leaf."""

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params, dotted


def squares_by_leaf(tree: Params) -> dict[str, jax.Array]:
    """The sum of the squares of each leaf by its path, float32."""
    return {
        dotted(path): jnp.square(leaf.astype(jnp.float32)).sum()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
