"""The loss of a language model, as sums over tokens that only the train step divides.

Few logits are computed the plain way, which every transform understands. Many are computed a tile
of tokens at a time, and the gradients to the hidden states and the output layer are made in the
same pass, so that the logits of all tokens are never in memory together.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.params import CustomLeaf, contract, is_custom

DENSE_LOGITS = 2**23  # up to this many a device are computed at once
TILE_ROWS = {
    "cpu": 512
    # tokens of a tile on each device beyond that: enough to hide the sum over tiles behind the
    # products
}
TILE_ROWS_ELSEWHERE = 8192

ObjectiveAndNats = tuple[jax.Array, jax.Array]


class Extras(NamedTuple):
    """What the objective adds to the plain loss."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0


def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"] | CustomLeaf,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    bias: Float[Array, "V"] | None = None,
    tile: int | None = None,
    **extras: float,
) -> ObjectiveAndNats:
    """Weighted sums over the tokens (objective, nats): [B, T, D], [V, D], int [B, T], float32 [B,
    T] -> two float32 scalars.

    nats = sum w (lse - logit_y), lse = log sum exp of the logits x head^T + bias, carries no
    gradient. `extras` are the fields of `Extras`, 0 where not given: the objective has
    `label_smoothing` e in its targets, (1 - e) onehot + e / V (arXiv:1512.00567), and adds z_loss
    lse^2 (arXiv:2204.02311); logits l become `soft_cap` tanh(l / soft_cap) where that is not 0.
    `tile` is the number of positions computed at a time: all, where the logits are few, unless it
    is given. Less than all means that the gradient is one of reverse mode only.
    """
    more = Extras(**{name: float(value) for name, value in extras.items()})
    if tile is None:
        tile = _tile_length(targets.shape[0], targets.shape[1], head.shape[0])
    if tile >= targets.shape[1]:
        objective, nats, _ = _sums(_logits(x, head, bias), targets, weights, more)
    else:
        objective, nats = _tiled(x, head, bias, targets, weights, more, tile)
    return objective, jax.lax.stop_gradient(nats)


