"""Splash attention, the Pallas kernel for TPUs that JAX contains."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.arrays.hardware import name_of
from jaxformer.arrays.sharding import activation, free_axes, on_devices, platform
from jaxformer.layers.exchange import (
    CONTEXT,
    DIVIDED_TOKENS,
    Kernel,
    balanced_index,
    devices_along,
    exchange_of,
    gathered_in_order,
    in_order,
    mask_of_device,
    on_each_device,
    repeated,
)
from jaxformer.layers.masks import AttentionMask, TokenLayout, sees_any, segment_ids

# The kernels take lengths that are multiples of it; rows are padded to the next one.
LANES = 128


class Blocks(NamedTuple):
    """The numbers of queries and of keys in a block of a kernel, forward and backward."""

    queries: int
    keys: int


SMALL_BLOCKS = Blocks(512, 512)
LARGE_BLOCKS = Blocks(1024, 1024)
# The shortest rows (or windows) for which a kernel takes LARGE_BLOCKS on a device. Each step of a
# kernel has a fixed cost, and large blocks compute more scores that the mask hides. The length is
# the power of two from which on the schedule of large blocks is more than 5 % shorter, forward and
# backward, in the program that libtpu 0.0.42.1 compiles for causal rows and heads of 128
# (`benchmarks/attention_blocks.py`). A device is listed only if large blocks fit into its vector
# memory with heads of 256, segments, soft-caps and sinks.
LARGE_FROM = {"v5p": 4096, "v6e": 2048}


def blocks_for(keys: int, window: int = 0) -> Blocks:
    """Return the blocks for a number of keys and a window (0: none), on the devices of the mesh in
    force."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    shortest = LARGE_FROM.get(name_of(kind) or "")
    if shortest and min(keys, window or keys) >= shortest:
        return LARGE_BLOCKS
    return SMALL_BLOCKS


def _dividing(length: int, limit: int) -> int:
    """Return the largest multiple of LANES that divides a padded length and is at most `limit`."""
    sizes = range(min(limit, length), 0, -LANES)
    return next(size for size in sizes if length % size == 0)


def _padded(x: jax.Array, axis: int) -> jax.Array:
    """Return `x` with zeros at the end of an axis, up to a multiple of LANES."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % LANES)
    return jnp.pad(x, width)


def splash_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Map q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] -> [B, T, N, W].

    Keys are read once for all query heads of their group, and blocks that the mask hides entirely
    are not computed. Rows may have any length: they are padded, and the padding is a segment of its
    own. A query that sees nothing gives 0.
    """
    heads_first = [jnp.swapaxes(_padded(x, 1), 1, 2) for x in (_scaled(q, mask), k, v)]
    # The points q, k and v of `model.remat` are the arrays that the kernel reads.
    heads_first = [checkpoint_name(x, n) for x, n in zip(heads_first, "qkv", strict=True)]
    shape = heads_first[0].shape[2], heads_first[1].shape[2]  # of queries and keys, padded
    kernel = _splash_kernel(q.shape[2], shape, mask)
    return _splash(kernel, heads_first, mask, padded=shape != (q.shape[1], k.shape[1]))


