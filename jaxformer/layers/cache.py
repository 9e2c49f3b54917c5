"""The key-value cache of decoding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.layers.masks import TokenLayout

# The axes of cached keys and values: mesh.context divides their slots.
CACHE_AXES = ("batch", "sequence", "kv_heads", None)


class CacheShape(NamedTuple):
    """What a layer's cache has of a token: keys [K, H] and values [K, W]."""

    heads: int
    key_width: int
    value_width: int


def keys_and_values_shape(config: ModelConfig) -> CacheShape:
    """The keys and values of all key heads."""
    return CacheShape(config.kv_heads, config.head_width, config.value_width)


class LayerCache(NamedTuple):
    """One layer's keys [B, S, K, H] and values [B, S, K, W], the layout of the slots, the next slot
    to write, and in an encoder-decoder the keys and values of the source."""

    k: jax.Array
    v: jax.Array
    layout: TokenLayout
    at: jax.Array
    source: tuple[jax.Array, jax.Array] | None = None

    def write(self, k: jax.Array, v: jax.Array) -> "LayerCache":
        k, v = _write(self.k, k, self.at), _write(self.v, v, self.at)
        return self._replace(k=constrain(k, CACHE_AXES), v=constrain(v, CACHE_AXES))


@struct.dataclass
class KVCache:
    """Keys [B, S, K, H] and values [B, S, K, W] of each layer, and the layout [B, S] of the slots.

    Segment 0 is a slot that is not yet written, or padding. `length` counts the slots written.
    `source` has each layer's keys and values of an encoder-decoder's source, at `source_layout`.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    layout: TokenLayout
    length: jax.Array
    source: tuple[tuple[jax.Array, jax.Array], ...] | None = None
    source_layout: TokenLayout | None = None

    def layer_cache(self, layer: int, layout: TokenLayout) -> LayerCache:
        """The cache of one layer, for a call on the tokens at `layout`, the one of `advance`."""
        at = self.length - layout.positions.shape[1]
        source = self.source[layer] if self.source else None
        return LayerCache(self.k[layer], self.v[layer], self.layout, at, source)

    def advance(self, layout: TokenLayout) -> "KVCache":
        """The cache with slots for the tokens at `layout` [B, T], which each layer then writes."""
        segments = jnp.ones_like(layout.positions) if layout.segments is None else layout.segments
        slots = TokenLayout(
            _write(self.layout.positions, layout.positions, self.length),
            _write(self.layout.segments, segments, self.length),  # type: ignore[arg-type]
        )
        return replace(self, layout=slots, length=self.length + layout.positions.shape[1])

    def with_layers(self, layer_caches: list[LayerCache]) -> "KVCache":
        """This cache with the keys and values of its layers replaced."""
        return replace(
            self,
            k=tuple(layer_cache.k for layer_cache in layer_caches),
            v=tuple(layer_cache.v for layer_cache in layer_caches),
        )


def cache_of(shapes: Sequence[CacheShape], batch: int, slots: int, dtype: DTypeLike) -> KVCache:
    """An empty cache of layers with these shapes, for `slots` tokens in each row, in `dtype`."""
    blank = jnp.zeros((batch, slots), jnp.int32)

    def zeros(heads: int, width: int) -> jax.Array:
        return constrain(jnp.zeros((batch, slots, heads, width), dtype), CACHE_AXES)

    k = tuple(zeros(shape.heads, shape.key_width) for shape in shapes)
    v = tuple(zeros(shape.heads, shape.value_width) for shape in shapes)
    return KVCache(k, v, TokenLayout(blank, blank), jnp.int32(0))


def _write(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """`old` [B, S, ...] with `new` [B, T, ...] at slots at .. at + T - 1."""
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)
