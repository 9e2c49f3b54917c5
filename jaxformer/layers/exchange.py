"""Attention on the devices of a mesh: which rows, heads and tokens each device computes, and how
those whose tokens the mesh divides (`mesh.context`) get the keys and values that they attend to.

    heads    The devices exchange tokens for heads: each then has all tokens of its own heads, and
             every kernel runs as on one device (Ulysses, arXiv:2309.14509). Keys and values are
             repeated until the devices divide their heads.
    gather   Each device has its own queries and the keys and values of all tokens, once for each
             group of heads; their gradients are summed and scattered (arXiv:2407.21783).

Heads are exchanged wherever the devices divide them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxformer.arrays.sharding import ACTIVATION_RULES, activation, constrain, free_axes
from jaxformer.layers.masks import AttentionMask, TokenLayout

Kernel = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]
Exchange = Literal["none", "heads", "gather"]

# The axis of the mesh that divides tokens.
CONTEXT = ACTIVATION_RULES["sequence"][0]
BY_TOKENS = ("batch", "sequence", "heads", None)
BY_HEADS = ("batch", None, "exchanged_heads", None)
KEYS = ("batch", None, "kv_heads", None)


def exchange_of(queries: int, heads: int, sizes: Mapping[str, int] | None = None) -> Exchange:
    """How attention of so many queries and heads gets its keys on a mesh with these sizes (None:
    the mesh in force)."""
    sizes = free_axes() if sizes is None else sizes
    context = sizes.get(CONTEXT, 1)
    if context == 1 or queries % context:
        return "none"
    devices = math.prod(sizes.get(name, 1) for name in ACTIVATION_RULES["exchanged_heads"])
    return "gather" if heads % devices else "heads"


def placed(run: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """`run`, which the compiler can divide among devices."""
    exchange = exchange_of(q.shape[1], q.shape[2])
    if exchange == "none":
        return run(q, k, v, mask)
    if exchange == "gather":
        out = run(constrain(q, BY_TOKENS), constrain(k, KEYS), constrain(v, KEYS), mask)
        return constrain(out, BY_TOKENS)
    rate, key = mask.dropout
    if not rate or key is None:
        return on_each_device(run, q, k, v, mask)
    # The compiler divides what is drawn, so that every mesh drops the same weights.
    out = run(*(constrain(x, BY_HEADS) for x in before_exchange(q, k, v)), mask)
    return constrain(constrain(out, BY_HEADS), BY_TOKENS)


def before_exchange(
    q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values by tokens, the heads of keys and values as many as an exchange
    needs. They are placed before and after heads are repeated, or else the compiler would divide
    the heads of weights, too, as those after the exchange."""
    devices = _devices_along(activation(q.shape, BY_HEADS)[2])
    q, k, v = (constrain(x, BY_TOKENS) for x in (q, k, v))
    k, v = (constrain(_repeated(x, devices), BY_TOKENS) for x in (k, v))
    return q, k, v


def _devices_along(axes: tuple[str, ...] | str | None) -> int:
    """The number of devices along an entry of a partition."""
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(free_axes()[name] for name in names)


def _repeated(x: jax.Array, devices: int) -> jax.Array:
    """Keys or values [B, S, K, W], their heads repeated until so many devices, which divide the
    query heads, divide them too: each device then has the key heads of its groups."""
    return jnp.repeat(x, devices // math.gcd(devices, x.shape[2]), axis=2)


def _to_heads(x: jax.Array) -> jax.Array:
    """Some tokens of each head [B, T / C, N, W] -> all tokens of some heads [B, T, N / C, W]."""
    return jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=1, tiled=True)


def _to_tokens(x: jax.Array) -> jax.Array:
    """The inverse of `_to_heads`."""
    return jax.lax.all_to_all(x, CONTEXT, split_axis=1, concat_axis=2, tiled=True)


def on_each_device(
    run: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
    """`run` on the rows and heads of each device of the mesh in force. Tokens are exchanged for
    heads where the mesh divides them."""
    axes = free_axes()
    if jax.sharding.get_abstract_mesh().size == 1 or not axes:
        return run(q, k, v, mask)
    exchanges = exchange_of(q.shape[1], q.shape[2]) == "heads"
    # Keys whose number the devices do not divide are on all of them already.
    exchanges_keys = exchanges and k.shape[1] % axes[CONTEXT] == 0
    by_heads = activation(q.shape, BY_HEADS if exchanges else ("batch", None, "heads", None))
    batch, _, heads, _ = by_heads
    if exchanges:
        q, k, v = before_exchange(q, k, v)
    else:
        k, v = (_repeated(x, _devices_along(heads)) for x in (k, v))
    by_tokens = activation(q.shape, BY_TOKENS)
    of_queries = by_tokens if exchanges else by_heads
    of_keys = by_tokens if exchanges_keys else by_heads
    scoring = mask.scoring
    bias_sharding = None
    if scoring.bias is not None:
        bias_sharding = PartitionSpec(batch if scoring.bias.shape[0] > 1 else None, heads)

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sides: tuple[TokenLayout, TokenLayout],
        bias: jax.Array | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        queries, keys = sides
        local_scoring = scoring._replace(bias=bias, sinks=sinks)
        local_mask = mask._replace(scoring=local_scoring, queries=queries, keys=keys)
        q = _to_heads(q) if exchanges else q
        k, v = (_to_heads(x) if exchanges_keys else x for x in (k, v))
        out = run(q, k, v, local_mask)
        return _to_tokens(out) if exchanges else out

    by_rows, per_head = PartitionSpec(batch), PartitionSpec(heads)
    # The kernels do not declare along which axes their results vary, so that is not checked.
    divided = jax.shard_map(
        local,
        in_specs=(of_queries, of_keys, of_keys, by_rows, bias_sharding, per_head),
        out_specs=of_queries,
        axis_names={*axes},
        check_vma=False,
    )
    layouts = (mask.queries, mask.keys)
    out: jax.Array = divided(q, k, v, layouts, scoring.bias, scoring.sinks)
    return out
