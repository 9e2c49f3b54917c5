"""Cross-entropy as sums over tokens, which only the train step divides.

Few logits are computed at once, for every transform. Many are computed one tile of tokens at a
time, with the gradients of the hidden states and the output layer in the same pass, so that the
logits of all tokens are never in memory together.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.params import CustomLeaf, contract, is_custom
from jaxformer.sharding import platform

DENSE_LOGITS = 2**23  # up to this many on a device are computed at once
# Beyond that, the tokens of a tile on each device: enough that the products of a tile take longer
# than adding its gradient of the matrix to the total.
TILE_ROWS = {"cpu": 512}
TILE_ROWS_ELSEWHERE = 8192

ObjectiveAndNats = tuple[jax.Array, jax.Array]


class Extras(NamedTuple):
    """Options of `cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0


@jax.named_scope("loss")
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
    """Weighted sums over the tokens (objective, nats): [B, T, D], [V, D], int [B, T], float32
    [B, T] -> two float32 scalars.

    nats = sum w (lse - logit_y), with lse = log sum exp of the logits x head^T + bias, has no
    gradient. The objective has `label_smoothing` e in its targets, (1 - e) onehot + e / V
    (arXiv:1512.00567), and adds `z_loss` lse^2 (arXiv:2204.02311); with a `soft_cap` c, logits l
    become c tanh(l / c). `tile` is the number of positions computed at a time; the default is all
    if the logits are few. In tiles, the gradient is one of reverse mode only.
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
    most = max(TILE_ROWS.get(platform(), TILE_ROWS_ELSEWHERE) * devices // rows, 1)
    return -(-length // -(-length // most))


class _Shares(NamedTuple):
    """exp(logits - top) [B, T, V], lse [B, T, 1], lse - top [B, T, 1], and the derivative of the
    soft cap [B, T, V], None without one."""

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
    """(objective, nats, what the gradient needs) of all tokens at once, from their logits
    [B, T, V]."""
    vocab = logits.shape[-1]
    if extras.soft_cap:
        logits = extras.soft_cap * jnp.tanh(logits / extras.soft_cap)
    # Subtracting the largest logit of a token keeps exp finite; it cancels in lse, so it needs no
    # gradient.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.exp(logits - top)
    log_total = jnp.log(jnp.sum(powers, axis=-1, keepdims=True))
    lse = top + log_total
    nats = lse - jnp.sum(jnp.where(_is_target(targets, vocab), logits, 0), axis=-1, keepdims=True)
    loss = nats
    if extras.label_smoothing:
        # Cross-entropy is linear in the targets: (1 - e) that of onehot plus e that of 1 / V.
        even = lse - jnp.mean(logits, axis=-1, keepdims=True)
        loss = (1 - extras.label_smoothing) * nats + extras.label_smoothing * even
    if extras.z_loss:
        loss = loss + extras.z_loss * jnp.square(lse)
    each = weights[..., None]
    slope = 1 - jnp.square(logits / extras.soft_cap) if extras.soft_cap else None
    return jnp.sum(each * loss), jnp.sum(each * nats), _Shares(powers, lse, log_total, slope)


def _is_target(targets: jax.Array, vocab: int) -> jax.Array:
    """bool [B, T, V], by comparison: a gather from a vocabulary that is sharded over devices would
    need communication."""
    return targets[..., None] == jnp.arange(vocab)


def _tiles(a: jax.Array, tile: int) -> jax.Array:
    """[B, T, ...] to [tiles, B, tile, ...], padded with zeros; their weight is 0."""
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
    """The sums and their gradients by x, head and bias, from one set of logits per tile.

    The objective is one scalar, so the backward pass only scales gradients that are made here,
    where the logits of a tile [B, tile, V] are at hand. They are never stored or computed again.
    """
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
    # The carry holds the sums and the gradients of head and bias in float32, which every tile adds
    # to; the gradient of x is one piece per tile, [tiles, B, tile, D] -> [B, T, D].
    (objective, nats, *slopes), d_x = jax.lax.scan(add, (zero, zero, *nothing), items)
    d_x = jnp.moveaxis(d_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    return (objective, nats), (d_x, *slopes, head, bias)


def _slope(shares: _Shares, target: jax.Array, weight: jax.Array, extras: Extras) -> jax.Array:
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


Pull = Callable[[jax.Array], tuple[jax.Array, list[jax.Array]]]


def _matrix_product(rows: jax.Array, head: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Pull]:
    """The logits of a tile, and the function from their gradient to that of rows and, in float32,
    of the matrix."""

    def pull(d_logits: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        d_rows = contract("BTV,VD->BTD", d_logits, matrix, to=("batch", None, None))
        # [B tile, V]^T [B tile, D] -> [V, D]
        flat, d_flat = (a.reshape(-1, a.shape[-1]) for a in (rows, d_logits))
        over_tokens, dtype = (((0,), (0,)), ((), ())), jnp.float32
        d_matrix = jax.lax.dot_general(d_flat, flat, over_tokens, preferred_element_type=dtype)
        return d_rows, [d_matrix]

    return _logits(rows, matrix, None), pull


def _custom_product(
    rows: jax.Array, head: CustomLeaf, matrix: CustomLeaf
) -> tuple[jax.Array, Pull]:
    """`_matrix_product` of a custom leaf; its parts of a floating type have a gradient."""
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
    slope, given = slopes[0], iter(d_head)  # nats has no gradient
    of_head = []
    leaves, treedef = jax.tree.flatten(head)
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            of_head.append((slope * next(given)).astype(leaf.dtype))
        else:  # float0 is JAX's type of the gradient of integers
            of_head.append(np.zeros(leaf.shape, jax.dtypes.float0))
    of_bias = None if bias is None else (slope * d_bias).astype(bias.dtype)
    of_x = (slope * d_x).astype(d_x.dtype)
    return of_x, jax.tree.unflatten(treedef, of_head), of_bias, None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)
