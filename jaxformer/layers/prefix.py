"""Keys and values of virtual tokens, which come before those of the tokens."""

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import constrain

Seen = tuple[jax.Array, jax.Array]


def with_prefix(params: Params, seen: Seen) -> Seen:
    """Keys and values [B, S, K, H] and [B, S, K, W] behind those of a layer's virtual tokens,
    `prefix_k` [P, K, H] and `prefix_v` [P, K, W], which are the same for all rows: [B, P + S, ...].
    """
    return _behind(params["prefix_k"], seen[0]), _behind(params["prefix_v"], seen[1])


def _behind(prefix: jax.Array, x: jax.Array) -> jax.Array:
    rows = jnp.broadcast_to(prefix.astype(x.dtype), (x.shape[0], *prefix.shape))
    rows = constrain(rows, ("batch", None, "kv_heads", None))
    return jnp.concatenate([rows, x], axis=1)
