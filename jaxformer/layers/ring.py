"""Ring attention: each device keeps its own queries, and keys and values pass from device to
device, so that none ever has those of all tokens (arXiv:2310.01889).

              step 0    step 1    step 2    step 3
    device 0  keys 0    keys 3    keys 2    keys 1
    device 1  keys 1    keys 0    keys 3    keys 2
    device 2  keys 2    keys 1    keys 0    keys 3
    device 3  keys 3    keys 2    keys 1    keys 0

The forward pass has a running maximum, sum and output of each query (arXiv:2205.14135) and saves
the log-sum-exp. In the backward pass the gradients of keys and values pass around with them. Both
go through blocks of queries and keys, and leave out those of which the mask hides all: what is
computed follows from positions and segments alone, whatever the order of the tokens.

In plain JAX, for rows whose keys fit on no device and whose heads the devices do not divide.
Reverse mode only.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxformer.arrays.sharding import activation, on_devices
from jaxformer.layers.blocked import (
    grouped_product,
    heads_last,
    query_groups,
    scores_of,
    sink_gradients,
)
from jaxformer.layers.exchange import CONTEXT, DIVIDED_TOKENS, Kernel, mask_of_device, repeated
from jaxformer.layers.masks import AttentionMask, Scoring, TokenLayout, visible

# The most queries and keys of a block: its scores take memory as their product.
LONGEST_BLOCK = 1024
# Less than every score, and finite, so that the difference of two of them is a number.
LEAST = -1e30


class Ring(NamedTuple):
    """What is known when the function is traced: the number of devices in the ring, the direction
    and the window of the mask, and how scores are computed."""

    devices: int
    causal: bool
    window: int
    scale: float
    soft_cap: float


class PassedKeys(NamedTuple):
    """What passes around: k [B, S, K, H], v [B, S, K, W], and where the keys are, [B, S]."""

    k: jax.Array
    v: jax.Array
    layout: TokenLayout


class Queries(NamedTuple):
    """What stays: q [B, T, N, H], where the queries are, [B, T], and the sinks [N] or None."""

    q: jax.Array
    layout: TokenLayout
    sinks: jax.Array | None


class Running(NamedTuple):
    """The output so far, not yet divided by the total [B, K, G, T, W], and of each query the
    largest score and the sum of exp(score - largest) [B, K, G, T, 1]; float32."""

    out: jax.Array
    largest: jax.Array
    total: jax.Array


def around_ring(
    run: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
    """Call `run`, a function of the tokens of each device, on the mesh in force: [B, T, N, H], [B,
    S, K, H], [B, S, K, W] -> [B, T, N, W]."""
    of_queries = activation(q.shape, DIVIDED_TOKENS)
    batch, tokens, heads, _ = of_queries
    k, v = (repeated(x, heads) for x in (k, v))
    of_layout = PartitionSpec(batch, tokens)
    per_head = PartitionSpec(heads)

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sides: tuple[TokenLayout, TokenLayout],
        sinks: jax.Array | None,
    ) -> jax.Array:
        return run(q, k, v, mask_of_device(mask, sides, sinks))

    in_specs = (of_queries, of_queries, of_queries, of_layout, per_head)
    layouts = (mask.queries, mask.keys)
    return on_devices(local, in_specs, of_queries)(q, k, v, layouts, mask.scoring.sinks)


def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v of the queries of a device and the keys of all devices of
    the ring, inside `jax.shard_map`: [B, T, N, H], [B, S, K, H], [B, S, K, W] -> [B, T, N, W]."""
    scoring: Scoring = mask.scoring
    ring = Ring(
        jax.lax.axis_size(CONTEXT),
        mask.causal,
        mask.window,
        scoring.scale or 1 / math.sqrt(q.shape[-1]),
        scoring.soft_cap,
    )
    queries = Queries(q, mask.queries, scoring.sinks)
    return _ring(queries, PassedKeys(k, v, mask.keys), ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring(queries: Queries, keys: PassedKeys, ring: Ring) -> jax.Array:
    return _forward(queries, keys, ring)[0]


def _forward(queries: Queries, keys: PassedKeys, ring: Ring) -> tuple[jax.Array, Any]:
    # The barrier makes the masks depend on the queries. Otherwise JAX computes those of all pairs
    # of blocks before a scan over layers, and stores them.
    queries, keys = jax.lax.optimization_barrier((queries, keys))
    q = query_groups(queries.q, keys.k.shape[2])  # [B, K, G, T, H]
    shape = q.shape[:-1]  # B, K, G, T
    width = keys.v.shape[-1]
    running = Running(
        jnp.zeros((*shape, width), jnp.float32),
        jnp.full((*shape, 1), LEAST),
        jnp.zeros((*shape, 1), jnp.float32),
    )
    if queries.sinks is not None:
        # A sink is a key that is there from the beginning, and has no value.
        sinks = queries.sinks.reshape(*shape[1:3], 1, 1).astype(jnp.float32)
        largest = jnp.broadcast_to(sinks, running.largest.shape)
        running = running._replace(largest=largest, total=jnp.ones_like(running.total))
    # Blocks of queries are on the first axis, as `jax.lax.map` goes through them.
    blocks = _query_blocks(queries, q)

    # Each of C steps adds the keys of one device, while they are passed on to the next.
    def step(carry: tuple[Running, PassedKeys], _: None) -> tuple[tuple[Running, PassedKeys], None]:
        running, keys = carry
        of_keys = _key_blocks(keys)

        def of_block(item: tuple[Any, Running]) -> Running:
            block, before = item

            def add(running: Running, key_block: Any) -> tuple[Running, None]:
                allowed = _allowed(block, key_block, ring)
                # A block of which the mask hides all costs its mask alone.
                return jax.lax.cond(
                    jnp.any(allowed),
                    lambda running: _added(running, block, key_block, allowed, ring),
                    lambda running: running,
                    running,
                ), None

            return jax.lax.scan(add, before, of_keys)[0]

        running = jax.lax.map(of_block, (blocks, running))
        # The last of the C moves is read by nothing: all steps of a scan are the same.
        return (running, _passed_on(keys, ring)), None

    number = blocks.q.shape[0]
    # [blocks, B, K, G, T / blocks, ...] each.
    split = Running(*(_split(x, 3, number) for x in running))
    (split, _), _ = jax.lax.scan(step, (split, keys), length=ring.devices)
    running = Running(*(_joined(x, 3) for x in split))
    # A query that sees no key has a total of 0, and its output is 0.
    total = jnp.where(running.total == 0, 1, running.total)
    out = heads_last(running.out / total).astype(queries.q.dtype)
    out = checkpoint_name(out, "attention")
    log_sum = checkpoint_name(running.largest + jnp.log(total), "attention")
    return out, (queries, keys, out, log_sum)


def _backward(ring: Ring, saved: Any, d_out: jax.Array) -> tuple[Queries, PassedKeys]:
    queries, keys, out, log_sum = saved
    heads = keys.k.shape[2]
    # [B, K, G, T, H], and [B, K, G, T, W] of d_out and out.
    q, d_outs, outs = (query_groups(x, heads) for x in (queries.q, d_out, out))
    # The sum of weights * d_weights over the keys is that of d_out * out over the width.
    inner = jnp.sum(d_outs.astype(jnp.float32) * outs, axis=-1, keepdims=True)
    blocks = _query_blocks(queries, q)
    number = blocks.q.shape[0]
    of_queries = tuple(_split(x, 3, number) for x in (d_outs, log_sum, inner))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        d_q, keys, d_keys = carry
        of_keys = _key_blocks(keys)

        def of_block(d_keys: Any, item: Any) -> tuple[Any, jax.Array]:
            block, (d_out, log_sum, inner), d_q = item

            def add(d_q: jax.Array, pair: Any) -> tuple[jax.Array, Any]:
                key_block, d_block = pair
                allowed = _allowed(block, key_block, ring)
                rows = (d_out, log_sum, inner)
                return jax.lax.cond(
                    jnp.any(allowed),
                    lambda d_q: _gradients(d_q, d_block, block, rows, key_block, allowed, ring),
                    lambda d_q: (d_q, d_block),
                    d_q,
                )

            d_q, d_keys = jax.lax.scan(add, d_q, (of_keys, d_keys))
            return d_keys, d_q

        d_keys, d_q = jax.lax.scan(of_block, d_keys, (blocks, of_queries, d_q))
        # The gradients of the keys move with them, and are at home after the last step.
        return (d_q, _passed_on(keys, ring), _passed_on(d_keys, ring)), None

    of_keys = _key_blocks(keys)
    # [blocks, B, K, S / blocks, H], and of values [blocks, B, K, S / blocks, W].
    d_keys = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (of_keys.k, of_keys.v))
    # Sums over as many blocks as a row has are float32, whatever the dtype of the arrays.
    d_q = jnp.zeros(blocks.q.shape, jnp.float32)
    (d_q, _, (d_k, d_v)), _ = jax.lax.scan(step, (d_q, keys, d_keys), length=ring.devices)
    # Back to [B, T, N, H], and of keys and values [B, S, K, H].
    d_q = heads_last(_joined(d_q, 3)).astype(queries.q.dtype)
    d_k, d_v = (jnp.swapaxes(_joined(x, 2), 1, 2).astype(keys.k.dtype) for x in (d_k, d_v))
    d_sinks = None if queries.sinks is None else sink_gradients(queries.sinks, log_sum, inner)
    # Positions and segments have no gradient.
    nothing: Any = None
    return Queries(d_q, nothing, d_sinks), PassedKeys(d_k, d_v, nothing)


