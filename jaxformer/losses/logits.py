"""The sums of a cross-entropy from logits of some tokens, and their derivative by the logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import contract

ObjectiveAndNats = tuple[jax.Array, jax.Array]


class Extras(NamedTuple):
    """Options of `cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0


class Shares(NamedTuple):
    """exp(logits - top) [B, T, V], lse [B, T, 1], lse - top [B, T, 1], and the derivative of the
    soft cap [B, T, V], None without one."""

    powers: jax.Array
    lse: jax.Array
    log_total: jax.Array
    slope: jax.Array | None


def logits_of(x: jax.Array, head: Any, bias: jax.Array | None) -> jax.Array:
    """[B, T, D] -> float32 [B, T, V], not yet capped."""
    logits = contract("BTD,VD->BTV", x, head, to=("batch", None, "vocab"), dtype=jnp.float32)
    return logits if bias is None else logits + bias


def sums_of_logits(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    extras: Extras,
    taken: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, Shares]:
    """(objective, nats, what the gradient needs) of all tokens at once, from their logits
    [B, T, V]. `taken` gives the logit of each target [B, T, 1]."""
    if extras.soft_cap:
        logits = extras.soft_cap * jnp.tanh(logits / extras.soft_cap)
    # Subtracting the largest logit of a token keeps exp finite; it cancels in lse, so it needs no
    # gradient.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.exp(logits - top)
    log_total = jnp.log(jnp.sum(powers, axis=-1, keepdims=True))
    lse = top + log_total
    nats = lse - (taken or summed)(logits, targets)
    loss = nats
    if extras.label_smoothing:
        # Cross-entropy is linear in the targets: (1 - e) that of onehot plus e that of 1 / V.
        even = lse - jnp.mean(logits, axis=-1, keepdims=True)
        loss = (1 - extras.label_smoothing) * nats + extras.label_smoothing * even
    if extras.z_loss:
        loss = loss + extras.z_loss * jnp.square(lse)
    each = weights[..., None]
    slope = 1 - jnp.square(logits / extras.soft_cap) if extras.soft_cap else None
    return jnp.sum(each * loss), jnp.sum(each * nats), Shares(powers, lse, log_total, slope)


def summed(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logits of the targets [B, T, 1] by a sum, which a vocabulary that is sharded over devices
    and a gradient of any mode take well."""
    is_target = _is_target(targets, logits.shape[-1])
    return jnp.sum(jnp.where(is_target, logits, 0), axis=-1, keepdims=True)


def gathered(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logits of the targets [B, T, 1] by a gather, which does not read the others."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)


def _is_target(targets: jax.Array, vocab: int) -> jax.Array:
    """bool [B, T, V], by comparison: a gather from a vocabulary that is sharded over devices would
    need communication."""
    return targets[..., None] == jnp.arange(vocab)


def slope_of(shares: Shares, target: jax.Array, weight: jax.Array, extras: Extras) -> jax.Array:
    """d objective / d logits [B, T, V] before the cap, float32.

    With p = softmax(logits) = powers exp(-log_total), the derivative of lse is p, that of
    z_loss lse^2 is 2 z_loss lse p, and that of the targets' part is the smoothed onehot.
    """
    smoothing, z_loss, _ = extras
    vocab, each = shares.powers.shape[-1], weight[..., None]
    onehot = jnp.where(_is_target(target, vocab), each * (1 - smoothing), 0)
    toward = onehot + each * (smoothing / vocab)
    of_lse = each * (1 + 2 * z_loss * shares.lse) * jnp.exp(-shares.log_total)
    slope = shares.powers * of_lse - toward
    return slope if shares.slope is None else slope * shares.slope
