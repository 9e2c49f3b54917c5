"""Masks are positions and segments: who may look at whom follows from where each token is and what it belongs to.

query at position 2 of segment 1, keys:   position  0 1 2 3 0 1
                                          segment   1 1 1 1 2 2
                                          allowed   x x x . . .
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Places:
    """Where each token of a [B, T] batch is.

    `positions` int32 counts from 0 in each segment; `segments` int32 is 0 for padding, None where a row is one segment.
    `ordered` says at trace time that positions grow along the row within a segment, so that kernels may go by the order.
    """

    positions: jax.Array
    segments: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)


def places_of(tokens: jax.Array, positions: jax.Array | None, segments: jax.Array | None) -> Places:
    """The places of `tokens` [B, T]; positions not given count from the start of each segment."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    if positions is None and segments is not None:
        begins = jnp.concatenate([jnp.ones_like(segments[..., :1], bool), segments[..., 1:] != segments[..., :-1]], axis=-1)
        return Places(index - jax.lax.cummax(jnp.where(begins, index, 0), axis=index.ndim - 1), segments, ordered=True)
    return Places(index if positions is None else positions, segments, ordered=positions is None)


def causal_mask(queries: Places, keys: Places) -> jax.Array:
    """bool [B, T, S]: key not after the query, of the query's own segment, and not padding."""
    mask = keys.positions[..., None, :] <= queries.positions[..., :, None]
    if queries.segments is not None or keys.segments is not None:
        q_seg = jnp.ones_like(queries.positions) if queries.segments is None else queries.segments
        k_seg = jnp.ones_like(keys.positions) if keys.segments is None else keys.segments
        mask &= (q_seg[..., :, None] == k_seg[..., None, :]) & (k_seg[..., None, :] != 0)
    return mask