_ring.defvjp(_forward, _backward)


def _passed_on(tree: Any, ring: Ring) -> Any:
    """Return the arrays of a tree, each from the device before this one in the ring."""
    to_next = [(i, (i + 1) % ring.devices) for i in range(ring.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, to_next), tree)


def _allowed(block: Any, key_block: Any, ring: Ring) -> jax.Array:
    """Return bool [B or 1, queries, keys]: what the queries of a block see of the keys of
    another."""
    allowed = visible(AttentionMask(block.layout, key_block.layout, ring.causal, ring.window))
    if allowed is not None:
        return allowed
    # [B, K, G, T, H] and [B, K, S, H].
    return jnp.ones((1, block.q.shape[3], key_block.k.shape[2]), bool)


def _added(running: Running, block: Any, key_block: Any, allowed: jax.Array, ring: Ring) -> Running:
    """Return the running output of a block of queries with a block of keys."""
    allowed = allowed[:, None, None]  # [B or 1, 1, 1, queries, keys]
    scores, _ = scores_of(block.q, key_block.k, ring.scale, ring.soft_cap)
    scores = jnp.where(allowed, scores, LEAST)
    # [B, K, G, T, 1]. Subtracting the largest score seen so far keeps exp finite.
    largest = jnp.maximum(running.largest, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(scores - largest), 0)
    # What was added before is relative to the largest score of then.
    shrink = jnp.exp(running.largest - largest)
    out = grouped_product("BKGTS,BKSH->BKGTH", weights, key_block.v)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return Running(running.out * shrink + out, largest, running.total * shrink + total)


