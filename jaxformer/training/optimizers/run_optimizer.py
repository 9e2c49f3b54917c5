"""The optimizer of a run: its rule, the decay of weights, and the learning rate of each leaf."""

import math
from dataclasses import replace
from typing import Any

import jax
import optax

from jaxformer.arrays.params import Spec, Specs, map_specs
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.groups import Group, leaf_groups
from jaxformer.training.optimizers.rule_table import OPTIMIZERS
from jaxformer.training.optimizers.update_rule import map_arrays

Mask = dict[str, Any]


def decay_mask(config: OptimizerConfig, specs: Specs) -> Mask:
    """True for every leaf that decays: the matrices (and embeddings), or all, except those that
    move by a `Spec.sign_rate` and those of a group that does not decay."""
    decays: Mask = jax.tree.map(lambda factors: factors.decay > 0, leaf_groups(config, specs))
    return decays


def decay_groups(config: OptimizerConfig, specs: Specs) -> dict[str, tuple[int, int]]:
    """`{"decayed": (tensors, parameters), "not decayed": ...}`, for the start of a run to print."""
    groups = {"decayed": (0, 0), "not decayed": (0, 0)}
    mask = jax.tree.leaves(decay_mask(config, specs))
    for spec, decays in zip(jax.tree.leaves(specs), mask, strict=True):
        if spec.trainable:
            name = "decayed" if decays else "not decayed"
            tensors, parameters = groups[name]
            groups[name] = (tensors + 1, parameters + math.prod(spec.shape))
    return groups


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, specs: Specs, seed: int = 0
) -> optax.GradientTransformation:
    """Clipping by global norm, the update rule, weight decay, and the learning rate with the factor
    of each leaf; leaves with a `Spec.sign_rate` move by that against the sign of their gradient.

    `seed` is that of the rounding of optimizer.moments.
    """
    factors, row = leaf_groups(config, specs), OPTIMIZERS[config.name]
    # Gradients are smaller by the growth of the width, and so is eps (arXiv:2505.01618, table 1).
    growth = max((spec.growth[0] for spec in jax.tree.leaves(specs) if spec.trainable), default=1)
    rule = row.rule(replace(config, eps=config.eps / growth) if growth != 1 else config, specs)
    if config.moments != "float32":
        # Imported here, because only runs that round read it.
        from jaxformer.training.optimizers.moments import with_stored_moments

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
    if row.around:
        steps = [row.around(config, schedule, optax.chain(*steps))]
    norm = config.clip_norm
    clip = optax.clip_by_global_norm(norm) if norm else optax.identity()
    optimizer = optax.chain(clip, *steps)
    rates = {spec.sign_rate for spec in jax.tree.leaves(specs) if spec.trainable} - {0.0}
    if not rates:
        return optimizer
    signs = {rate: optax.chain(optax.scale_by_sign(), optax.scale(-rate)) for rate in rates}
    labels = map_specs(lambda _, spec: spec.sign_rate, specs)
    return optax.partition({0.0: optimizer, **signs}, labels)


def width_factors(config: OptimizerConfig, specs: Specs) -> dict[str, Any]:
    """The factor of the directions of each leaf, with which one learning rate holds at all widths,
    in the nesting of the table; 1 without `Spec.base_fans`.

    It multiplies the directions and not the weight decay, which has the same strength at all
    widths: scaled down with them it would vanish in wide models (arXiv:2405.13698; as in table 1 of
    arXiv:2505.01618, where the decay grows as the rate falls).
    """
    factor = OPTIMIZERS[config.name].width_factor
    if all(spec.base_fans is None for spec in jax.tree.leaves(specs)):
        return map_specs(lambda _, spec: 1.0, specs)
    if factor is None:
        able = [name for name in OPTIMIZERS if OPTIMIZERS[name].width_factor]
        raise ConfigError(
            f"optimizer.name={config.name!r} has no rule by which its learning rate holds at all"
            f" widths, as model.parametrization='mup' asks: use one of {', '.join(able)}, or the"
            " parametrization 'standard'."
        )
    return map_specs(lambda _, spec: factor(config, spec), specs)


def weight_decay(config: OptimizerConfig, factors: Any) -> optax.GradientTransformation:
    """Adds the decay of every leaf to its update, before the learning rate multiplies both
    (arXiv:1711.05101). `factors` are those of `leaf_groups`."""

    def add(group: Group, update: jax.Array, parameter: jax.Array) -> jax.Array:
        amount = config.weight_decay * group.decay
        return update + amount * parameter if amount else update

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


def _scale_by_factors(factors: Any) -> list[optax.GradientTransformation]:
    """The one place that multiplies updates by factors of their leaves, a tree of floats; none
    where all are 1."""
    if all(factor == 1 for factor in jax.tree.leaves(factors)):
        return []
    return [
        optax.stateless(
            lambda updates, params: map_arrays(lambda factor, u: u * factor, factors, updates)
        )
    ]
