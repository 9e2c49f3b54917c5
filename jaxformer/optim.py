"""Optimizers and schedules, all from optax, chosen by name; which parameters decay follows from the table of specs."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxformer.config import OptimizerConfig
from jaxformer.params import Spec, Specs, map_specs, rows

Mask = dict[str, Any]


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up from zero, then `config.schedule` until `decay_steps` (default `steps`)."""
    end = config.decay_steps or steps
    peak, warmup = config.learning_rate, config.warmup_steps
    after = SCHEDULES[config.schedule](config, max(end - warmup, 1))

    def schedule(step: Any) -> jax.Array:
        ramp = peak * (step + 1) / (warmup + 1)
        return jnp.where(step < warmup, ramp, after(jnp.maximum(step - warmup, 0)))

    return schedule


def _wsd(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Warm-up, stable, decay: the peak until the last `wsd_decay_fraction` of the steps, then linear (arXiv:2404.06395)."""
    decay = max(round(config.wsd_decay_fraction * steps), 1)
    peak = config.learning_rate
    return optax.linear_schedule(peak, config.final_fraction * peak, decay, transition_begin=steps - decay)


def _inverse_sqrt(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """peak * sqrt(w / (w + step)), w the warm-up steps: falls as 1/sqrt(step), equal to the peak where the warm-up ends."""
    w = max(config.warmup_steps, 1)
    return lambda step: config.learning_rate * jnp.sqrt(w / (w + step))


SCHEDULES: dict[str, Callable[[OptimizerConfig, int], optax.Schedule]] = {
    "constant": lambda c, steps: optax.constant_schedule(c.learning_rate),
    "linear": lambda c, steps: optax.linear_schedule(c.learning_rate, c.final_fraction * c.learning_rate, steps),
    "cosine": lambda c, steps: optax.cosine_decay_schedule(c.learning_rate, steps, alpha=c.final_fraction),
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}


def decay_mask(config: OptimizerConfig, specs: Specs) -> Mask:
    """True for every leaf that decays: the matrices (and embeddings), or all."""
    return map_specs(lambda _, spec: config.decay == "all" or spec.is_matrix, specs)


def decay_groups(config: OptimizerConfig, specs: Specs) -> dict[str, tuple[int, int]]:
    """`{"decayed": (tensors, parameters), "not decayed": ...}`, for the start of a run to print."""
    groups = {"decayed": (0, 0), "not decayed": (0, 0)}
    for spec in rows(specs).values():
        name = "decayed" if config.decay == "all" or spec.is_matrix else "not decayed"
        tensors, parameters = groups[name]
        groups[name] = (tensors + 1, parameters + math.prod(spec.shape))
    return groups


def _adamw(c: OptimizerConfig, rate: optax.Schedule, specs: Specs) -> optax.GradientTransformation:
    return optax.adamw(rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decay_mask(c, specs))


def _adafactor(c: OptimizerConfig, rate: optax.Schedule, specs: Specs) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, decay_mask(c, specs))
    return optax.chain(optax.adafactor(None, multiply_by_parameter_scale=False), decay, optax.scale_by_learning_rate(rate))


def _lion(c: OptimizerConfig, rate: optax.Schedule, specs: Specs) -> optax.GradientTransformation:
    return optax.lion(rate, c.b1, c.b2, weight_decay=c.weight_decay, mask=decay_mask(c, specs))


def _sgd(c: OptimizerConfig, rate: optax.Schedule, specs: Specs) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, decay_mask(c, specs))
    return optax.chain(optax.trace(c.b1), decay, optax.scale_by_learning_rate(rate))


def _muon(c: OptimizerConfig, rate: optax.Schedule, specs: Specs) -> optax.GradientTransformation:
    """Muon on the blocks' matrices, a layer and a product at a time; AdamW on embeddings, output layer, norms and biases.

    Updates are scaled to the RMS that AdamW's have, so one learning rate and decay serve both (arXiv:2502.16982).
    """

    def numbers(path: str, spec: Spec) -> MuonDimensionNumbers | None:
        if not (spec.is_matrix and path.startswith("blocks.")):
            return None
        axes = [i for i, axis in enumerate(spec.axes) if axis != "layers"]
        shared = tuple(i for i in axes if spec.axes[i] in spec.inputs)
        return MuonDimensionNumbers(shared, tuple(i for i in axes if i not in shared))

    mask, table = decay_mask(c, specs), map_specs(numbers, specs)
    return muon(
        rate,
        beta=c.b1,
        weight_decay=c.weight_decay,
        weight_decay_mask=mask,
        adam_b1=c.b1,
        adam_b2=c.b2,
        adam_weight_decay=c.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: table,
    )


OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor, "lion": _lion, "sgd": _sgd, "muon": _muon}


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule, specs: Specs) -> optax.GradientTransformation:
    """Clip by global norm, then the update rule, with decoupled decay on the masked leaves."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[config.name](config, schedule, specs))
