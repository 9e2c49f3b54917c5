"""Spikes: steps whose loss or gradient is far above that of the steps before, and whose update is
left out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.training.loop import Diverged, is_finite
from jaxformer.training.program import Metrics
from jaxformer.training.state import TrainState, updated_if

# A normal distribution's standard deviation is so many times its median absolute deviation.
DEVIATIONS_OF_MEDIAN = 1.4826
# The least deviation, as a fraction of the median: a loss that is nearly constant has no spikes.
LEAST_DEVIATION = 0.01
# The name under which a step says how many spikes were left out before it without a break.
SUCCESSIVE_SPIKES = "spikes_in_a_row"


class SpikeState(NamedTuple):
    """The state of `skip_spikes`.

    `losses` and `norms`, float32 [W], are rings of the last W accepted steps, of which `accepted`
    (int32) were counted. `skipped` and `in_a_row` (int32) count spikes. The limits, float32, are
    those that the newest step was compared with. `inner` is the state of the optimizer.
    """

    losses: jax.Array
    norms: jax.Array
    accepted: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    loss_limit: jax.Array
    norm_limit: jax.Array
    inner: Any

    def metrics(self) -> Metrics:
        """Return what `make_step` adds to the metrics of the newest step, as float32 scalars."""
        return {
            "skipped_spikes": self.skipped.astype(jnp.float32),
            SUCCESSIVE_SPIKES: self.in_a_row.astype(jnp.float32),
            "loss_limit": self.loss_limit,
            "grad_norm_limit": self.norm_limit,
        }


def skip_spikes(
    optimizer: optax.GradientTransformation, factor: float = 10.0, window: int = 128
) -> optax.GradientTransformationExtraArgs:
    """Return `optimizer`, which a step with a spike leaves as it is; its update is then zero.

    A step is a spike if its loss, or the Euclidean norm of its gradient, is above median + `factor`
    * deviation of that of the last `window` steps that were no spikes. The deviation is 1.4826
    times the median absolute deviation, which is the standard deviation of a normal distribution,
    or 1 % of the median if that is more. Until half of a window is full, no step is a spike. Nor is
    one that is not finite, which does not enter the window either.

    It must be the outermost transformation. `update` takes the loss as `value`, as that of
    `optax.contrib.reduce_on_plateau` does; `make_step` gives it, and logs what the state counts.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> SpikeState:
        # Each an array of its own, because a step donates them.
        return SpikeState(
            losses=jnp.zeros(window, jnp.float32),
            norms=jnp.zeros(window, jnp.float32),
            accepted=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            in_a_row=jnp.zeros((), jnp.int32),
            loss_limit=jnp.full((), jnp.inf, jnp.float32),
            norm_limit=jnp.full((), jnp.inf, jnp.float32),
            inner=inner.init(params),
        )

    def update(
        gradient: Any, state: SpikeState, params: Any = None, *, value: jax.Array, **extra: Any
    ) -> tuple[Any, SpikeState]:
        # Of the gradient before clipping, since this is the outermost transformation.
        norm = optax.tree.norm(gradient)
        loss = jnp.asarray(value, jnp.float32)
        loss_limit = _limit(state.losses, state.accepted, factor)
        norm_limit = _limit(state.norms, state.accepted, factor)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        is_spike = finite & ((loss > loss_limit) | (norm > norm_limit))
        # Computed in any case: spikes are rare.
        updates, moments = inner.update(gradient, state.inner, params, value=value, **extra)
        # A parameter plus -0.0 has the same bits, also where it is -0.0.
        nothing = jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.0), updates)
        updates, moments = updated_if(~is_spike, (updates, moments), (nothing, state.inner))
        enters = finite & ~is_spike
        # The next place in the rings that is free, or else that of the oldest step.
        at = state.accepted % window
        after = SpikeState(
            losses=state.losses.at[at].set(jnp.where(enters, loss, state.losses[at])),
            norms=state.norms.at[at].set(jnp.where(enters, norm, state.norms[at])),
            accepted=state.accepted + enters,
            skipped=state.skipped + is_spike,
            in_a_row=jnp.where(is_spike, state.in_a_row + 1, 0),
            loss_limit=loss_limit,
            norm_limit=norm_limit,
            inner=moments,
        )
        return updates, after

    return optax.GradientTransformationExtraArgs(init, update)


def is_spike(metrics: Mapping[str, Any]) -> bool:
    """Return whether the update of a step was left out by `skip_spikes`. One that is not finite is
    no spike, and leaves the count of the spikes before it as it is."""
    return float(metrics.get(SUCCESSIVE_SPIKES, 0)) > 0 and is_finite(metrics)


class SpikeLimit:
    """A hook of `fit` for an optimizer that is `skip_spikes`, which ends training where so many
    steps in a row were spikes that they are none any more.

    Raises Diverged at the first one beyond `limit`. The count is that of the optimizer's state, so
    a resumed run goes on with it.
    """

    def __init__(self, limit: int = 10) -> None:
        self.limit = limit

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        """Read the count of a step."""
        if not is_spike(metrics) or float(metrics[SUCCESSIVE_SPIKES]) <= self.limit:
            return
        before = ""
        if self.limit:
            before = f", and {self.limit} steps in a row were skipped before"
        raise Diverged(
            f"step {step}: it is a spike, {spike_text(metrics)}{before}. The checkpoints hold no"
            " update of these steps. Raise train.spike_factor to accept them (1e6 accepts all), or"
            " look at the data of these steps.",
            step,
            state,
        )


def spike_text(metrics: Mapping[str, Any]) -> str:
    """Return the loss and the gradient norm of a step, with their limits."""
    return (
        f"loss {float(metrics['loss']):.4g} (limit {float(metrics['loss_limit']):.4g}), gradient"
        f" norm {float(metrics['grad_norm']):.4g} (limit {float(metrics['grad_norm_limit']):.4g})"
    )


def _limit(values: jax.Array, accepted: jax.Array, factor: float) -> jax.Array:
    """Return the largest value that is no spike after these [W], of which the first `accepted` are
    set."""
    count = jnp.minimum(accepted, len(values))
    median = _median(values, count)
    deviation = DEVIATIONS_OF_MEDIAN * _median(jnp.abs(values - median), count)
    # Above the median alone: a loss that falls is no spike.
    limit = median + factor * jnp.maximum(deviation, LEAST_DEVIATION * jnp.abs(median))
    return jnp.where(count >= len(values) / 2, limit, jnp.inf)


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the median of the first `count` values of [W]."""
    # Values that are not set yet are sorted behind all others.
    ordered = jnp.sort(jnp.where(jnp.arange(len(values)) < count, values, jnp.inf))
    return (ordered[jnp.maximum(count - 1, 0) // 2] + ordered[count // 2]) / 2
