"""The optimizer of a run: its rule from the table, the decay of weights, the learning rate of each
leaf, and an average of the weights after each step.

A rule of optax is a row here. One of our own has a file with its row, which this one imports.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.arrays.params import Spec, Specs, map_specs
from jaxformer.checkpoints.averages import AverageState, keeps_average
from jaxformer.config.settings import Table
from jaxformer.config.train import OptimizerConfig, OptimizerName
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.adafactor import adafactor
from jaxformer.training.optimizers.groups import Group, leaf_groups
from jaxformer.training.optimizers.moments import with_stored_moments
from jaxformer.training.optimizers.muon import muon, normuon
from jaxformer.training.optimizers.soap import soap
from jaxformer.training.optimizers.sophia import sophia
from jaxformer.training.optimizers.update_rule import (
    ADAM,
    UpdateRule,
    map_arrays,
    matrix_axes,
    of_entries,
)


def _schedule_free(
    c: OptimizerConfig, schedule: optax.Schedule, base: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return schedule-free learning (arXiv:2405.15682). The parameters of the train state are y;
    the state of the optimizer holds z and b1, and the weights to evaluate are x = (y - (1 - b1) z)
    / b1.

    The average takes the place of Adam's first moment.
    z -= r (g / sqrt(v) + d y), x = (1 - c) x + c z, y = (1 - b1) z + b1 x, with c = r^2 / sum r^2,
    in which r is the largest rate so far.
    """
    if not c.b1:
        raise ConfigError(
            "optimizer.b1=0.0: schedule_free divides by b1, the part of the average in the weights"
            " at which gradients are taken. Set it above 0, such as 0.9."
        )
    # optax counts the steps of its weights from 1, and those of the rate from 0.
    return optax.contrib.schedule_free(base, lambda count: schedule(count - 1), b1=c.b1)


OPTIMIZERS: Table[UpdateRule] = Table(
    OptimizerName,
    {
        "adamw": UpdateRule(
            lambda c, specs: optax.scale_by_adam(c.b1, c.b2, c.eps),
            ("b1", "b2", "eps"),
            ADAM,
            width_factor=of_entries,
        ),
        "adafactor": adafactor,
        "lion": UpdateRule(
            lambda c, specs: optax.scale_by_lion(c.b1, c.b2),
            ("b1", "b2"),
            {"mu": True},
            width_factor=of_entries,
        ),
        "sgd": UpdateRule(lambda c, specs: optax.trace(c.b1), ("b1",), {"trace": True}),
        "muon": muon,
        "normuon": normuon,
        "soap": soap,
        "sophia": sophia,
        "schedule_free": UpdateRule(
            lambda c, specs: optax.scale_by_rms(
                c.b2, c.eps, eps_in_sqrt=False, bias_correction=True
            ),
            ("b1", "b2", "eps"),
            {"nu": False},
            _schedule_free,
        ),
    },
)


def unread(config: OptimizerConfig) -> list[str]:
    """Return the settings of rules, with their values, that differ from the default and that the
    chosen rule does not read."""
    changed = dict[str, None]()  # in their order, each once
    for row in OPTIMIZERS.values():
        for name in row.reads:
            value = getattr(config, name)
            # A default says nothing about what the user meant.
            is_default = value == getattr(OptimizerConfig, name)
            if not is_default and name not in OPTIMIZERS[config.name].reads:
                changed[f"optimizer.{name}={value}"] = None
    return [*changed]


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, specs: Specs, seed: int = 0
) -> optax.GradientTransformation:
    """Return clipping by global norm, the update rule, weight decay, and the learning rate with the
    factor of each leaf; leaves with a `Spec.sign_rate` move by that against the sign of their
    gradient. `seed` is that of the rounding of optimizer.moments."""
    row = OPTIMIZERS[config.name]
    factors = leaf_groups(config, specs)
    # Gradients are smaller by the growth of the width, and so is eps (arXiv:2505.01618, table 1).
    growth = max((spec.growth[0] for spec in jax.tree.leaves(specs) if spec.trainable), default=1)
    of_rule = config
    if growth != 1:
        of_rule = replace(config, eps=config.eps / growth)
    rule = row.rule(of_rule, specs)
    if config.moments != "float32":
        if not row.moments:
            rules = ", ".join(name for name in OPTIMIZERS if OPTIMIZERS[name].moments)
            raise ConfigError(
                f"optimizer.moments={config.moments!r} rounds moments of the shape of a parameter,"
                f" and optimizer.name={config.name!r} has none: choose one of {rules}, or float32."
            )
        rule = with_stored_moments(rule, row.moments, config.moments, specs, seed)
    if config.cautious:
        rule = cautious(rule, specs)
    steps = [
        rule,
        # Before the decay, which has the same strength at all widths.
        *_scale_by_factors(width_factors(config, specs)),
        weight_decay(config, factors),
        optax.scale_by_learning_rate(schedule),
        *_scale_by_factors(jax.tree.map(lambda leaf: leaf.rate, factors)),
    ]
    # Such a rule moves by the step itself, with its decay and its rate.
    if row.around:
        steps = [row.around(config, schedule, optax.chain(*steps))]
    norm = config.clip_norm
    # Of all gradients together, before any rule sees them.
    clip = optax.clip_by_global_norm(norm) if norm else optax.identity()
    optimizer = optax.chain(clip, *steps)
    rates = {spec.sign_rate for spec in jax.tree.leaves(specs) if spec.trainable} - {0.0}
    if not rates:
        return optimizer
    signs = {rate: optax.chain(optax.scale_by_sign(), optax.scale(-rate)) for rate in rates}
    # 0 labels the leaves that the optimizer moves, all others those of one rate.
    labels = map_specs(lambda _, spec: spec.sign_rate, specs)
    return optax.partition({0.0: optimizer, **signs}, labels)


