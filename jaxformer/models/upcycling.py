"""Upcycling (arXiv:2212.05055): a model with experts that begins from a dense one. Each expert is a
copy of the dense feed-forward of its layer, and the routers are new.

Where the weights of the experts of a token sum to 1, as with model.experts.renormalize, the model
computes at first what the dense one does.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params, Spec, dotted, init_params, rows
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.layers.pattern import layer_configs
from jaxformer.models.stack import layers_of, stacked_as
from jaxformer.models.transformer import specs

# The branches of the params that have blocks.
WITH_BLOCKS = ("blocks", "encoder")


def is_upcycled(config: ModelConfig, base: ModelConfig) -> bool:
    """Return whether a model with experts begins from one without."""
    return config.feed_forward == "experts" and base.feed_forward == "ffn"


def dense_of(config: ModelConfig) -> ModelConfig:
    """Return the model with a dense feed-forward in place of the experts."""
    return with_settings(config, {"feed_forward": "ffn", "experts.n": 0})


def upcycle(
    params: Params, config: ModelConfig, place: Callable[[Spec], jax.sharding.Sharding]
) -> Params:
    """Return the params of a dense model as those of the model of `config`, with experts, on the
    devices that `place` names for each row of its table. The rows of the routers are missing."""
    table = specs(config)
    branches = {name: params[name] for name in WITH_BLOCKS if name in params}

    def copied(branches: Params) -> Params:
        copies = dict(branches)
        if "encoder" in branches:
            layers = layer_configs(config, config.encoder_layers)
            blocks = _blocks(branches["encoder"]["blocks"], table["encoder"]["blocks"], layers)
            copies["encoder"] = branches["encoder"] | {"blocks": blocks}
        layers = layer_configs(config, config.n_layers)
        return copies | {"blocks": _blocks(branches["blocks"], table["blocks"], layers)}

    specs_by_path = rows(table)
    shapes = jax.eval_shape(copied, branches)
    places = jax.tree.map_with_path(lambda path, _: place(specs_by_path[dotted(path)]), shapes)
    upcycled: Params = jax.jit(copied, out_shardings=places)(branches)
    return params | upcycled


def _blocks(blocks: Params, table: Params, layers: tuple[ModelConfig, ...]) -> Params:
    """Return the blocks of a dense stack, with experts and stacked as the rows of a table are."""
    # Layers of a group are copied once.
    pairs = zip(layers_of(blocks), layers[:: layers[0].layers_in_group], strict=True)
    with_experts = []
    for params, config in pairs:
        if config.feed_forward == "experts":
            # The norms of the feed-forward are those of the experts.
            params = {name.replace("ffn", "experts", 1): leaf for name, leaf in params.items()}
            params["experts"] = {
                # [E, ...], equal copies: what the routers send them makes them different.
                name: jnp.broadcast_to(leaf, (config.experts.n, *leaf.shape))
                for name, leaf in params["experts"].items()
            }
        with_experts.append(params)
    stacked = jax.eval_shape(functools.partial(init_params, table), jax.random.key(0))
    return stacked_as(stacked, with_experts)
