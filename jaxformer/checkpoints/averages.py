"""Averages of weights that the state of an optimizer holds: which kinds there are, and how they are
read. Nothing here imports optax, so that a model is read without it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.arrays.params import Params, dotted


class AverageState(NamedTuple):
    """The state of `average_of_weights` of `training.optimizers.run_optimizer`: the number of steps
    done (int32), and the `average` of the leaves that learn, float32."""

    steps: jax.Array
    average: Params


class AverageKind(NamedTuple):
    """A row of the kinds of optimizer state that hold an average, which is a NamedTuple.

    Attributes:
      leaves: its field with an array for each leaf that learns.
      scalar: its field with a number.
      formula: (weight, array, number) -> the averaged leaf.
    """

    leaves: str
    scalar: str
    formula: Callable[[Any, Any, Any], Any]


@jax.jit
def _schedule_free(weight: jax.Array, z: jax.Array, b1: jax.Array) -> jax.Array:
    """Return x of y = (1 - b1) z + b1 x (arXiv:2405.15682, equation 3): the weights, y, are where
    the gradient is taken, and x is their average."""
    return (weight - (1.0 - b1) * z) / b1


AVERAGES = (
    AverageKind("average", "steps", lambda weight, average, steps: average),  # AverageState
    AverageKind("z", "b1", _schedule_free),  # optax.contrib.ScheduleFreeState
)


def evaluation_weights(params: Params, optimizer_state: Any) -> Params:
    """Return the weights to evaluate, to sample from and to publish: the average that the state of
    the optimizer holds, or else `params` themselves.

    With `train.ema` that is its average; of schedule-free optimizers it is x (arXiv:2405.15682).
    Leaves that do not learn are those of `params`. Every leaf has the dtype and the sharding of the
    one in `params`; an average is not copied.
    """
    # An optimizer keeps one average at most: `with_average` refuses a second.
    for kind in AVERAGES:
        averages = {
            dotted(path): (leaf, getattr(state, kind.scalar))
            for state in _states(optimizer_state, kind)
            for path, leaf in jax.tree.leaves_with_path(getattr(state, kind.leaves))
        }
        if averages:
            break
    else:
        return params

    def leaf_of(path: Any, weight: Any) -> Any:
        if dotted(path) not in averages:
            return weight
        leaf, scalar = averages[dotted(path)]
        return kind.formula(weight, leaf, scalar).astype(weight.dtype)

    return jax.tree.map_with_path(leaf_of, params)


def keeps_average(optimizer_state: Any) -> bool:
    """Tell whether the state of an optimizer holds an average of the weights."""
    return any(any(True for _ in _states(optimizer_state, kind)) for kind in AVERAGES)


def _states(optimizer_state: Any, kind: AverageKind) -> Iterator[Any]:
    """Return the nodes of an optimizer's state that are of a kind."""

    def is_of_kind(node: Any) -> bool:
        return {kind.leaves, kind.scalar} <= {*getattr(node, "_fields", ())}

    return filter(is_of_kind, jax.tree.leaves(optimizer_state, is_leaf=is_of_kind))
