"""Cross-entropy of hidden states and an output layer, as sums over tokens, which only the train
step divides, or over each row. With l the logits of a token, y its target and w its weight:

    lse       = log sum exp l, and p = exp(l - lse)
    nats      = w (lse - l_y)
    objective = w ((1 - e) (lse - l_y) + e (lse - mean l) + z lse^2)

e is the label smoothing (arXiv:1512.00567) and z the weight of the z-loss (arXiv:2204.02311); with
a soft cap c, l is c tanh(l / c) of what the output layer gives.

If there are few logits, all are computed at once, which every transform supports. Otherwise they
are computed in tiles of positions, each for all rows, so that the logits of all tokens are never in
memory together:

            positions 0 ... T
    row 0   [tile 0 | tile 1 | tile 2]
    row 1   [       |        |       ]

The sum over all tokens is one scalar. Its gradients by the hidden states and the output layer are
computed in the forward pass, from the logits [B, tile, V] of each tile, and the backward pass only
scales them. For the sums over rows, the backward pass has a factor for each row, so it computes the
tiles a second time, with their gradients.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxformer.arrays.exact import is_exact, sum_of_powers
from jaxformer.arrays.params import CustomLeaf, Weight, contract, is_custom, product
from jaxformer.arrays.sharding import (
    ACTIVATION_RULES,
    PARAMETERS,
    explicit_axes,
    free_axes,
    on_devices,
    platform,
)
from jaxformer.files import ConfigError
from jaxformer.layers.head import OutputLayer, logits_of_rows

# Up to this number of logits on a device, all are computed at once.
DENSE_LOGITS = 2**23
# Above it, the tokens of a tile on each device: enough that the products of a tile take longer than
# adding its gradient of the matrix to the total, and few enough that its logits take little memory.
TILE_ROWS = {"cpu": 512}
TILE_ROWS_ELSEWHERE = 8192
# At most this number of logits of a tile on each device, half a GiB in float32.
TILE_LOGITS = 2**27

HeadBias = jax.Array | None
ObjectiveAndNats = tuple[jax.Array, jax.Array]


# Logits: their sums over tokens, and the derivative of these.


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
    return top, sum_of_powers(logits - top)


def top_and_total_at_once(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `top_and_total` in one pass without a derivative: pieces of the vocabulary have
    (top, total), and two of them have the larger top and the sum of their totals relative to it
    (arXiv:1805.02867)."""
    if is_exact():
        return top_and_total(logits)
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


# Hidden states and an output layer, whose logits are computed in tiles.


class TokenRows(NamedTuple):
    """The arrays with rows: x [B, T, D], targets and weights [B, T]."""

    x: jax.Array
    targets: jax.Array
    weights: jax.Array

    def tiles(self, tile: int) -> "TokenRows":
        """Return [B, T, ...] as [tiles, B, tile, ...], padded with zeros; their weight is 0."""

        def split(a: jax.Array) -> jax.Array:
            padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % tile)) + ((0, 0),) * (a.ndim - 2))
            return jnp.moveaxis(padded.reshape(a.shape[0], -1, tile, *a.shape[2:]), 1, 0)

        return TokenRows(*map(split, self))


class Gradients(NamedTuple):
    """The gradients of the objective by x [B, T, D], by each leaf of the head (None for one that
    does not learn) and by the bias [V]; all are None in a pass without gradients."""

    x: Any = None
    head: Any = None
    bias: Any = None


