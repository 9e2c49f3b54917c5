"""Optimizers and schedules from optax, by name. The table of specs decides which leaves decay."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxformer.arrays.params import Spec, Specs, map_specs, rows
from jaxformer.config.run import OptimizerConfig, OptimizerName, Schedule
from jaxformer.config.settings import Table

Mask = dict[str, Any]


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step, from 0: linear warm-up from zero, then `config.schedule` until
    `decay_steps` (default `steps`), as the table of docs/training.md says.

    With `rewarm_steps`, it rises from there to the peak again and decays until `steps`, as in
    continued pre-training (arXiv:2403.08763).
    """
    end = config.decay_steps or steps
    peak, warmup, rewarm = config.learning_rate, config.warmup_steps, config.rewarm_steps
    after = SCHEDULES[config.schedule](config, max(end - warmup, 1))

    def schedule(step: Any) -> jax.Array:
        ramp = peak * (step + 1) / (warmup + 1)
        return jnp.where(step < warmup, ramp, after(jnp.maximum(step - warmup, 0)))

    if not rewarm or end >= steps:
        return schedule
    tail = SCHEDULES[config.schedule](config, max(steps - end - rewarm, 1))
    low = schedule(end)

    def rewarmed(step: Any) -> jax.Array:
        rise = low + (peak - low) * (step - end + 1) / (rewarm + 1)
        again = jnp.where(step < end + rewarm, rise, tail(jnp.maximum(step - end - rewarm, 0)))
        return jnp.where(step < end, schedule(step), again)

    return rewarmed


def schedule_text(config: OptimizerConfig, steps: int) -> str:
    """A description of the learning rate during the `steps` of a run."""
    schedule, peak, warmup = make_schedule(config, steps), config.learning_rate, config.warmup_steps
    # One program: by themselves the operations of a schedule would be compiled one by one.
    last = float(jax.jit(schedule)(steps - 1))
    if warmup >= steps:
        return (
            f"{last:.3g} in the last step, within the warm-up of {warmup:,} steps: the run never"
            f" reaches its peak, {peak:.3g}"
        )
    rise = f"warm-up of {warmup:,} steps to {peak:.3g}" if warmup else f"{peak:.3g}"
    again = f", rising again after step {config.decay_steps:,}" if config.rewarm_steps else ""
    return f"{rise}, then {config.schedule}{again}; {last:.3g} in the last step"


def _linear(config: OptimizerConfig, steps: int) -> optax.Schedule:
    peak = config.learning_rate
    return optax.linear_schedule(peak, config.final_fraction * peak, steps)


def _cosine(config: OptimizerConfig, steps: int) -> optax.Schedule:
    peak = config.learning_rate
    return optax.cosine_decay_schedule(peak, steps, alpha=config.final_fraction)


def _wsd(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Warm-up, stable, decay: the peak until the last `wsd_decay_fraction` of the steps, then
    linear (arXiv:2404.06395)."""
    decay = max(round(config.wsd_decay_fraction * steps), 1)
    peak = config.learning_rate
    return optax.linear_schedule(peak, config.final_fraction * peak, decay, steps - decay)


def _inverse_sqrt(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """peak * sqrt(w / (w + step)) with w warm-up steps: the peak at the end of the warm-up."""
    w = max(config.warmup_steps, 1)
    return lambda step: config.learning_rate * jnp.sqrt(w / (w + step))


SCHEDULES: Table[Callable[[OptimizerConfig, int], optax.Schedule]] = Table(
    Schedule,
    {
        "constant": lambda c, steps: optax.constant_schedule(c.learning_rate),
        "linear": _linear,
        "cosine": _cosine,
        "wsd": _wsd,
        "inverse_sqrt": _inverse_sqrt,
    },
)


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


Rule = Callable[[OptimizerConfig, Specs], optax.GradientTransformation]


def _adafactor(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Factored second moments and clipped updates, at the schedule's own rate (arXiv:1804.04235).

    Moments are factored over the two longest axes of a leaf: those of the matrix of each layer and
    expert, unless there are more experts than the matrix has rows or columns. The updates of all
    layers and experts of a leaf are clipped together.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def _muon(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Muon on the blocks' matrices, a layer, a product and an expert at a time; Adam on embeddings,
    output layer, norms and biases.

    Updates are scaled to the RMS that Adam's have, so one learning rate and decay serve both
    (arXiv:2502.16982).
    """

    def numbers(_: str, spec: Spec) -> MuonDimensionNumbers | None:
        if not (spec.is_matrix and spec.is_stacked):
            return None
        axes = [i for i, axis in enumerate(spec.axes) if axis not in spec.batch]
        shared = tuple(i for i in axes if spec.axes[i] in spec.inputs)
        return MuonDimensionNumbers(shared, tuple(i for i in axes if i not in shared))

    table = map_specs(numbers, specs)
    # At a learning rate of -1 the update is the direction itself.
    return muon(
        -1.0,
        beta=c.b1,
        adam_b1=c.b1,
        adam_b2=c.b2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: table,
    )


OPTIMIZERS: Table[Rule] = Table(
    OptimizerName,
    {
        "adamw": lambda c, specs: optax.scale_by_adam(c.b1, c.b2, c.eps),
        "adafactor": _adafactor,
        "lion": lambda c, specs: optax.scale_by_lion(c.b1, c.b2),
        "sgd": lambda c, specs: optax.trace(c.b1),
        "muon": _muon,
    },
)


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