def _tile_length(rows: int, length: int, vocab: int) -> int:
    """Positions of a sequence to compute at a time, in tiles of nearly equal length."""
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    if rows * length * vocab <= DENSE_LOGITS * devices:
        return length
    most = max(TILE_ROWS.get(jax.default_backend(), TILE_ROWS_ELSEWHERE) * devices // rows, 1)
    return -(-length // -(-length // most))


class _Shares(NamedTuple):
    """exp(logits - top) [B, T, V], lse [B, T, 1], lse - top [B, T, 1], and the slope of the capped
    logits, None uncapped."""

    powers: jax.Array
    lse: jax.Array
    log_total: jax.Array
    slope: jax.Array | None


def _logits(x: jax.Array, head: Any, bias: jax.Array | None) -> jax.Array:
    """[B, T, D] -> float32 [B, T, V], not yet capped."""
    logits = contract("BTD,VD->BTV", x, head, to=("batch", None, "vocab"), dtype=jnp.float32)
    return logits if bias is None else logits + bias


def _sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, extras: Extras
) -> tuple[jax.Array, jax.Array, _Shares]:
    """(objective, nats, what the gradient needs) of all tokens at once, from their logits [B, T,
    V]."""
    vocab = logits.shape[-1]
    if extras.soft_cap:
        logits = extras.soft_cap * jnp.tanh(logits / extras.soft_cap)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.exp(logits - top)
    log_total = jnp.log(jnp.sum(powers, axis=-1, keepdims=True))
    lse = top + log_total
    nats = lse - jnp.sum(jnp.where(_is_target(targets, vocab), logits, 0), axis=-1, keepdims=True)
    loss = nats
    if extras.label_smoothing:
        even = lse - jnp.mean(logits, axis=-1, keepdims=True)
        loss = (1 - extras.label_smoothing) * nats + extras.label_smoothing * even
    if extras.z_loss:
        loss = loss + extras.z_loss * jnp.square(lse)
    each = weights[..., None]
    slope = 1 - jnp.square(logits / extras.soft_cap) if extras.soft_cap else None
    return jnp.sum(each * loss), jnp.sum(each * nats), _Shares(powers, lse, log_total, slope)


def _is_target(targets: jax.Array, vocab: int) -> jax.Array:
    """bool [B, T, V]: a comparison instead of a gather, so that a vocabulary over several devices
    needs no exchange."""
    return targets[..., None] == jnp.arange(vocab)


def _tiles(a: jax.Array, tile: int) -> jax.Array:
    """[B, T, ...] to [tiles, B, tile, ...], zeros after the end."""
    padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % tile)) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(padded.reshape(a.shape[0], -1, tile, *a.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _tiled(
    x: jax.Array,
    head: Any,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    extras: Extras,
    tile: int,
) -> ObjectiveAndNats:
    def add(total: ObjectiveAndNats, item: Any) -> tuple[ObjectiveAndNats, None]:
        objective, nats, _ = _sums(_logits(item[0], matrix, bias), item[1], item[2], extras)
        return (total[0] + objective, total[1] + nats), None

    matrix = head.astype(x.dtype)
    zero = jnp.float32(0)
    return jax.lax.scan(add, (zero, zero), tuple(_tiles(a, tile) for a in (x, targets, weights)))[0]


def _tiled_forward(
    x: jax.Array,
    head: Any,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    extras: Extras,
    tile: int,
) -> tuple[ObjectiveAndNats, Any]:
    """The sums, and d objective / dx, / dhead and / dbias, from one set of logits a tile."""
    product = _custom_product if is_custom(head) else _matrix_product
    matrix = head.astype(x.dtype)

    def add(total: Any, item: Any) -> tuple[Any, jax.Array]:
        rows, target, weight = item
        logits, pull = product(rows, head, matrix)
        logits = logits if bias is None else logits + bias
        objective, nats, shares = _sums(logits, target, weight, extras)
        d_logits = _slope(shares, target, weight, extras)
        d_rows, d_head = pull(d_logits.astype(rows.dtype))
        d_bias = None if bias is None else d_logits.sum((0, 1))
        sums = (objective, nats, d_head, d_bias)
        return jax.tree.map(jnp.add, total, sums), d_rows

    zero = jnp.float32(0)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (_floats(head), bias))
    items = tuple(_tiles(a, tile) for a in (x, targets, weights))
    (objective, nats, *slopes), d_x = jax.lax.scan(add, (zero, zero, *nothing), items)
    d_x = jnp.moveaxis(d_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    return (objective, nats), (d_x, *slopes, head, bias)


def _slope(shares: _Shares, target: jax.Array, weight: jax.Array, extras: Extras) -> jax.Array:
    """d objective / d logits [B, T, V] before the cap, float32."""
    smoothing, z_loss, _ = extras
    vocab, each = shares.powers.shape[-1], weight[..., None]
    toward = jnp.where(_is_target(target, vocab), each * (1 - smoothing), 0) + each * (
        smoothing / vocab
    )
    slope = (
        shares.powers * (each * (1 + 2 * z_loss * shares.lse) * jnp.exp(-shares.log_total)) - toward
    )
    return slope if shares.slope is None else slope * shares.slope


Pull = Callable[[jax.Array], tuple[jax.Array, list[jax.Array]]]


def _matrix_product(rows: jax.Array, head: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Pull]:
    """The logits of a tile, and what takes their gradient to those of rows and, in float32, of the
    matrix."""

    def pull(d_logits: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        d_rows = contract("BTV,VD->BTD", d_logits, matrix, to=("batch", None, None))
        flat, d_flat = (a.reshape(-1, a.shape[-1]) for a in (rows, d_logits))
        numbers = (((0,), (0,)), ((), ()))
        return d_rows, [
            jax.lax.dot_general(d_flat, flat, numbers, preferred_element_type=jnp.float32)
        ]

    return _logits(rows, matrix, None), pull


def _custom_product(
    rows: jax.Array, head: CustomLeaf, matrix: CustomLeaf
) -> tuple[jax.Array, Pull]:
    """The same of a weight that is no array, of whose parts those of a floating type have a
    gradient."""
    leaves, treedef = jax.tree.flatten(head)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def of_parts(rows: jax.Array, parts: list[jax.Array]) -> jax.Array:
        given = iter(parts)
        whole = [next(given) if kept else leaf for leaf, kept in zip(leaves, floating, strict=True)]
        return _logits(rows, jax.tree.unflatten(treedef, whole).astype(rows.dtype), None)

    logits, back = jax.vjp(of_parts, rows, _floats(head))

    def pull(d_logits: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        d_rows, d_parts = back(d_logits.astype(jnp.float32))
        return d_rows, [part.astype(jnp.float32) for part in d_parts]

    return logits, pull


def _floats(head: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(head) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _tiled_backward(
    extras: Extras, tile: int, saved: Any, slopes: ObjectiveAndNats
) -> tuple[Any, ...]:
    d_x, d_head, d_bias, head, bias = saved
    leaves, treedef = jax.tree.flatten(head)
    given = iter(d_head)
    of_head = [
        (
            (slopes[0] * next(given)).astype(leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else np.zeros(leaf.shape, jax.dtypes.float0)
        )
        for leaf in leaves
    ]
    of_bias = None if bias is None else (slopes[0] * d_bias).astype(bias.dtype)
    return (
        (slopes[0] * d_x).astype(d_x.dtype),
        jax.tree.unflatten(treedef, of_head),
        of_bias,
        None,
        None,
    )


_tiled.defvjp(_tiled_forward, _tiled_backward)
