"""Adafactor (arXiv:1804.04235): second moments from the means of a matrix over rows and columns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.arrays.params import Spec, Specs
from jaxformer.config.train import OptimizerConfig
from jaxformer.training.optimizers.update_rule import UpdateRule, map_arrays, matrix_axes

# As in T5X: matrices that are narrower keep full moments, steps are forgotten with 1 - t^-0.8, and
# directions of a larger root mean square than 1 are divided by it.
LEAST_SIDE = 128
DECAY = 0.8
LARGEST_RMS = 1.0
EPSILON = 1e-30


class AdafactorState(NamedTuple):
    """The number of steps, and of each leaf the means of the squared gradient: over the outputs and
    over the inputs of its matrices, with axes of length 1. Where it is not factored, it is one
    array under the leaf's own path, so that it is divided over the devices as the leaf is."""

    steps: jax.Array
    squares: Any


def is_factored(spec: Spec) -> bool:
    """Return whether the inputs and the outputs of a leaf's matrices are both at least
    `LEAST_SIDE`."""
    return spec.is_matrix and min(spec.fan_in, spec.fan_out) >= LEAST_SIDE


def _adafactor(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return the direction g / sqrt(v), clipped for each leaf of a layer and an expert, at the
    schedule's own rate. v of a matrix is row x column / mean(row), with the means over inputs and
    outputs by the names of the axes, so that it is the same however the layers are stacked."""

    def kept_of(spec: Spec, squares: jax.Array) -> Any:
        if not is_factored(spec):
            return squares
        _, left, right = matrix_axes(spec)
        # With axes of length 1, so that both broadcast against the leaf: [layers, inputs, 1] and
        # [layers, 1, outputs].
        return squares.mean(right, keepdims=True), squares.mean(left, keepdims=True)

    def init(params: Any) -> AdafactorState:
        zeros = map_arrays(lambda spec, leaf: kept_of(spec, jnp.zeros_like(leaf)), specs, params)
        return AdafactorState(jnp.int32(0), zeros)

    def update(
        updates: Any, state: AdafactorState, params: Any = None
    ) -> tuple[Any, AdafactorState]:
        # 0 in the first step, so that the moments need no correction of their beginning.
        kept = 1 - (state.steps + 1.0) ** -DECAY

        def squares_of(spec: Spec, g: jax.Array, before: Any) -> Any:
            # No division by 0 where a row or a column has no gradient, as the rows of unused
            # tokens.
            new = kept_of(spec, jnp.square(g) + EPSILON)
            return jax.tree.map(lambda v, mean: kept * v + (1 - kept) * mean, before, new)

        def direction(spec: Spec, g: jax.Array, squares: Any) -> jax.Array:
            _, left, right = matrix_axes(spec)
            if is_factored(spec):
                row, column = squares
                # v = row x column / mean(row) has the means over rows and columns that were kept.
                row = row / row.mean(left, keepdims=True)
                scaled = g * row**-0.5 * column**-0.5
            else:
                scaled = g * squares**-0.5
            # Of each layer and expert alone: the mean is over all axes but those.
            rms = jnp.sqrt(jnp.square(scaled).mean(left + right, keepdims=True))
            return scaled / jnp.maximum(1.0, rms / LARGEST_RMS)

        squares = map_arrays(squares_of, specs, updates, state.squares)
        directions = map_arrays(direction, specs, updates, squares)
        return directions, AdafactorState(optax.safe_increment(state.steps), squares)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


adafactor = UpdateRule(_adafactor)