def splash_on_mesh(
    run: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
    """Apply `splash_attention` on the devices of the mesh in force. Where the devices divide the
    tokens but not the heads, each has its own queries and the keys of all tokens."""
    if exchange_of(q.shape[1], q.shape[2]) != "gather":
        return on_each_device(run, q, k, v, mask)
    devices = free_axes()[CONTEXT]
    by_tokens = activation(q.shape, DIVIDED_TOKENS)
    batch, tokens, heads, _ = by_tokens
    k, v = (repeated(x, heads) for x in (k, v))
    of_device = q.shape[2] // devices_along(heads)
    length = q.shape[1]
    keys_of_row = k.shape[1]
    if mask.causal or mask.window:
        kernel = _splash_kernel(of_device, (length, keys_of_row), mask, devices)
        mesh = jax.sharding.get_abstract_mesh()
        of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, tokens)))
    else:
        # All queries see all keys, so that every device has the same kernel.
        kernel = _splash_kernel(of_device, (length // devices, keys_of_row), mask)
        of_kernel = PartitionSpec()

    def local(
        kernel: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sides: tuple[TokenLayout, TokenLayout],
        sinks: jax.Array | None,
    ) -> jax.Array:
        # The points of `model.remat` are the keys and values of the device; those of the others are
        # gathered again for the backward pass.
        q, k, v = (
            checkpoint_name(x, n) for x, n in zip((_scaled(q, mask), k, v), "qkv", strict=True)
        )
        k, v = (gathered_in_order(x, mask.balanced) for x in (k, v))
        local_mask = mask_of_device(mask, sides, sinks)
        return _splash(kernel, [jnp.swapaxes(x, 1, 2) for x in (q, k, v)], local_mask)

    # Each device has the positions and segments of its own queries, and of all keys, in order.
    keys = mask.keys
    if mask.balanced:
        keys = jax.tree.map(in_order, keys)
    of_layouts = (PartitionSpec(batch, tokens), PartitionSpec(batch))
    in_specs = (of_kernel, by_tokens, by_tokens, by_tokens, of_layouts, PartitionSpec(heads))
    divided = on_devices(local, in_specs, by_tokens)
    return divided(kernel, q, k, v, (mask.queries, keys), mask.scoring.sinks)


def _scaled(q: jax.Array, mask: AttentionMask) -> jax.Array:
    """Return queries times the scale, which the kernel does not have."""
    scale = mask.scoring.scale or 1 / math.sqrt(q.shape[-1])
    # Rounded once, to the dtype in which the kernel multiplies them.
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def _splash(
    kernel: Any, heads_first: list[jax.Array], mask: AttentionMask, padded: bool = False
) -> jax.Array:
    """Run the kernel on rows of q [B, N, T, H], k [B, K, S, H] and v [B, K, S, W], which may be
    padded: [B, T, N, W]."""
    ids = None
    if padded or any(side.segments is not None for side in (mask.queries, mask.keys)):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        ids = splash_attention_kernel.SegmentIds(
            *(_padded(side_ids, 1) for side_ids in segment_ids(mask))
        )

    # A row has q [N, T, H], k [K, S, H], v [K, S, W] and its ids.
    def of_row(*row: Any) -> jax.Array:
        return kernel(*row, mask.scoring.sinks)  # type: ignore[no-any-return]

    length = mask.queries.positions.shape[1]
    out = jnp.swapaxes(jax.vmap(of_row)(*heads_first, ids), 1, 2)[:, :length]
    if ids is not None:
        # A query that sees nothing gives 0, whatever the kernel has for it.
        out = jnp.where(sees_any(mask)[..., None, None], out, 0)
    return out


def _splash_kernel(
    heads: int, shape: tuple[int, int], mask: AttentionMask, devices: int = 1
) -> Any:
    """Return the kernel for so many heads, and for queries and keys of these numbers, of which each
    of `devices` has a part of the queries."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, keys = shape
    limits = blocks_for(keys, mask.window)
    # A block has queries of one piece.
    pieces = 2 * devices if mask.balanced else devices
    query_block = _dividing(rows // pieces, limits.queries)
    key_block = _dividing(keys, limits.keys)
    blocks = kernels.BlockSizes(
        block_q=query_block,
        block_kv=key_block,
        block_kv_compute=key_block,
        block_q_dkv=query_block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=key_block,
        block_q_dq=query_block,
        block_kv_dq=key_block,
    )
    # The mask of positions, which for the kernel are the index in the row.
    band: Any = masks.FullMask(shape)
    if mask.causal or mask.window:
        back = mask.window - 1 if mask.window else None
        band = _band()(shape, (back, 0 if mask.causal else back), offset=0)
        if mask.balanced:
            band.q_sequence = balanced_index(rows, devices)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([band] * heads),
        block_sizes=blocks,
        attn_logits_soft_cap=mask.scoring.soft_cap or None,
        residual_checkpoint_name="attention",
        interpret=platform() == "cpu",
        head_shards=1,
        q_seq_shards=devices,
    )


@functools.cache
def _band() -> Any:
    """Return a kind of mask of the kernel that follows from the distance of a query and a key."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class Band(masks.LocalMask):
        """Of a block the kernel asks whether any pair is seen and whether any is hidden. Here each
        distance is looked at once, and not each pair, which takes minutes for long rows."""

        def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
            queries = self.q_sequence[block[0]]
            keys = np.arange(self.shape[1])[block[1]]
            distances = np.arange(queries[0] - keys[-1], queries[-1] - keys[0] + 1)
            allowed: np.ndarray = self.mask_function(distances[:, None], np.zeros((1, 1), int))
            return allowed

    return Band
