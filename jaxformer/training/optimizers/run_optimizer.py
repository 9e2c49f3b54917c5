"""The optimizer of a run: its rule, the decay of weights, and the learning rate of each leaf."""

import math
from typing import Any

import jax
import optax

from jaxformer.arrays.params import Spec, Specs, map_specs
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.training.optimizers.decays import cautious, weight_decay
from jaxformer.training.optimizers.groups import Factors, leaf_factors
from jaxformer.training.optimizers.rule_table import OPTIMIZERS, require_moments
from jaxformer.training.optimizers.update_rule import map_arrays

Mask = dict[str, Any]


def decay_mask(config: OptimizerConfig, specs: Specs) -> Mask:
    """True for every leaf that decays: the matrices (and embeddings), or all, except those that
    move by a `Spec.sign_rate` and those of a group that does not decay."""
    decays: Mask = jax.tree.map(lambda factors: factors.decay > 0, leaf_factors(config, specs))
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

    `seed` is that of the rounding of optimizer.moments. Raises ConfigError for optimizer.groups
    that do not fit the table, and for moments that the rule does not have.
    """
    factors, row = leaf_factors(config, specs), OPTIMIZERS[config.name]
    rule = row.rule(config, specs)
    if config.moments != "float32":
        # Imported here, because only runs that round read it.
        from jaxformer.training.optimizers.moments import with_stored_moments

        require_moments(config)
        rule = with_stored_moments(rule, row.moments, config.moments, specs, seed)
    if config.cautious:
        rule = cautious(rule, specs)
    steps = [rule, weight_decay(config, factors), optax.scale_by_learning_rate(schedule)]
    if any(leaf.rate != 1 for leaf in jax.tree.leaves(factors)):
        steps.append(_scale_by_factors(factors))
    if row.around:
        steps = [row.around(config, schedule, optax.chain(*steps))]
    norm = config.clip_norm
    clip = optax.clip_by_global_norm(norm) if norm else optax.identity()
    return _with_sign_rates(optax.chain(clip, *steps), specs)


def _scale_by_factors(factors: Any) -> optax.GradientTransformation:
    """The one place that multiplies the learning rates of leaves by their factors."""

    def scale(factors_of_leaf: Factors, update: jax.Array) -> jax.Array:
        return update * factors_of_leaf.rate

    return optax.stateless(lambda updates, params: map_arrays(scale, factors, updates))


def _with_sign_rates(
    rule: optax.GradientTransformation, specs: Specs
) -> optax.GradientTransformation:
    """The rule for all leaves but those with a `Spec.sign_rate`."""
    rates = {spec.sign_rate for spec in jax.tree.leaves(specs) if spec.trainable} - {0.0}
    if not rates:
        return rule
    signs = {rate: optax.chain(optax.scale_by_sign(), optax.scale(-rate)) for rate in rates}

    def label(_: str, spec: Spec) -> float:
        return spec.sign_rate

    return optax.partition({0.0: rule, **signs}, map_specs(label, specs))
