"""The randomness of adapters whose inputs are dropped out."""

import zlib
from typing import Any

import jax

from jaxformer.adapters.lora import is_adapted
from jaxformer.arrays.params import Params, dotted


def keyed(params: Params, key: jax.Array | None) -> Params:
    """`params` whose adapters drop out what they read, each with randomness of its own, for one
    evaluation of a loss; `params` themselves without a key.

    The loss of `jf.loss_of` does this; a loss of your own calls it first: `params =
    jf.keyed(params, key)`.
    """
    if key is None:
        return params

    def with_key(path: Any, node: Any) -> Any:
        if not is_adapted(node) or node.dropout == 0:
            return node
        own = jax.random.fold_in(key, zlib.crc32(dotted(path).encode()))
        keys = own if node.layers is None else jax.random.split(own, node.layers)
        return node.replace(key=jax.random.key_data(keys))

    params = jax.tree.map_with_path(with_key, params, is_leaf=is_adapted)
    return params