def _gradients(
    d_q: jax.Array,
    d_block: tuple[jax.Array, jax.Array],
    block: Any,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    key_block: Any,
    allowed: jax.Array,
    ring: Ring,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the gradients of a block of queries, and of a block of keys and values, with what this
    pair of blocks adds to them. `rows` are d_out, the log-sum-exp and the inner sum of the
    queries."""
    d_out, log_sum, inner = rows
    d_k, d_v = d_block
    scores, bent = scores_of(block.q, key_block.k, ring.scale, ring.soft_cap)
    # The weights again, [B, K, G, T, S], from the log-sum-exp that the forward pass has saved.
    weights = jnp.where(allowed[:, None, None], jnp.exp(scores - log_sum), 0)
    d_weights = grouped_product("BKGTH,BKSH->BKGTS", d_out, key_block.v)
    # The gradient of a softmax, and of the scale of its scores.
    d_scores = weights * (d_weights - inner) * ring.scale
    if bent is not None:
        d_scores = d_scores * (1 - jnp.square(bent))
    d_q = d_q + grouped_product("BKGTS,BKSH->BKGTH", d_scores, key_block.k)
    d_k = d_k + grouped_product("BKGTS,BKGTH->BKSH", d_scores, block.q)
    d_v = d_v + grouped_product("BKGTS,BKGTH->BKSH", weights, d_out)
    return d_q, (d_k, d_v)


def _query_blocks(queries: Queries, q: jax.Array) -> Queries:
    """Return the queries [B, K, G, T, H] and their layout, the blocks on a first axis."""
    number = _blocks_of(q.shape[3])
    layout = _split_layout(queries.layout, number)
    return Queries(_split(q, 3, number), layout, None)


def _key_blocks(keys: PassedKeys) -> PassedKeys:
    """Return keys and values [B, K, S, H] and their layout, the blocks on a first axis."""
    number = _blocks_of(keys.k.shape[1])
    layout = _split_layout(keys.layout, number)
    k, v = (_split(jnp.swapaxes(x, 1, 2), 2, number) for x in (keys.k, keys.v))
    return PassedKeys(k, v, layout)


def _split_layout(layout: TokenLayout, number: int) -> TokenLayout:
    return jax.tree.map(lambda x: _split(x, 1, number), layout)  # type: ignore[no-any-return]


def _blocks_of(length: int) -> int:
    """Return the fewest blocks of equal length that are no longer than LONGEST_BLOCK."""
    fewest = -(-length // LONGEST_BLOCK)
    return next(number for number in range(fewest, length + 1) if length % number == 0)


def _split(x: jax.Array, axis: int, number: int) -> jax.Array:
    """Return an axis in so many blocks, which are the first axis."""
    split = x.reshape(*x.shape[:axis], number, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """Return the inverse of `_split`."""
    blocks = jnp.moveaxis(x, 0, axis)
    return blocks.reshape(*blocks.shape[:axis], -1, *blocks.shape[axis + 2 :])
