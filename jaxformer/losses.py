"""The loss of a language model, as sums over tokens that only the train step divides.

Few logits are computed the plain way, which every transform understands. Many are computed a tile of tokens at a time,
and the gradients to the hidden states and the output layer are made in the same pass, so that the logits of all tokens
are never in memory together.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.params import contract

DENSE_LOGITS = 2**23  # up to this many a device are computed at once
TILE_ROWS = {
    "cpu": 512
}  # tokens of a tile on each device beyond that: enough to hide the sum over tiles behind the products
TILE_ROWS_ELSEWHERE = 8192

Sums = tuple[jax.Array, jax.Array]


class Extras(NamedTuple):
    """What the objective adds to the plain loss."""

    label_smoothing: float
    z_loss: float
    soft_cap: float


def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float = 0.0,
    tile: int | None = None,
) -> Sums:
    """Weighted sums over the tokens (objective, nats): [B, T, D], [V, D], int [B, T], float32 [B, T] -> two float32 scalars.

    nats = sum w (lse - logit_y), lse = log sum exp of the logits x head^T, carries no gradient. The objective has
    `label_smoothing` e in its targets, (1 - e) onehot + e / V (arXiv:1512.00567), and adds z_loss lse^2
    (arXiv:2204.02311). Logits l become `soft_cap` tanh(l / soft_cap) where that is not 0. `tile` is the number of positions
    computed at a time: all, where the logits are few, unless it is given. Less than all means that the gradient is one of
    reverse mode only.
    """
    extras = Extras(float(label_smoothing), float(z_loss), float(soft_cap))
    if tile is None:
        tile = _tile_length(targets.shape[0], targets.shape[1], head.shape[0])
    if tile >= targets.shape[1]:
        objective, nats, _ = _sums(x, head, targets, weights, extras)
    else:
        objective, nats = _tiled(x, head, targets, weights, extras, tile)
    return objective, jax.lax.stop_gradient(nats)


def _tile_length(rows: int, length: int, vocab: int) -> int:
    """Positions of a sequence to compute at a time, in tiles of nearly equal length."""
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    if rows * length * vocab <= DENSE_LOGITS * devices:
        return length
    most = max(TILE_ROWS.get(jax.default_backend(), TILE_ROWS_ELSEWHERE) * devices // rows, 1)
    return -(-length // -(-length // most))


class _Shares(NamedTuple):
    """exp(logits - top) [B, T, V], lse [B, T, 1], lse - top [B, T, 1], and the slope of the capped logits, None uncapped."""

    powers: jax.Array
    lse: jax.Array
    log_total: jax.Array
    slope: jax.Array | None


def _sums(
    x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, extras: Extras
) -> tuple[jax.Array, jax.Array, _Shares]:
    """(objective, nats, what the gradient needs) of all tokens at once."""
    logits = contract("BTD,VD->BTV", x, head, to=("batch", None, "vocab"), dtype=jnp.float32)
    if extras.soft_cap:
        logits = extras.soft_cap * jnp.tanh(logits / extras.soft_cap)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.exp(logits - top)
    log_total = jnp.log(jnp.sum(powers, axis=-1, keepdims=True))
    lse = top + log_total
    nats = lse - jnp.sum(jnp.where(_is_target(targets, head), logits, 0), axis=-1, keepdims=True)
    loss = nats
    if extras.label_smoothing:
        even = lse - jnp.mean(logits, axis=-1, keepdims=True)
        loss = (1 - extras.label_smoothing) * nats + extras.label_smoothing * even
    if extras.z_loss:
        loss = loss + extras.z_loss * jnp.square(lse)
    each = weights[..., None]
    slope = 1 - jnp.square(logits / extras.soft_cap) if extras.soft_cap else None
    return jnp.sum(each * loss), jnp.sum(each * nats), _Shares(powers, lse, log_total, slope)


def _is_target(targets: jax.Array, head: jax.Array) -> jax.Array:
    """bool [B, T, V]: a comparison instead of a gather, so that a vocabulary over several devices needs no exchange."""
    return targets[..., None] == jnp.arange(head.shape[0])


def _tiles(a: jax.Array, tile: int) -> jax.Array:
    """[B, T, ...] to [tiles, B, tile, ...], zeros after the end."""
    padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % tile)) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(padded.reshape(a.shape[0], -1, tile, *a.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _tiled(x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, extras: Extras, tile: int) -> Sums:
    def add(total: Sums, item: Any) -> tuple[Sums, None]:
        objective, nats, _ = _sums(item[0], matrix, item[1], item[2], extras)
        return (total[0] + objective, total[1] + nats), None

    matrix = head.astype(x.dtype)
    zero = jnp.float32(0)
    return jax.lax.scan(add, (zero, zero), tuple(_tiles(a, tile) for a in (x, targets, weights)))[0]


def _tiled_forward(
    x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, extras: Extras, tile: int
) -> tuple[Sums, Any]:
    """The sums, and d objective / dx and / dhead, from one set of logits a tile."""
    smoothing, z_loss, _ = extras
    matrix = head.astype(x.dtype)

    def add(total: Any, item: Any) -> tuple[Any, jax.Array]:
        rows, target, weight = item
        objective, nats, shares = _sums(rows, matrix, target, weight, extras)
        each = weight[..., None]
        toward = jnp.where(_is_target(target, head), each * (1 - smoothing), 0) + each * (smoothing / head.shape[0])
        d_logits = shares.powers * (each * (1 + 2 * z_loss * shares.lse) * jnp.exp(-shares.log_total)) - toward
        d_logits = (d_logits if shares.slope is None else d_logits * shares.slope).astype(rows.dtype)
        d_rows = contract("BTV,VD->BTD", d_logits, matrix, to=("batch", None, None))
        flat, d_flat = (a.reshape(-1, a.shape[-1]) for a in (rows, d_logits))
        d_head = jax.lax.dot_general(d_flat, flat, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (total[0] + objective, total[1] + nats, total[2] + d_head), d_rows

    start = (jnp.float32(0), jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (objective, nats, d_head), d_x = jax.lax.scan(add, start, tuple(_tiles(a, tile) for a in (x, targets, weights)))
    d_x = jnp.moveaxis(d_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    return (objective, nats), (d_x, d_head.astype(head.dtype))


def _tiled_backward(extras: Extras, tile: int, saved: Any, slopes: Sums) -> tuple[Any, ...]:
    d_x, d_head = saved
    return (slopes[0] * d_x).astype(d_x.dtype), (slopes[0] * d_head).astype(d_head.dtype), None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)
