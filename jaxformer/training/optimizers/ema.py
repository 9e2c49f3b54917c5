"""An average of the weights after each step, as a transformation at the end of an optimizer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.checkpoints.averages import AverageState, keeps_average
from jaxformer.files import ConfigError


def with_average(
    optimizer: optax.GradientTransformation, decay: float, start: int = 0
) -> optax.GradientTransformation:
    """Return an optimizer, followed by `average_of_weights`; the optimizer itself with a decay of
    0. Its `init` raises ConfigError where the optimizer averages the weights by itself."""
    if not decay:
        return optimizer
    chain = optax.chain(optimizer, average_of_weights(decay, start))

    def init(params: Any) -> Any:
        state = chain.init(params)
        if keeps_average(state[0]):
            raise ConfigError(
                f"train.ema={decay:g} averages the weights, and this optimizer (schedule-free) does"
                " so by itself: set train.ema to 0, or choose another optimizer.name."
            )
        return state

    return optax.GradientTransformationExtraArgs(init, chain.update)  # type: ignore[arg-type]


def average_of_weights(decay: float, start: int = 0) -> optax.GradientTransformation:
    """Return a transformation that changes no update, and whose state holds the average of the
    weights after each step from step `start` + 1 on. It has to be the last one of a chain.

    With d = `decay`, above 0 and at most 1, and p_n the weights after step `start` + n, the average
    is the exponential one with Adam's correction of the beginning (arXiv:1412.6980, section 3): the
    mean of p_1 to p_n with weights in proportion to d^(n - 1), ..., d, 1, so that the initial
    weights have no part in it. It is kept as that mean, in float32:

        a_1 = p_1,    a_n = a_(n-1) + w_n (p_n - a_(n-1)),    w_n = (1 - d) / (1 - d^n).

    With d = 1, w_n = 1 / n and a_n is the plain mean (Polyak and Ruppert). Until step `start` the
    average is the weights themselves; before the first step, the initial ones. A step that
    `make_step` leaves out is not counted.
    """

    def init(params: Any) -> AverageState:
        # Copies, because a step donates both the weights and the average.
        copies = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
        return AverageState(jnp.int32(0), copies)

    def update(updates: Any, state: AverageState, params: Any = None) -> tuple[Any, AverageState]:
        if params is None:
            raise ValueError(optax.NO_PARAMS_MSG)  # type: ignore[attr-defined]
        steps = optax.safe_increment(state.steps)
        count = jnp.maximum(steps - start, 1)
        # w_n. 1 - d^n is -expm1(n log d), which does not cancel where d is near 1.
        number = count.astype(jnp.float32)
        share = 1 / number if decay == 1 else (1 - decay) / -jnp.expm1(number * math.log(decay))

        def moved(average: jax.Array, new: jax.Array) -> jax.Array:
            new = new.astype(jnp.float32)
            return jnp.where(count == 1, new, average + share * (new - average))

        weights = optax.apply_updates(params, updates)
        return updates, AverageState(steps, jax.tree.map(moved, state.average, weights))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]
