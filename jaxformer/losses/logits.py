"""The cross-entropy of logits: its sums over tokens, and its derivative by the logits. With l the
logits of a token, y its target and w its weight:

    lse       = log sum exp l, and p = exp(l - lse)
    nats      = w (lse - l_y)
    objective = w ((1 - e) (lse - l_y) + e (lse - mean l) + z lse^2)

e is the label smoothing (arXiv:1512.00567) and z the weight of the z-loss (arXiv:2204.02311); with
a soft cap c, l is c tanh(l / c) of what the output layer gives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.files import ConfigError


class Extras(NamedTuple):
    """Options of a cross-entropy: numbers, each of which is off where it is 0, and the dtype in
    which the product of hidden states and output layer is stored."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    logits_dtype: np.dtype[Any] = np.dtype("float32")


def extras_of(label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float = 0.0) -> Extras:
    """Return extras with numbers of any type as floats, which can be compared and hashed."""
    return Extras(float(label_smoothing), float(z_loss), float(soft_cap))


class Softmax(NamedTuple):
    """The probabilities p = exp(l - top) exp(-log_total), with the logits l [..., V], the largest
    one of each token, lse and log_total = lse - top [..., 1], and the derivative of the soft cap
    [..., V], None without one."""

    logits: jax.Array
    top: jax.Array
    lse: jax.Array
    log_total: jax.Array
    cap_slope: jax.Array | None