@jax.named_scope("loss")
def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"] | CustomLeaf,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    bias: Float[Array, "V"] | None = None,
    tile: int | None = None,
    logits_dtype: str = "float32",
    nats_by_row: bool = False,
    **extras: float,
) -> ObjectiveAndNats:
    """Return weighted sums over the tokens (objective, nats): [B, T, D], [V, D], int [B, T],
    float32 [B, T] -> two float32 scalars; with `nats_by_row` nats are those of each row, [B].

    nats = sum w (lse - logit_y), with lse = log sum exp of the logits x head^T + bias, has no
    gradient. The objective has `label_smoothing` e in its targets, (1 - e) onehot + e / V
    (arXiv:1512.00567), and adds `z_loss` lse^2 (arXiv:2204.02311); with a `soft_cap` c, logits l
    become c tanh(l / c). `tile` is the number of positions computed at a time; the default is all
    if the logits are few. In tiles, the gradient is one of reverse mode only, and each device
    computes the tiles of its own rows. `logits_dtype` is that in which x head^T is stored:
    "bfloat16" halves what is written and read, and rounds each logit by up to 1/512; all that
    follows is computed in float32.
    """
    # Hashable numbers: they are static arguments of the derivative below.
    options = extras_of(**extras)._replace(logits_dtype=jnp.dtype(logits_dtype))
    rows = TokenRows(x, targets, weights)
    by_row = ByRow(False, nats_by_row)
    objective, nats = _sums(rows, head, bias, options, tile, by_row)
    return objective, jax.lax.stop_gradient(nats)


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
    """Return the nats of each row, sum over t of w (lse - logit_y), for losses that are no sum over
    tokens: [B, T, D], [V, D], int [B, T], float32 [B, T] -> float32 [B].

    `soft_cap` and `tile` are those of `cross_entropy`. In tiles, the gradient is one of reverse
    mode only, which computes the logits a second time.
    """
    options = extras_of(soft_cap=soft_cap)
    rows = TokenRows(x, targets, weights)
    by_row = ByRow(True, True)
    return _sums(rows, head, bias, options, tile, by_row)[0]


@jax.named_scope("loss")
def token_log_probs(
    output: OutputLayer,
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    soft_cap: float = 0.0,
    tile: int | None = None,
) -> Float[Array, "B T"]:
    """Return the log-probability of each target, of the logits over `temperature`, float32. In
    tiles, the backward pass computes the logits of each a second time."""

    def of_tile(piece: TokenRows) -> jax.Array:
        logits = logits_of_rows(piece.x, output.matrix, output.bias)
        if soft_cap:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = logits / temperature
        top, total = top_and_total(logits)
        return (summed(logits, piece.targets) - top - jnp.log(total))[..., 0]

    batch, length = targets.shape
    rows = TokenRows(output.rows, targets, jnp.zeros(targets.shape))
    if tile is None:
        tile = tile_length(batch, length, output.matrix.shape[0])
    if not tile or tile >= length:
        return of_tile(rows)
    # [tiles, B, tile] -> [B, T], without the padding of the last tile.
    pieces = jax.lax.map(jax.checkpoint(of_tile), rows.tiles(tile))
    return jnp.moveaxis(pieces, 0, 1).reshape(batch, -1)[:, :length]


