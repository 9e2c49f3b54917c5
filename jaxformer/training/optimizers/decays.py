"""How weights decay, as a table; and updates that are masked by the sign of the gradient."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.arrays.params import Spec, Specs
from jaxformer.config.optimizer import DecayKind, OptimizerConfig
from jaxformer.config.settings import Table
from jaxformer.training.optimizers.groups import Factors
from jaxformer.training.optimizers.update_rule import map_arrays

# (update, parameter, strength) -> what is added to the update before the learning rate multiplies
# it and it is subtracted. The strength is a number for each leaf.
Decay = Callable[[jax.Array, jax.Array, float], jax.Array]


def _decoupled(config: OptimizerConfig, factors: Factors) -> float:
    return config.weight_decay * factors.decay


def _independent(config: OptimizerConfig, factors: Factors) -> float:
    """The learning rate that multiplies it has the peak and the factor of the leaf in it."""
    peak = config.learning_rate * factors.rate
    return config.weight_decay * factors.decay / peak if peak else 0.0


def _everywhere(update: jax.Array, parameter: jax.Array, strength: float) -> jax.Array:
    return strength * parameter


def _towards_zero(update: jax.Array, parameter: jax.Array, strength: float) -> jax.Array:
    return jnp.where(update * parameter >= 0, strength * parameter, 0)


Strength = Callable[[OptimizerConfig, Factors], float]

# With the learning rate r_t, its peak r, the weight decay d, the update u and the parameter w:
DECAYS: Table[tuple[Strength, Decay]] = Table(
    DecayKind,
    {
        # w -= r_t (u + d w)  (arXiv:1711.05101, as in PyTorch and optax)
        "decoupled": (_decoupled, _everywhere),
        # w -= r_t u + (r_t / r) d w  (arXiv:1711.05101, as in its text)
        "independent": (_independent, _everywhere),
        # w -= r_t (u + d [u w >= 0] w)  (arXiv:2510.12402)
        "cautious": (_decoupled, _towards_zero),
    },
)


def weight_decay(config: OptimizerConfig, factors: Any) -> optax.GradientTransformation:
    """Adds the decay of every leaf to its update. `factors` are those of `leaf_factors`."""
    strength, decay = DECAYS[config.decay_kind]

    def add(factors_of_leaf: Factors, update: jax.Array, parameter: jax.Array) -> jax.Array:
        amount = strength(config, factors_of_leaf)
        return update + decay(update, parameter, amount) if amount else update

    return optax.stateless(lambda updates, params: map_arrays(add, factors, updates, params))


def cautious(
    rule: optax.GradientTransformation, specs: Specs
) -> optax.GradientTransformationExtraArgs:
    """The rule's update u where it has the sign of the gradient g, and 0 elsewhere (cautious
    updates, arXiv:2411.16085).

    m = [u g > 0] of one matrix or vector with n numbers: u -> n / (sum(m) + 1) m u.
    """
    rule = optax.with_extra_args_support(rule)

    def mask(spec: Spec, update: jax.Array, gradient: jax.Array) -> jax.Array:
        single = tuple(i for i, axis in enumerate(spec.axes) if axis not in spec.batch)
        size = math.prod(spec.shape[i] for i in single)
        kept = (update * gradient > 0).astype(update.dtype)
        return update * kept * (size / (kept.sum(single, keepdims=True) + 1))

    def masked(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        directions, state = rule.update(updates, state, params, **extra)
        return map_arrays(mask, specs, directions, updates), state

    return optax.GradientTransformationExtraArgs(rule.init, masked)
