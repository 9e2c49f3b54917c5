"""Masks are positions and segments: who may look at whom follows from where each token is and what
it belongs to.

query at position 2 of segment 1, keys:   position  0 1 2 3 0 1
                                          segment   1 1 1 1 2 2
                              causal      allowed   x x x . . .
                              both ways   allowed   x x x x . .
                    causal, window of 2   allowed   . x x . . .
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class TokenLayout:
    """Where each token of a [B, T] batch is.

    `positions` int32 counts from 0 in each segment; `segments` int32 is 0 for padding, None where a
    row is one segment. `ordered` says at trace time that positions grow along the row within a
    segment, so that kernels may go by the order.
    """

    positions: jax.Array
    segments: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)


class AttentionMask(NamedTuple):
    """All that attention goes by besides queries, keys and values.

    `window` is the number of tokens back that a query sees, itself counted in (both ways where it
    is not causal); 0 is all. Scores are products times `scale` (1/sqrt(H) where it is 0), capped to
    `soft_cap` tanh(s / soft_cap) where that is given, plus `bias` [B or 1, N, T, S]. `sinks` [N]
    are scores of a key with no value. Where queries and keys are not of one sequence, `relative` is
    False: the distance between them means nothing.
    """

    queries: TokenLayout
    keys: TokenLayout
    causal: bool = True
    window: int = 0
    scale: float = 0.0
    soft_cap: float = 0.0
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    relative: bool = True


def layout_of(
    tokens: jax.Array, positions: jax.Array | None, segments: jax.Array | None
) -> TokenLayout:
    """The places of `tokens` [B, T]; positions not given count from the start of each segment, 0 on
    padding."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    if positions is None and segments is not None:
        begins = jnp.concatenate(
            [jnp.ones_like(segments[..., :1], bool), segments[..., 1:] != segments[..., :-1]],
            axis=-1,
        )
        counted = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=index.ndim - 1)
        return TokenLayout(jnp.where(segments != 0, counted, 0), segments, ordered=True)
    return TokenLayout(
        index if positions is None else positions, segments, ordered=positions is None
    )


def visible(mask: AttentionMask) -> jax.Array | None:
    """bool [B, T, S]: the keys of a query's own segment, none of them padding, on its side and in
    its window; None: all."""
    queries, keys = mask.queries, mask.keys
    back = queries.positions[..., :, None] - keys.positions[..., None, :]
    allowed = back >= 0 if mask.causal else None
    if mask.window:
        near = (back if mask.causal else jnp.abs(back)) < mask.window
        allowed = near if allowed is None else allowed & near
    if queries.segments is not None or keys.segments is not None:
        q_seg = jnp.ones_like(queries.positions) if queries.segments is None else queries.segments
        k_seg = jnp.ones_like(keys.positions) if keys.segments is None else keys.segments
        own = (q_seg[..., :, None] == k_seg[..., None, :]) & (k_seg[..., None, :] != 0)
        allowed = own if allowed is None else allowed & own
    return allowed
