"""Learning rates by step: a table of schedules, behind a warm-up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.config.settings import Table
from jaxformer.config.train import OptimizerConfig, Schedule


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by step, from 0: linear warm-up from zero, then `config.schedule`
    until `decay_steps` (default `steps`), as the table of docs/training.md says."""
    end = config.decay_steps or steps
    peak = config.learning_rate
    warmup = config.warmup_steps
    after = SCHEDULES[config.schedule](config, max(end - warmup, 1))

    def schedule(step: Any) -> jax.Array:
        # Not from 0, or the first step would move nothing.
        ramp = peak * (step + 1) / (warmup + 1)
        return jnp.where(step < warmup, ramp, after(jnp.maximum(step - warmup, 0)))

    return schedule


def schedule_text(config: OptimizerConfig, steps: int) -> str:
    """Return a description of the learning rate during the `steps` of a run."""
    schedule = make_schedule(config, steps)
    peak = config.learning_rate
    warmup = config.warmup_steps
    # One program: by themselves the operations of a schedule would be compiled one by one.
    last = float(jax.jit(schedule)(steps - 1))
    if warmup >= steps:
        return (
            f"{last:.3g} in the last step, within the warm-up of {warmup:,} steps: the run never"
            f" reaches its peak, {peak:.3g}"
        )
    rise = f"{peak:.3g}"
    if warmup:
        rise = f"warm-up of {warmup:,} steps to {rise}"
    return f"{rise}, then {config.schedule}; {last:.3g} in the last step"


def _wsd(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return warm-up, stable, decay: the peak until the last `wsd_decay_fraction` of the steps,
    then linear (arXiv:2404.06395). The last step has the final rate."""
    decay = max(round(config.wsd_decay_fraction * steps), 1)
    # The last step with the peak, counted from the end of the warm-up.
    begin = steps - decay - 1
    peak = config.learning_rate
    final = config.final_fraction * config.learning_rate

    def schedule(step: Any) -> jax.Array:
        remaining = 1 - jnp.clip(step - begin, 0, decay) / decay
        return (peak - final) * remaining + final

    return schedule


def _inverse_sqrt(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return peak * sqrt(w / (w + step)) with w warm-up steps: the peak at the end of the
    warm-up."""
    w = max(config.warmup_steps, 1)
    return lambda step: config.learning_rate * jnp.sqrt(w / (w + step))


SCHEDULES: Table[Callable[[OptimizerConfig, int], optax.Schedule]] = Table(
    Schedule,
    {
        "constant": lambda c, steps: optax.constant_schedule(c.learning_rate),
        "linear": lambda c, steps: optax.linear_schedule(
            c.learning_rate, c.final_fraction * c.learning_rate, steps
        ),
        "cosine": lambda c, steps: optax.cosine_decay_schedule(
            c.learning_rate, steps, alpha=c.final_fraction
        ),
        "wsd": _wsd,
        "inverse_sqrt": _inverse_sqrt,
    },
)
