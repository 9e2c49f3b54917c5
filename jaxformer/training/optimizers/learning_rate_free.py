"""Rules that need no schedule, or no learning rate: schedule-free AdamW and Prodigy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import schedule_free as optax_schedule_free

from jaxformer.arrays.params import Specs
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.update_rule import ADAM, UpdateRule

# The first estimate of Prodigy's d; it grows from there.
FIRST_ESTIMATE = 1e-6


def _mean_square(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Adam without its first moment: the average of the weights takes its place."""
    return optax.scale_by_rms(c.b2, c.eps, eps_in_sqrt=False, bias_correction=True)


def _averaged(
    c: OptimizerConfig, schedule: optax.Schedule, base: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Schedule-free learning (arXiv:2405.15682). The parameters of the train state are y; the state
    of the optimizer holds z and b1, and the weights to evaluate are x = (y - (1 - b1) z) / b1.

    z -= r (g / sqrt(v) + d y), x = (1 - c) x + c z, y = (1 - b1) z + b1 x, with c = r^2 / sum r^2,
    in which r is the largest rate so far.
    """
    if not c.b1:
        raise ConfigError(
            "optimizer.b1=0.0: schedule_free divides by b1, the part of the average in the weights"
            " at which gradients are taken. Set it above 0, such as 0.9."
        )
    # optax counts the steps of its weights from 1, and those of the rate from 0.
    return optax_schedule_free(base, lambda count: schedule(count - 1), b1=c.b1)


class ProdigyState(NamedTuple):
    """`estimate` is d; `numerator` and `sums` are r and s, `start` the parameters x_0."""

    steps: jax.Array
    estimate: jax.Array
    numerator: jax.Array
    sums: Any
    start: Any
    base: Any


class EstimatedMoments(NamedTuple):
    """The means of d g and of (d g)^2."""

    mu: Any
    nu: Any


def _estimated_adam(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """The direction m / (sqrt(v) + d eps) of the means of d g; d is the argument `estimate`."""

    def init(params: Any) -> EstimatedMoments:
        return EstimatedMoments(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    b1, b2, eps = c.b1, c.b2, c.eps

    def update(
        updates: Any, state: EstimatedMoments, params: Any = None, *, estimate: Any, **extra: Any
    ) -> tuple[Any, EstimatedMoments]:
        scaled = jax.tree.map(lambda g: estimate * g, updates)
        mu = optax.tree.update_moment(scaled, state.mu, b1, 1)
        nu = optax.tree.update_moment(scaled, state.nu, b2, 2)
        directions = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + estimate * eps), mu, nu)
        return directions, EstimatedMoments(mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _estimated(
    c: OptimizerConfig, schedule: optax.Schedule, base: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Prodigy (arXiv:2306.06101, algorithm 4): the learning rate is the schedule's, times an
    estimate d of the distance from the first parameters x_0 to a solution.

    With q = sqrt(b2): r = q r + (1 - q) d^2 rate <g, x_0 - x>, s = q s + (1 - q) d^2 rate g, and d
    becomes max(d, r / |s|_1) after the step.
    """
    q = c.b2**0.5
    of_base = optax.with_extra_args_support(base)

    def init(params: Any) -> ProdigyState:
        sums, start = optax.tree.zeros_like(params), jax.tree.map(jnp.copy, params)
        first = jnp.float32(FIRST_ESTIMATE)
        return ProdigyState(jnp.int32(0), first, jnp.float32(0), sums, start, of_base.init(params))

    def update(updates: Any, state: ProdigyState, params: Any = None) -> tuple[Any, ProdigyState]:
        estimate = state.estimate
        moves, base_state = of_base.update(updates, state.base, params, estimate=estimate)
        share = (1 - q) * estimate**2 * schedule(state.steps)
        apart = optax.tree.vdot(updates, optax.tree.sub(state.start, params))
        numerator = q * state.numerator + share * apart
        sums = jax.tree.map(lambda s, g: q * s + share * g, state.sums, updates)
        size = optax.tree.sum(jax.tree.map(lambda s: jnp.abs(s).sum(), sums))
        # Without any gradient so far there is nothing to estimate by.
        seen = jnp.where(size > 0, numerator / jnp.where(size > 0, size, 1), 0)
        after = ProdigyState(
            optax.safe_increment(state.steps),
            jnp.maximum(estimate, seen),
            numerator,
            sums,
            state.start,
            base_state,
        )
        return jax.tree.map(lambda move: estimate * move, moves), after

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


schedule_free = UpdateRule(_mean_square, ("b1", "b2", "eps"), {"nu": False}, _averaged)
prodigy = UpdateRule(_estimated_adam, ("b1", "b2", "eps"), ADAM, _estimated)
