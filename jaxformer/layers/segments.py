"""What fused kernels ask of segments: which queries see any key, and where each segment is."""

import jax
import jax.numpy as jnp

from jaxformer.layers.masks import AttentionMask


def segment_ids(mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """The segments of queries [B, T] and keys [B, S], 1 where a side has none."""
    queries, keys = (
        jnp.ones_like(side.positions) if side.segments is None else side.segments
        for side in (mask.queries, mask.keys)
    )
    return queries, keys


def sees_any(mask: AttentionMask) -> jax.Array:
    """Whether a query attends to any key: bool [B, T].

    In a sequence of its own each token but padding sees itself; a segment of another sequence may
    be empty.
    """
    queries, keys = segment_ids(mask)
    real = queries != 0
    if mask.relative:
        return real
    return real & jnp.any(queries[:, :, None] == keys[:, None, :], axis=-1)


def lengths_and_starts(ids: jax.Array, segments: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of each segment, and the index of its first one: ids [B, T] -> int32 [B, segments]
    twice. Segments are numbered 1 to `segments`, each in one piece."""
    belongs = ids[:, None, :] == jnp.arange(1, segments + 1)[:, None]  # [B, segments, T]
    starts = jnp.argmax(belongs, axis=-1).astype(jnp.int32)
    return jnp.sum(belongs, axis=-1, dtype=jnp.int32), starts
