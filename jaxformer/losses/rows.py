"""Cross-entropy summed over each row by itself, for losses that are no sum over tokens.

As in `losses.cross_entropy`, the logits of few tokens are computed at once, and those of many one
tile at a time, so that the logits of all tokens are never in memory together.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxformer.arrays.params import CustomLeaf
from jaxformer.losses.cross_entropy import tile_length
from jaxformer.losses.logits import Extras, logits_of, summed
from jaxformer.losses.tiled import (
    TokenRows,
    by_device,
    perturbed,
    target_logits,
    tiled_backward,
    tiled_gradients,
    values_of,
)


@jax.named_scope("loss")
def row_nats(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"] | CustomLeaf,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    bias: Float[Array, "V"] | None = None,
    soft_cap: float = 0.0,
    tile: int | None = None,
) -> Float[Array, "B"]:
    """The cross-entropy of each row, sum over t of w (lse - logit_y): [B, T, D], [V, D], int
    [B, T], float32 [B, T] -> float32 [B].

    With a `soft_cap` c, logits l become c tanh(l / c). `tile` is the number of positions computed
    at a time; the default is all if the logits are few. In tiles, the gradient is one of reverse
    mode only, which computes the logits a second time.
    """
    extras = Extras(soft_cap=float(soft_cap))
    if tile is None:
        tile = tile_length(targets.shape[0], targets.shape[1], head.shape[0])
    elif tile >= targets.shape[1]:
        tile = 0
    if tile:
        return _tiled_row_nats(x, head, bias, targets, weights, extras, tile)
    nats = _token_nats(logits_of(x, head, bias), targets, extras, summed)
    return (weights * nats).sum(axis=-1)


def _token_nats(
    logits: jax.Array,
    targets: jax.Array,
    extras: Extras,
    taken: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """[B, T, V], [B, T] -> [B, T]; `taken` gives the logit of each target [B, T, 1]."""
    if cap := extras.soft_cap:
        logits = cap * jnp.tanh(logits / cap)
    return jax.nn.logsumexp(logits, axis=-1) - taken(logits, targets)[..., 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _tiled_row_nats(
    x: jax.Array,
    head: Any,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    extras: Extras,
    tile: int,
) -> jax.Array:
    def nats_of(rows: TokenRows, matrix: Any, bias: jax.Array | None) -> Any:
        def add(total: jax.Array, item: TokenRows) -> tuple[jax.Array, None]:
            nats = _token_nats(logits_of(item.x, matrix, bias), item.targets, extras, taken)
            return total + (item.weights * nats).sum(axis=-1), None

        nothing = jnp.zeros(rows.x.shape[0], jnp.float32)
        total, _ = jax.lax.scan(add, nothing, rows.tiles(tile))
        return (), total, [None, None]  # no sum over rows, one number for each, no gradient

    taken = target_logits()
    _, found, _ = by_device(nats_of, TokenRows(x, targets, weights), head.astype(x.dtype), bias)
    return found  # type: ignore[no-any-return]


def _row_nats_forward(
    x: Any, head: Any, bias: Any, targets: Any, weights: Any, extras: Extras, tile: int
) -> tuple[jax.Array, Any]:
    # Which leaves of the head learn, in the structure of what is saved, since a bool would become
    # an array in it.
    learns = [() if kept else None for kept in perturbed(head)]
    parts = tuple(values_of(entry) for entry in (x, head, bias, targets, weights))
    return _tiled_row_nats(*parts, extras, tile), (parts, learns)


def _row_nats_backward(extras: Extras, tile: int, saved: Any, slopes: Any) -> tuple[Any, ...]:
    """With g_b the slope of row b, the gradient of sum g_b nats_b is that of the cross-entropy of
    all tokens with the weights g_b w_bt, which `tiled_loss` computes in tiles."""
    (x, head, bias, targets, weights), learns = saved
    if isinstance(slopes, SymbolicZero):  # the rows are not used
        slopes = jnp.zeros(slopes.shape, slopes.dtype)
    rows = TokenRows(x, targets, slopes[:, None] * weights)
    kept = [mark is not None for mark in learns]
    _, found = tiled_gradients(rows, head, bias, kept, extras, tile)
    return tiled_backward(extras, tile, found, (jnp.float32(1), jnp.float32(0)))


_tiled_row_nats.defvjp(_row_nats_forward, _row_nats_backward, symbolic_zeros=True)