def width_factors(config: OptimizerConfig, specs: Specs) -> dict[str, Any]:
    """Return the factor of the directions of each leaf, with which one learning rate holds at all
    widths, in the nesting of the table; 1 without `Spec.base_fans`.

    It multiplies the directions and not the weight decay, which has the same strength at all
    widths: scaled down with them it would vanish in wide models (arXiv:2405.13698; as in table 1 of
    arXiv:2505.01618, where the decay grows as the rate falls).
    """
    factor = OPTIMIZERS[config.name].width_factor
    if all(spec.base_fans is None for spec in jax.tree.leaves(specs)):
        return map_specs(lambda _, spec: 1.0, specs)
    if factor is None:
        able = [name for name, row in OPTIMIZERS.items() if row.width_factor]
        raise ConfigError(
            f"optimizer.name={config.name!r} has no rule by which its learning rate holds at all"
            f" widths, as model.parametrization='mup' asks: use one of {', '.join(able)}, or the"
            " parametrization 'standard'."
        )
    return map_specs(lambda _, spec: factor(config, spec), specs)


def weight_decay(config: OptimizerConfig, factors: Any) -> optax.GradientTransformation:
    """Add the decay of every leaf to its update, before the learning rate multiplies both
    (arXiv:1711.05101). `factors` are those of `leaf_groups`."""

    def add(group: Group, update: jax.Array, parameter: jax.Array) -> jax.Array:
        amount = config.weight_decay * group.decay
        if amount:
            return update + amount * parameter
        return update

    return optax.stateless(lambda updates, params: map_arrays(add, factors, updates, params))


def cautious(
    rule: optax.GradientTransformation, specs: Specs
) -> optax.GradientTransformationExtraArgs:
    """Return a rule whose update is that of `rule`, u, where it has the sign of the gradient g, and
    0 elsewhere (cautious updates, arXiv:2411.16085).

    m = [u g > 0] of one matrix or vector with n numbers: u -> n / (sum(m) + 1) m u.
    """
    rule = optax.with_extra_args_support(rule)

    def mask(spec: Spec, update: jax.Array, gradient: jax.Array) -> jax.Array:
        _, left, right = matrix_axes(spec)
        single = left + right
        size = math.prod(spec.shape[i] for i in single)
        # Larger by n / (kept + 1), so that the update keeps about its size.
        kept = (update * gradient > 0).astype(update.dtype)
        return update * kept * (size / (kept.sum(single, keepdims=True) + 1))

    def masked(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        directions, state = rule.update(updates, state, params, **extra)
        return map_arrays(mask, specs, directions, updates), state

    return optax.GradientTransformationExtraArgs(rule.init, masked)


def _scale_by_factors(factors: Any) -> list[optax.GradientTransformation]:
    """Return what multiplies updates by factors of their leaves, a tree of floats; nothing where
    all are 1."""
    if all(factor == 1 for factor in jax.tree.leaves(factors)):
        return []
    return [
        optax.stateless(
            lambda updates, params: map_arrays(lambda factor, u: u * factor, factors, updates)
        )
    ]


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
        share = 1 / number
        if decay < 1:
            share = (1 - decay) / -jnp.expm1(number * math.log(decay))

        def moved(average: jax.Array, new: jax.Array) -> jax.Array:
            new = new.astype(jnp.float32)
            return jnp.where(count == 1, new, average + share * (new - average))

        weights = optax.apply_updates(params, updates)
        return updates, AverageState(steps, jax.tree.map(moved, state.average, weights))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]