@jax.named_scope("loss")
def distillation(
    student: OutputLayer,
    teacher: OutputLayer,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    temperature: float = 1.0,
    teacher_cap: float = 0.0,
    logits_dtype: str = "float32",
    tile: int | None = None,
    **extras: float,
) -> tuple[Float[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """Return (objective, nats, divergence) of each row, sums over its tokens: the first two are
    those of `cross_entropy` of the student, and the third, without the factor T^2 of
    arXiv:1503.02531,

        sum over t of w KL(q || p), q = softmax(teacher's logits / T), p = softmax(student's / T).

    `student` and `teacher` are the output layers with their rows [B, T, D], each with a width of
    its own. Where one has more logits, which fill its table up, q and p are of the first ones that
    both have. `teacher_cap` is the soft cap of the teacher. In tiles, no two logits of all tokens
    are in memory together: the backward pass computes both logits of each tile a second time.
    """
    options = extras_of(**extras)._replace(logits_dtype=jnp.dtype(logits_dtype))
    vocab = min(student.matrix.shape[0], teacher.matrix.shape[0])

    def sums_of(rows: TokenRows, teacher_rows: jax.Array) -> tuple[jax.Array, ...]:
        logits = logits_of_rows(rows.x, student.matrix, student.bias, options.logits_dtype)
        by_row = ByRow(True, True)
        objective, nats, softmax = sums_of_logits(logits, *rows[1:], options, by_row=by_row)
        theirs = logits_of_rows(teacher_rows, teacher.matrix, teacher.bias, options.logits_dtype)
        if teacher_cap:
            theirs = teacher_cap * jnp.tanh(theirs / teacher_cap)
        # [B, tile, V], after the soft caps
        log_p = jax.nn.log_softmax(softmax.logits[..., :vocab] / temperature)
        log_q = jax.nn.log_softmax(theirs[..., :vocab] / temperature)
        divergence = (jnp.exp(log_q) * (log_q - log_p)).sum(axis=-1)
        return objective, nats, (rows.weights * divergence).sum(axis=1)

    def add(totals: Any, piece: tuple[TokenRows, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, totals, sums_of(*piece)), None

    rows = TokenRows(student.rows, targets, weights)
    if tile is None:
        # The logits of both models.
        both = student.matrix.shape[0] + teacher.matrix.shape[0]
        tile = tile_length(len(targets), targets.shape[1], both)
    if not tile or tile >= targets.shape[1]:
        return sums_of(rows, teacher.rows)  # type: ignore[return-value]
    pieces = rows.tiles(tile), rows._replace(x=teacher.rows).tiles(tile).x
    zeros = (jnp.zeros(len(targets)),) * 3
    return jax.lax.scan(jax.checkpoint(add), zeros, pieces)[0]  # type: ignore[no-any-return]


def tile_length(rows: int, length: int, vocab: int) -> int:
    """Return positions of a sequence to compute at a time, in tiles of nearly equal length; 0 for
    few logits, which are computed at once, and differentiable in every way. Where the mesh divides
    the positions, they are those of one device."""
    sizes = free_axes()
    split = _split_positions(length, sizes)
    length = length // split
    devices = math.prod(sizes.values()) // split
    # A few logits are worth no loop, whose gradient has no forward mode.
    if rows * length * vocab <= DENSE_LOGITS * devices:
        return 0
    rows_of_tile = min(TILE_ROWS.get(platform(), TILE_ROWS_ELSEWHERE), TILE_LOGITS // vocab)
    # Rows of the batch are all in a tile, so that it has as many positions as fill it.
    longest = max(rows_of_tile * devices // rows, 1)
    # As few tiles as this length allows, and then the length that divides the positions evenly.
    tiles = -(-length // longest)
    return -(-length // tiles)


def _sums(
    rows: TokenRows, head: Weight, bias: HeadBias, extras: Extras, tile: int | None, by_row: ByRow
) -> ObjectiveAndNats:
    """Return (objective, nats): each a scalar, or [B] by row."""
    length = rows.targets.shape[1]
    if tile is None:
        tile = tile_length(len(rows.x), length, head.shape[0])
    elif tile >= length:
        tile = 0
    if tile:
        return _tiled(rows, head, bias, extras, tile, by_row)  # type: ignore[no-any-return]
    logits = logits_of_rows(rows.x, head, bias, extras.logits_dtype)
    return sums_of_logits(logits, *rows[1:], extras, by_row=by_row)[:2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _tiled(
    rows: TokenRows, head: Weight, bias: HeadBias, extras: Extras, tile: int, by_row: ByRow
) -> ObjectiveAndNats:
    passes = _passes()

    def sums_of(rows: TokenRows, matrix: Weight, bias: HeadBias) -> Any:
        def add(totals: ObjectiveAndNats, piece: TokenRows) -> tuple[ObjectiveAndNats, None]:
            logits = logits_of_rows(piece.x, matrix, bias, extras.logits_dtype)
            objective, nats, _ = sums_of_logits(logits, *piece[1:], extras, passes, by_row)
            return (totals[0] + objective, totals[1] + nats), None

        objective, nats = (jnp.zeros(len(rows.x) if each else (), jnp.float32) for each in by_row)
        return jax.lax.scan(add, (objective, nats), rows.tiles(tile))[0], Gradients()

    # Once, and not in each tile.
    cast = head.astype(rows.x.dtype)
    return _by_device(sums_of, rows, cast, bias, by_row)[0]  # type: ignore[no-any-return]


def _forward(
    rows: Any, head: Any, bias: Any, extras: Extras, tile: int, by_row: ByRow
) -> tuple[ObjectiveAndNats, Any]:
    # Only the leaves by which the loss is differentiated: an output layer that does not learn, such
    # as that of a model with an adapter, has no gradient.
    learning = jax.tree.map(lambda leaf: leaf.value if leaf.perturbed else None, head)
    rows, head, bias = custom_vjp_primal_tree_values((rows, head, bias))
    if by_row.objective:
        return _tiled(rows, head, bias, extras, tile, by_row), (rows, head, bias, learning)
    sums, gradients = _sums_and_gradients(rows, head, bias, learning, extras, tile, by_row)
    return sums, (gradients, learning, bias)


def _backward(
    extras: Extras, tile: int, by_row: ByRow, saved: Any, slopes: tuple[Any, Any]
) -> tuple[Any, ...]:
    # The slope of nats is not used: it has no gradient.
    slope = slopes[0]
    # Nothing that is differentiated uses the objective.
    if isinstance(slope, SymbolicZero):
        slope = jnp.zeros(slope.shape, slope.dtype)
    if by_row.objective:
        # With g_b the slope of row b, the gradient of sum g_b objective_b is that of the sum over
        # all tokens with the weights g_b w_bt.
        rows, head, bias, learning = saved
        rows = rows._replace(weights=slope[:, None] * rows.weights)
        _, gradients = _sums_and_gradients(rows, head, bias, learning, extras, tile)
        slope = jnp.float32(1)
    else:
        gradients, learning, bias = saved
    # Each gradient gets the dtype of its primal.
    primals = (gradients.x, learning, bias)
    d_x, d_head, d_bias = jax.tree.map(
        lambda gradient, primal: (slope * gradient).astype(primal.dtype), tuple(gradients), primals
    )
    return TokenRows(d_x, None, None), d_head, d_bias  # type: ignore[arg-type]


_tiled.defvjp(_forward, _backward, symbolic_zeros=True)


def _sums_and_gradients(
    rows: TokenRows,
    head: Weight,
    bias: HeadBias,
    learning: Any,
    extras: Extras,
    tile: int,
    by_row: ByRow = TOTALS,
) -> tuple[ObjectiveAndNats, Gradients]:
    """Return the sums over all tokens, of nats maybe by row, and the gradients of the objective;
    the logits of each tile are computed once for both. `learning` is the head with None for each
    leaf that does not learn."""
    passes = _passes()
    if not is_custom(head):
        head = head.astype(rows.x.dtype)

    def gradients_of(rows: TokenRows, head: Weight, bias: HeadBias) -> Any:
        local = jax.tree.map(lambda leaf, learns: None if learns is None else leaf, head, learning)

        # [B, tile, D] -> logits and their gradient [B, tile, V], which live only within a tile.
        def add(totals: Any, piece: TokenRows) -> tuple[Any, jax.Array]:
            logits, pull = _logits_and_pull(piece.x, head, local, extras.logits_dtype)
            if bias is not None:
                logits = logits + bias
            *sums, softmax = sums_of_logits(logits, *piece[1:], extras, passes, by_row)
            d_logits = logits_gradient(softmax, *piece[1:], extras)
            d_x, d_head = pull(d_logits.astype(piece.x.dtype))
            d_bias = None
            if bias is not None:
                d_bias = d_logits.sum((0, 1))
            return jax.tree.map(jnp.add, totals, (*sums, d_head, d_bias)), d_x

        # The carry holds the sums and the gradients of head and bias in float32, which every tile
        # adds to; the gradient of x is one piece per tile, [tiles, B, tile, D] -> [B, T, D].
        nats = rows.weights[:, 0] if by_row.nats else 0
        zeros = jax.tree.map(lambda a: jnp.zeros(jnp.shape(a), jnp.float32), (0, nats, local, bias))
        (*sums, d_head, d_bias), d_x = jax.lax.scan(add, zeros, rows.tiles(tile))
        batch, length, width = rows.x.shape
        # The padding of the last tile is cut.
        d_x = jnp.moveaxis(d_x, 0, 1).reshape(batch, -1, width)[:, :length]
        return tuple(sums), Gradients(d_x, d_head, d_bias)

    return _by_device(gradients_of, rows, head, bias, by_row)  # type: ignore[no-any-return]


def _logits_and_pull(
    x: jax.Array, head: Weight, learning: Any, dtype: Any
) -> tuple[jax.Array, Any]:
    """Return the logits of a tile without bias, and the function from their gradient to the
    gradients of x and, in float32, of the leaves that learn."""
    if not is_custom(head) and learning is not None:
        pull_of_matrix = functools.partial(_pull_of_matrix, x, head)  # type: ignore[arg-type]
        return logits_of_rows(x, head, dtype=dtype), pull_of_matrix

    def logits_of(x: jax.Array, learning: Any) -> jax.Array:
        merged = jax.tree.map(lambda leaf, new: leaf if new is None else new, head, learning)
        return logits_of_rows(x, merged.astype(x.dtype), dtype=dtype)

    def pull(d_logits: jax.Array) -> tuple[jax.Array, Any]:
        d_x, d_head = back(d_logits.astype(jnp.float32))
        return d_x, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), d_head)

    logits, back = jax.vjp(logits_of, x, learning)
    return logits, pull


def _pull_of_matrix(
    x: jax.Array, matrix: jax.Array, d_logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and of the matrix: [B, tile, D], [V, D], [B, tile, V] -> [B, tile,
    D], [V, D]. The operands have x's dtype, 16 bits or 32; the sum over tokens is float32."""
    # The gradient of the logits has x's dtype: float32 products of a step in 16 bits would take
    # several times as long on an accelerator.
    d_x = contract("BTV,VD->BTD", d_logits, matrix, to=("batch", None, None))
    return d_x, product("BTV,BTD->VD", d_logits, x, jnp.float32)


def _passes() -> Passes:
    """Return how the logits of a tile are read: in the fewest passes, unless the mesh in force
    splits the vocabulary. On a CPU one pass over (logit, 1) takes longer than two over the
    logits."""
    sizes = free_axes()
    if explicit_axes() or any(sizes.get(name, 1) > 1 for name in PARAMETERS["vocab"]):
        return DIFFERENTIABLE_PASSES
    return Passes(gathered, top_and_total if platform() == "cpu" else top_and_total_at_once)


def _split_positions(length: int, sizes: Mapping[str, int]) -> int:
    """Return the number of devices that have different positions of a row."""
    split = math.prod(sizes.get(name, 1) for name in ACTIVATION_RULES["sequence"])
    if length % split:
        return 1
    return split


def _by_device(
    run: Callable[..., Any], rows: TokenRows, head: Weight, bias: HeadBias, by_row: ByRow
) -> Any:
    """Return `run(rows, head, bias)` -> (sums, gradients), by each device for the tokens that it
    has.

    In this way the head is gathered once, and its gradients are summed over the devices once, not
    in every tile.
    """
    sizes = free_axes()
    by_rows = tuple(name for name in ACTIVATION_RULES["batch"] if sizes.get(name, 1) > 1)
    divided = _split_positions(rows.targets.shape[1], sizes) > 1
    by_positions = ACTIVATION_RULES["sequence"] if divided else ()
    axes = (*by_rows, *by_positions)
    if explicit_axes() or not axes or rows.x.shape[0] % math.prod(sizes[name] for name in by_rows):
        return run(rows, head, bias)

    # The gradient of the matrix [V, D] is divided as the parameter is, along D.
    columns = tuple(axis for axis in axes if axis in PARAMETERS["embed"])
    shards = math.prod(sizes[name] for name in columns)
    # Otherwise every device gets the whole gradient, by one all-reduce.
    fits = columns and not is_custom(head) and head.shape[1] % shards == 0

    def of_device(rows: TokenRows, head: Weight, bias: HeadBias) -> Any:
        sums, (d_x, d_head, d_bias) = run(rows, head, bias)
        if fits and d_head is not None:
            shard = _columns_of_sum(d_head, columns, shards)
            # The barrier makes the step wait for the sum, so that the gradient of all columns is
            # not in memory until the end of the step.
            d_x, shard = jax.lax.optimization_barrier((d_x, shard))
            d_head = jax.lax.psum(shard, tuple(axis for axis in axes if axis not in columns))
        else:
            d_head = jax.lax.psum(d_head, axes)
        if by_row.objective == by_row.nats:
            sums = jax.lax.psum(sums, by_positions if by_row.nats else axes)
        else:
            sums = jax.lax.psum(sums[0], axes), jax.lax.psum(sums[1], by_positions)
        return sums, Gradients(d_x, d_head, jax.lax.psum(d_bias, axes))

    replicated = PartitionSpec()
    of_row = PartitionSpec(by_rows)
    split = PartitionSpec(by_rows, by_positions)
    matrix_split = replicated
    if fits:
        matrix_split = PartitionSpec(None, columns)
    of_sums = tuple(of_row if each else replicated for each in by_row)
    in_specs = (split, replicated, replicated)
    out_specs = (of_sums, Gradients(split, matrix_split, replicated))
    return on_devices(of_device, in_specs, out_specs, axes)(rows, head, bias)


def summed_in_ring(device: str, devices: int, width: int) -> bool:
    """Return whether the gradient of the output layer, of which each of so many devices of a
    platform keeps `width` columns, is summed in a ring (see `_columns_of_sum`)."""
    return device == "tpu" and devices > 4 and width % 128 == 0


def _columns_of_sum(x: jax.Array, axes: tuple[str, ...], devices: int) -> jax.Array:
    """Return the sum of x [V, D] over the devices of some axes, of which each gets its columns [V,
    D / n].

    XLA for TPUs sums all columns on each device where these form a square or a cube of more than
    four, such as v5e:4x4, and then slices. Those pass the pieces of the sum on in a ring instead,
    half the rows in each direction, which sends half the bytes.
    """
    vocab = x.shape[0]
    width = x.shape[1] // devices
    if not summed_in_ring(platform(), devices, width):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)
    return jnp.concatenate(
        [
            ring_sum(x[: vocab // 2], axes, devices, direction=1),
            ring_sum(x[vocab // 2 :], axes, devices, direction=-1),
        ]
    )


def ring_sum(x: jax.Array, axes: Any, devices: int, direction: int) -> jax.Array:
    """Return `jax.lax.psum_scatter` of the columns of x [V, D] to the next device (1) or to the one
    before (-1). A sum visits all devices, the one that keeps it last."""
    width = x.shape[1] // devices
    index = jax.lax.axis_index(axes)
    ring = [(i, (i + direction) % devices) for i in range(devices)]

    def columns(distance: Any) -> jax.Array:
        """Return those of the device at a distance from this one, in the other direction."""
        first = (index - direction * distance) % devices * width
        return jax.lax.dynamic_slice_in_dim(x, first, width, axis=1)

    def add(i: Any, partial: jax.Array) -> jax.Array:
        return jax.lax.ppermute(partial, axes, ring) + columns(i + 1)

    return jax.lax.fori_loop(1, devices, add, columns(1))  # type: ignore[no-any-return]
