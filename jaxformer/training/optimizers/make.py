"""The optimizer of a run: its rule, which leaves decay, and the learning rate.

The table of specs decides which leaves decay.
"""

import math
from typing import Any

import jax
import optax

from jaxformer.arrays.params import Spec, Specs, map_specs, rows
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.training.optimizers.rules import OPTIMIZERS

Mask = dict[str, Any]


def decay_mask(config: OptimizerConfig, specs: Specs) -> Mask:
    """True for every leaf that decays: the matrices (and embeddings), or all, except those that
    move by a `Spec.sign_rate`."""
    return map_specs(lambda _, spec: _decays(config, spec), specs)


def _decays(config: OptimizerConfig, spec: Spec) -> bool:
    return (config.decay == "all" or spec.is_matrix) and not spec.sign_rate


def decay_groups(config: OptimizerConfig, specs: Specs) -> dict[str, tuple[int, int]]:
    """`{"decayed": (tensors, parameters), "not decayed": ...}`, for the start of a run to print."""
    groups = {"decayed": (0, 0), "not decayed": (0, 0)}
    for spec in rows(specs).values():
        if not spec.trainable:
            continue
        name = "decayed" if _decays(config, spec) else "not decayed"
        tensors, parameters = groups[name]
        groups[name] = (tensors + 1, parameters + math.prod(spec.shape))
    return groups


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, specs: Specs
) -> optax.GradientTransformation:
    """Clipping by global norm, the update rule, decoupled weight decay, and the learning rate; the
    leaves with a `Spec.sign_rate` move by that against the sign of their gradient."""
    rule = optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        OPTIMIZERS[config.name](config, specs),
        optax.add_decayed_weights(config.weight_decay, decay_mask(config, specs)),
        optax.scale_by_learning_rate(schedule),
    )
    rates = {spec.sign_rate for spec in jax.tree.leaves(specs) if spec.trainable} - {0.0}
    if not rates:
        return rule
    signs = {rate: optax.chain(optax.scale_by_sign(), optax.scale(-rate)) for rate in rates}
    return optax.partition({0.0: rule, **signs}, map_specs(lambda _, spec: spec.sign_rate, specs))
