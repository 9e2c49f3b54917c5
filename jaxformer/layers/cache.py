"""The cache of decoding: what the mixer of each layer keeps of the tokens that it has read.

A mixer begins it with `Sublayer.start`, and reads and writes it in `apply`. It is any pytree of
arrays whose first axis is that of the rows. An array with an entry for each token is a leaf
`Slots`; any other is a state that each token changes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxformer.arrays.sharding import constrain
from jaxformer.layers.masks import TokenLayout

# The axes of an array of slots: mesh.context divides the slots.
SLOT_AXES = ("batch", "sequence", "kv_heads", None)


@struct.dataclass
class Slots:
    """An entry for each slot of a cache, [B, S, K, H], such as the keys of K heads.

    The layout of the cache says which slots hold a token, and the mask hides those that do not.
    """

    array: jax.Array

    @classmethod
    def empty(cls, batch: int, slots: int, heads: int, width: int, dtype: DTypeLike) -> "Slots":
        """Return zeros, divided as the mesh in force divides slots."""
        return cls(constrain(jnp.zeros((batch, slots, heads, width), dtype), SLOT_AXES))

    def write(self, new: jax.Array, at: jax.Array) -> "Slots":
        """Write the entries [B, T, K, H] of T tokens from the slot `at` on."""
        return Slots(constrain(_write(self.array, new, at), SLOT_AXES))


def is_slots(node: Any) -> bool:
    """Tell whether a node of what a mixer keeps has an entry for each slot."""
    return isinstance(node, Slots)


class LayerCache(NamedTuple):
    """What the mixer of one layer keeps, the slot of the first token of a call, and in an
    encoder-decoder the keys and values of the source, which its first call writes."""

    kept: Any
    at: jax.Array
    source: tuple[jax.Array, jax.Array] | None = None

    def write(self, new: Any) -> tuple["LayerCache", Any]:
        """Write entries [B, T, K, H] into the slots, in the nesting of `kept`. The second result
        has those of all slots [B, S, K, H]."""
        kept = jax.tree.map(
            lambda slots, entries: slots.write(entries, self.at), self.kept, new, is_leaf=is_slots
        )
        return self._replace(kept=kept), jax.tree.map(
            lambda slots: slots.array, kept, is_leaf=is_slots
        )


@struct.dataclass
class Cache:
    """What the mixer of each layer keeps, and the layout [B, S] of the slots.

    Segment 0 is a slot that is not yet written, or padding. `length` tokens of each row were read:
    the next one takes the slot length % S, so that with enough slots for the longest text no token
    is overwritten that a later one may see. `sources` has each layer's keys and values of an
    encoder-decoder's source, at `source_layout`.
    """

    layers: tuple[Any, ...]
    layout: TokenLayout
    length: jax.Array
    sources: tuple[tuple[jax.Array, jax.Array] | None, ...]
    source_layout: TokenLayout | None = None

    def at(self, tokens: int) -> jax.Array:
        """Return the slot of the first of the newest tokens."""
        return (self.length - tokens) % self.layout.positions.shape[1]

    def advance(self, layout: TokenLayout) -> "Cache":
        """Return the cache with slots for the tokens at `layout` [B, T], which each layer then
        writes."""
        tokens = layout.positions.shape[1]
        # A slot says by segment 0 that it is empty, so that all tokens have one.
        segments = jnp.ones_like(layout.positions) if layout.segments is None else layout.segments
        longer = replace(self, length=self.length + tokens)
        slots = TokenLayout(
            _write(self.layout.positions, layout.positions, longer.at(tokens)),
            _write(self.layout.segments, segments, longer.at(tokens)),  # type: ignore[arg-type]
        )
        return replace(longer, layout=slots)

    @property
    def can_rewind(self) -> bool:
        """Return whether tokens can be taken back: nothing is kept but entries of slots."""
        return all(map(is_slots, jax.tree.leaves(self.layers, is_leaf=is_slots)))

    def rewind(self, tokens: jax.Array) -> "Cache":
        """Return the cache before its newest tokens. Their slots are written again before any later
        token sees them: until then their positions are in its future."""
        return replace(self, length=self.length - tokens)

    def layer(self, layer: int, tokens: int) -> LayerCache:
        """Return the cache of one layer for a call on the newest tokens, whose slots `advance`
        made."""
        return LayerCache(self.layers[layer], self.at(tokens), self.sources[layer])

    def with_layers(self, layers: list[LayerCache]) -> "Cache":
        """Return the cache with those of all layers after a call."""
        kept = tuple(layer.kept for layer in layers)
        return replace(self, layers=kept, sources=tuple(layer.source for layer in layers))


def _write(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """Return `old` [B, S, ...] with `new` [B, T, ...] at slots at .. at + T - 1."""
    # JAX moves a start behind which there are fewer than T slots: a call of several tokens must
    # not go past the last slot.
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)
