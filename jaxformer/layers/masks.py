"""Masks as positions and segments: which keys a query attends to follows from where each token is.

query at position 2 of segment 1, keys:   position  0 1 2 3 0 1
                                          segment   1 1 1 1 2 2
                              causal      allowed   x x x . . .
                              both ways   allowed   x x x x . .
                    causal, window of 2   allowed   . x x . . .
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class TokenLayout:
    """The position and segment of each token of a [B, T] batch.

    `positions` int32 counts from 0 in each segment; `segments` int32 is 0 for padding, None if each
    row is one segment. `ordered` is static: positions grow along each segment, so that kernels may
    go by the order.
    """

    positions: jax.Array
    segments: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)

    def after(self, tokens: int) -> "TokenLayout":
        """Return the layout with each segment after so many tokens, which take its first
        positions."""
        if not tokens:
            return self
        return replace(self, positions=self.positions + tokens)


class Scoring(NamedTuple):
    """How scores are computed from query-key products, as in `dot_product_attention`.
    `relative_rows` [1, R, D] are those of disentangled attention, whose layers make a bias of them.
    """

    scale: float = 0.0
    soft_cap: float = 0.0
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    relative_rows: jax.Array | None = None


class AttentionMask(NamedTuple):
    """All that attention depends on besides queries, keys and values.

    `window` is the number of tokens back that a query sees, including itself (on both sides if not
    `causal`); 0 is all. `relative` is False if queries and keys are of different sequences, between
    which there are no distances. `max_segments` bounds the segment ids; 0: not known. `dropout` is
    the rate and the key of the dropout of weights; without a key nothing is dropped. `leading` keys
    come before those of `keys`, at the positions 0 .. leading - 1 of every segment: each query that
    is not padding sees all of them, whatever its segment and the window. `balanced`: the tokens of
    all devices of mesh.context are in the order of `exchange.balanced`.
    """

    queries: TokenLayout
    keys: TokenLayout
    causal: bool = True
    window: int = 0
    scoring: Scoring = Scoring()
    relative: bool = True
    max_segments: int = 0
    dropout: tuple[float, jax.Array | None] = (0.0, None)
    leading: int = 0
    balanced: bool = False


def layout_of(
    tokens: jax.Array, positions: jax.Array | None, segments: jax.Array | None
) -> TokenLayout:
    """Return the layout of `tokens` [B, T]. Without `positions`, these count from the start of each
    segment, and are 0 on padding."""
    if positions is not None:
        return TokenLayout(positions, segments)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    if segments is None:
        return TokenLayout(index, ordered=True)
    first = jnp.ones_like(segments[..., :1], bool)
    # bool [B, T]: whether a segment begins here; its index is carried on to its tokens.
    begins = jnp.concatenate([first, segments[..., 1:] != segments[..., :-1]], axis=-1)
    counted = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=index.ndim - 1)
    return TokenLayout(jnp.where(segments != 0, counted, 0), segments, ordered=True)


def visible(mask: AttentionMask) -> jax.Array | None:
    """Return bool [B, T, S]: each query sees the keys of its segment, without padding, up to its
    position if causal, and within the window if there is one. With P leading keys it is [B, T, P +
    S]. None means that all queries see all keys."""
    queries = mask.queries
    keys = mask.keys
    # How many tokens before its query a key is, [B, T, S]; negative behind it.
    back = queries.positions[..., :, None] - keys.positions[..., None, :]
    allowed = None
    if mask.causal:
        allowed = back >= 0
    if mask.window:
        near = (back if mask.causal else jnp.abs(back)) < mask.window
        allowed = near if allowed is None else allowed & near
    if queries.segments is not None or keys.segments is not None:
        # A side without ids is one segment, which broadcasts.
        one = jnp.ones((1, 1), jnp.int32)
        q_seg = one if queries.segments is None else queries.segments
        k_seg = one if keys.segments is None else keys.segments
        # Padding has the number 0 on both sides, and no query sees it.
        same_segment = (q_seg[..., :, None] == k_seg[..., None, :]) & (k_seg[..., None, :] != 0)
        allowed = same_segment if allowed is None else allowed & same_segment
    if mask.leading and allowed is not None:
        # [B, T, 1]: leading keys have no segment and no window, and padding sees nothing.
        not_padding = True if queries.segments is None else (queries.segments != 0)[..., None]
        to_leading = jnp.broadcast_to(not_padding, (*allowed.shape[:-1], mask.leading))
        allowed = jnp.concatenate([to_leading, allowed], axis=-1)
    return allowed


def segment_ids(mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """Return the segments of queries [B, T] and keys [B, S], 1 where a side has none."""
    queries, keys = (
        jnp.ones_like(side.positions) if side.segments is None else side.segments
        for side in (mask.queries, mask.keys)
    )
    return queries, keys


def sees_any(mask: AttentionMask) -> jax.Array:
    """Return whether a query attends to any key: bool [B, T].

    In self-attention each token except padding sees itself; in cross-attention the segment of the
    other sequence may be empty.
    """
    queries, keys = segment_ids(mask)
    real = queries != 0
    if mask.relative:
        return real
    return real & jnp.any(queries[:, :, None] == keys[:, None, :], axis=-1)