def softmax_cross_entropy(
    logits: Float[Array, "... V"],
    targets: Int[Array | np.ndarray, "..."],
    weights: Float[Array | np.ndarray, "..."] | None = None,
    **extras: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the cross-entropy of logits as (sum, weight), an entry of what a loss returns: [...,
    V] of any float dtype, int [...], float [...] -> two float32 scalars; their quotient is the
    mean.

    The sum is that of w (lse - logit_y), in nats, with lse = log sum exp of the logits of a token,
    y its target in 0 .. V - 1 and w its weight (default: 1); the weight is the sum of w. The
    largest logit is subtracted before the exponential, so that no finite logit overflows. `extras`
    are label_smoothing (arXiv:1512.00567), z_loss (arXiv:2204.02311) and soft_cap, as in
    `losses.cross_entropy.cross_entropy`, which does not hold all logits in memory.
    """
    rows = logits.shape[:-1]
    if targets.shape != rows or (weights is not None and weights.shape != rows):
        raise ConfigError(
            f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}"
            f"{'' if weights is None else f' and weights {list(weights.shape)}'}: give a"
            f" target, and a weight, for each row of logits: {list(rows)}."
        )
    weights = jnp.ones(rows) if weights is None else jnp.asarray(weights, jnp.float32)
    options = extras_of(**extras)
    logits = logits.astype(jnp.float32)
    targets = jnp.asarray(targets)
    total, _, _ = sums_of_logits(logits, targets, weights, options)
    return total, jnp.sum(weights)


def summed(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the logits of the targets [..., 1] by a sum, which supports a vocabulary that is
    sharded over devices, and gradients of every mode."""
    is_target = _is_target(targets, logits.shape[-1])
    return jnp.sum(jnp.where(is_target, logits, 0), axis=-1, keepdims=True)


def gathered(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the logits of the targets [..., 1] by a gather, which does not read the others."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)


def top_and_total(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (top, sum exp(l - top)) [..., 1] of logits l [..., V] with top their largest, in two
    passes, which support gradients of every mode."""
    # Subtracting the largest logit of a token keeps exp finite; it cancels in lse, so it needs no
    # gradient.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return top, jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True)


def top_and_total_at_once(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `top_and_total` in one pass without a derivative: pieces of the vocabulary have
    (top, total), and two of them have the larger top and the sum of their totals relative to it
    (arXiv:1805.02867)."""
    lowest = jnp.finfo(logits.dtype).min

    def merged(left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
        top, total = left
        other_top, other_total = right
        # The smaller of the two powers of e, relative to the larger: it never overflows.
        factor = jnp.exp(-jnp.abs(top - other_top))
        of_left = total + other_total * factor
        of_right = total * factor + other_total
        return jnp.maximum(top, other_top), jnp.where(top > other_top, of_left, of_right)

    # The difference of two logits of -inf would not be a number.
    finite = jnp.maximum(logits, lowest)
    ones = jnp.ones_like(logits)
    axis = logits.ndim - 1
    top, total = jax.lax.reduce((finite, ones), (lowest, np.float32(0)), merged, (axis,))
    return top[..., None], total[..., None]


class Passes(NamedTuple):
    """How the logits [..., V] are read: what takes those of the targets, and what takes the largest
    one and the sum of the powers."""

    targets: Callable[[jax.Array, jax.Array], jax.Array] = summed
    totals: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = top_and_total


# In the ways that support a sharded vocabulary, and gradients of every mode.
DIFFERENTIABLE_PASSES = Passes()


def _is_target(targets: jax.Array, vocab: int) -> jax.Array:
    """Return bool [..., V], by comparison: a gather from a vocabulary that is sharded over devices
    would need communication."""
    return targets[..., None] == jnp.arange(vocab)


class ByRow(NamedTuple):
    """Whether the sums of the objective, and those of the nats, are by row [B] and not scalars."""

    objective: bool
    nats: bool


TOTALS = ByRow(False, False)


def sums_of_logits(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    extras: Extras,
    passes: Passes = DIFFERENTIABLE_PASSES,
    by_row: ByRow = TOTALS,
) -> tuple[jax.Array, jax.Array, Softmax]:
    """Return (objective, nats, what `logits_gradient` needs) of logits [..., V], targets and
    weights [...]: each of the two a scalar, or by row [B] of logits [B, T, V]."""
    if extras.soft_cap:
        logits = extras.soft_cap * jnp.tanh(logits / extras.soft_cap)
    top, total = passes.totals(logits)
    log_total = jnp.log(total)
    lse = top + log_total
    # [..., 1]
    nats = lse - passes.targets(logits, targets)
    objective = nats
    if extras.label_smoothing:
        # Cross-entropy is linear in the targets: (1 - e) that of onehot plus e that of 1 / V.
        even = lse - jnp.mean(logits, axis=-1, keepdims=True)
        objective = (1 - extras.label_smoothing) * nats + extras.label_smoothing * even
    if extras.z_loss:
        objective = objective + extras.z_loss * jnp.square(lse)
    cap_slope = None
    if extras.soft_cap:
        cap_slope = 1 - jnp.square(logits / extras.soft_cap)
    weights = weights[..., None]
    softmax = Softmax(logits, top, lse, log_total, cap_slope)
    of_objective, of_nats = ((1, 2) if each else None for each in by_row)
    return jnp.sum(weights * objective, of_objective), jnp.sum(weights * nats, of_nats), softmax


def logits_gradient(
    softmax: Softmax, targets: jax.Array, weights: jax.Array, extras: Extras
) -> jax.Array:
    """Return d objective / d logits [..., V] before the cap, float32.

    The derivative of lse is p, that of z lse^2 is 2 z lse p, and that of the targets' terms is the
    smoothed onehot.
    """
    smoothing = extras.label_smoothing
    vocab = softmax.logits.shape[-1]
    weights = weights[..., None]
    onehot = jnp.where(_is_target(targets, vocab), weights * (1 - smoothing), 0)
    smoothed = onehot + weights * (smoothing / vocab)
    # The factor of the powers: that of p and 2 z lse p, divided by the sum of the powers.
    scale = weights * (1 + 2 * extras.z_loss * softmax.lse) * jnp.exp(-softmax.log_total)
    # The powers again, and not stored: an exponential is cheaper than writing and reading [..., V].
    gradient = jnp.exp(softmax.logits - softmax.top) * scale - smoothed
    if softmax.cap_slope is None:
        return gradient
    return gradient * softmax.cap_slope
