"""Norms of gradients and updates by layer, of every so many steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import Params, Specs, dotted, rows
from jaxformer.training.program import Metrics, Observe

# Stands in the place of each norm of a step in which none are computed.
NOT_COMPUTED = -1.0


def layered_paths(specs: Specs) -> frozenset[str]:
    """The paths of the parameters that have several layers, on their first axis."""
    return frozenset(path for path, spec in rows(specs).items() if spec.is_stacked)


def squares_by_leaf(tree: Params, layered: frozenset[str]) -> dict[str, jax.Array]:
    """The sum of the squares of each leaf by its path, float32: [], or [L] for one of L layers."""
    squares = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        # The axis of layers stays.
        first = 1 if dotted(path) in layered else 0
        square = jnp.square(leaf.astype(jnp.float32))
        squares[dotted(path)] = square.sum(tuple(range(first, leaf.ndim)))
    return squares


def watch_norms(every: int, layered: frozenset[str] = frozenset()) -> Observe:
    """What `Step.observing` takes to add norms to the metrics of each `every`-th step.

    The metrics are "grad_norm/KIND" and "update_norm/KIND", float32 [], or [L] where the leaves
    have L layers: the Euclidean norm of all leaves of the gradient (before it is clipped), or of
    the update (with its learning rate and decay), whose paths differ in their last name alone. KIND
    is that path without it, as "blocks.attention". `layered` holds the paths of leaves with layers,
    from `layered_paths`. In other steps the norms are -1, and a branch of the program is skipped.
    """

    def observe(step: jax.Array, gradient: Params, update: Params) -> Metrics:
        def norms(gradient: Params, update: Params) -> Metrics:
            return {
                f"{name}/{kind}": jnp.sqrt(square)
                for name, tree in (("grad_norm", gradient), ("update_norm", update))
                for kind, square in _by_kind(squares_by_leaf(tree, layered)).items()
            }

        def nothing(gradient: Params, update: Params) -> Metrics:
            shapes = jax.eval_shape(norms, gradient, update)
            return jax.tree.map(lambda leaf: jnp.full(leaf.shape, NOT_COMPUTED), shapes)

        is_due = (step + 1) % every == 0
        metrics: Metrics = jax.lax.cond(is_due, norms, nothing, gradient, update)
        return metrics

    return observe


def _by_kind(squares: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums of squares of leaves added up by kind; by path where shapes differ within one."""
    sums: dict[str, jax.Array] = {}
    for path, square in squares.items():
        kind = path.rpartition(".")[0] or path
        if kind in sums and sums[kind].shape != square.shape:
            kind = path
        sums[kind] = sums[kind] + square if kind in sums else square
    return sums


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step as numbers: those by layer under their names and ".0", ".1" and so on,
    and without those that were not computed."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        array = np.asarray(value)
        if "/" in name and (array == NOT_COMPUTED).all():
            continue
        if array.ndim:
            numbers |= {f"{name}.{layer}": float(norm) for layer, norm in enumerate(array)}
        else:
            numbers[name] = float(array)
    return numbers
