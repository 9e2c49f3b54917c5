"""Cross-entropy as sums over tokens, which only the train step divides.

Few logits are computed at once, for every transform. Many are computed one tile of tokens at a
time, with the gradients of the hidden states and the output layer in the same pass, so that the
logits of all tokens are never in memory together.
"""

import math

import jax
from jaxtyping import Array, Float, Int

from jaxformer.arrays.params import CustomLeaf
from jaxformer.arrays.sharding import free_axes, platform
from jaxformer.losses.logits import Extras, ObjectiveAndNats, logits_of, sums_of_logits
from jaxformer.losses.tiled import tiled

DENSE_LOGITS = 2**23  # up to this many on a device are computed at once
# Beyond that, the tokens of a tile on each device: enough that the products of a tile take longer
# than adding its gradient of the matrix to the total, and few enough for its logits.
TILE_ROWS = {"cpu": 512}
TILE_ROWS_ELSEWHERE = 8192
TILE_LOGITS = 2**27  # half a GiB in float32


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
    if the logits are few. In tiles, the gradient is one of reverse mode only, and each device
    computes the tiles of its own rows.
    """
    more = Extras(**{name: float(value) for name, value in extras.items()})
    if tile is None:
        tile = tile_length(targets.shape[0], targets.shape[1], head.shape[0])
    elif tile >= targets.shape[1]:
        tile = 0
    if not tile:
        objective, nats, _ = sums_of_logits(logits_of(x, head, bias), targets, weights, more)
    else:
        objective, nats = tiled(x, head, bias, targets, weights, more, tile)
    return objective, jax.lax.stop_gradient(nats)


def tile_length(rows: int, length: int, vocab: int) -> int:
    """Positions of a sequence to compute at a time, in tiles of nearly equal length; 0 for few
    logits, which are computed at once, and differentiable in every way."""
    devices = math.prod(free_axes().values())
    if rows * length * vocab <= DENSE_LOGITS * devices:
        return 0
    rows_of_tile = min(TILE_ROWS.get(platform(), TILE_ROWS_ELSEWHERE), TILE_LOGITS // vocab)
    most = max(rows_of_tile * devices // rows, 1)
    return -(-length // -(-length // most))
