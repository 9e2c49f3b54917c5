"""The loss of a language model, as sums over tokens that only the train step divides.

A small vocabulary is computed the plain way, which every transform understands. A large one is computed a tile of tokens
at a time, and the gradients to the hidden states and the output layer are made in the same pass, so that the logits of
all tokens are never in memory together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.params import contract

DENSE_BYTES = 96 * 2**20  # float32 logits up to this size are computed at once
TILE_BYTES = 48 * 2**20  # float32 logits of one tile beyond it

Sums = tuple[jax.Array, jax.Array]


def cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tile: int | None = None,
) -> Sums:
    """Weighted sums over the tokens (objective, nats): [B, T, D], [V, D], int [B, T], float32 [B, T] -> two float32 scalars.

    nats = sum w (lse - logit_y), lse = log sum exp of the logits x head^T, carries no gradient. The objective has
    `label_smoothing` e in its targets, (1 - e) onehot + e / V (arXiv:1512.00567), and adds z_loss lse^2
    (arXiv:2204.02311). `tile` is the number of positions of a sequence computed at a time (by default all where the logits
    are small); with one the gradients are of reverse mode only.
    """
    extras = (float(label_smoothing), float(z_loss))
    rows, length = targets.shape
    if tile is None:
        row_bytes = 4 * rows * head.shape[0]
        tile = length if row_bytes * length <= DENSE_BYTES else max(TILE_BYTES // row_bytes, 1)
    if tile >= length:
        objective, nats, _ = _sums(x, head, targets, weights, extras)
    else:
        objective, nats = _tiled(x, head, targets, weights, extras, tile)
    return objective, jax.lax.stop_gradient(nats)


def _sums(
    x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, extras: tuple[float, float]
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """(objective, nats, (logits, lse)) of all tokens at once."""
    smoothing, z_loss = extras
    logits = contract("BTD,VD->BTV", x, head, to=("batch", None, "vocab"), dtype=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    hit = targets[..., None] == jnp.arange(head.shape[0])
    nats = lse - jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    loss = nats
    if smoothing:
        loss = (1 - smoothing) * nats + smoothing * (lse - jnp.mean(logits, axis=-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(lse)
    return jnp.sum(weights * loss), jnp.sum(weights * nats), (logits, lse)


def _tiles(a: jax.Array, tile: int) -> jax.Array:
    """[B, T, ...] to [tiles, B, tile, ...], zeros after the end."""
    padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % tile)) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(padded.reshape(a.shape[0], -1, tile, *a.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _tiled(
    x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, extras: tuple[float, float], tile: int
) -> Sums:
    def add(total: Sums, item: Any) -> tuple[Sums, None]:
        objective, nats, _ = _sums(item[0], matrix, item[1], item[2], extras)
        return (total[0] + objective, total[1] + nats), None

    matrix = head.astype(x.dtype)
    zero = jnp.float32(0)
    return jax.lax.scan(add, (zero, zero), tuple(_tiles(a, tile) for a in (x, targets, weights)))[0]


def _tiled_forward(
    x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, extras: tuple[float, float], tile: int
) -> tuple[Sums, Any]:
    """The sums, and d objective / dx and / dhead, from one set of logits a tile."""
    smoothing, z_loss = extras
    matrix = head.astype(x.dtype)

    def add(total: Any, item: Any) -> tuple[Any, jax.Array]:
        rows, target, weight = item
        objective, nats, (logits, lse) = _sums(rows, matrix, target, weight, extras)
        hit = target[..., None] == jnp.arange(matrix.shape[0])
        probability = jnp.exp(logits - lse[..., None])
        slope = (
            (1 + 2 * z_loss * lse)[..., None] * probability - jnp.where(hit, 1 - smoothing, 0) - smoothing / matrix.shape[0]
        )
        d_logits = (weight[..., None] * slope).astype(rows.dtype).reshape(-1, matrix.shape[0])
        d_rows = jax.lax.dot(d_logits, matrix).reshape(rows.shape)
        flat = rows.reshape(-1, rows.shape[-1])
        d_head = jax.lax.dot_general(d_logits, flat, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (total[0] + objective, total[1] + nats, total[2] + d_head), d_rows

    start = (jnp.float32(0), jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (objective, nats, d_head), d_x = jax.lax.scan(add, start, tuple(_tiles(a, tile) for a in (x, targets, weights)))
    d_x = jnp.moveaxis(d_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    return (objective, nats), (d_x, d_head.astype(head.dtype))


def _tiled_backward(extras: tuple[float, float], tile: int, saved: Any, slopes: Sums) -> tuple[Any, ...]:
    d_x, d_head = saved
    slope = slopes[0]
    return (slope * d_x).astype(d_x.dtype), (slope * d_head).astype(d_head.dtype), None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)
