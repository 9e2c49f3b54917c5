"""Upcycling (arXiv:2212.05055): a model with experts that begins from a dense one. Each expert is a
copy of the dense feed-forward of its layer, and the routers are new.

Where the weights of the experts of a token sum to 1, as with model.router_renormalize, the model
computes at first what the dense one does.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params, Spec, dotted, init_params, rows
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.pattern import layer_configs
from jaxformer.models.stack import layers_of, stacked_as
from jaxformer.models.transformer import specs

# The branches of the params that have blocks.
WITH_BLOCKS = ("blocks", "encoder")


def is_upcycled(config: ModelConfig, base: ModelConfig) -> bool:
    """Whether a model with experts begins from one without."""
    return config.feed_forward == "experts" and base.feed_forward == "ffn"


def dense_of(config: ModelConfig) -> ModelConfig:
    """The model with a dense feed-forward in place of the experts."""
    return replace(config, feed_forward="ffn", n_experts=0)


def check_upcycling(config: ModelConfig, base: str) -> None:
    """Raises ConfigError where the experts of a model cannot be copies of the dense feed-forward of
    the model in the directory `base`."""
    if config.expert_width != config.ff_width:
        raise ConfigError(
            f"model.expert_ff={config.expert_ff} is not {config.ff_width}, the width of the dense"
            f" feed-forward of run.init_from={base!r}, of which each expert is a copy: set it to"
            f" {config.ff_width}, or to 0, which is the same."
        )
    if config.shared_ff:
        raise ConfigError(
            f"model.shared_ff={config.shared_ff} adds a new shared expert to the copies of the"
            f" dense feed-forward of run.init_from={base!r}, so that the model would not begin from"
            " that one: set it to 0, or train without run.init_from."
        )


def upcycled_text(config: ModelConfig) -> str:
    """What of a model is a copy, as a sentence."""
    layers = layer_configs(config, config.n_layers)
    if config.family == "encoder_decoder":
        layers += layer_configs(config, config.encoder_layers)
    count = sum(layer.feed_forward == "experts" for layer in layers)
    return (
        f"{count} layers, {config.n_experts} experts each are copies of the dense feed-forward of"
        " the layer."
    )


def upcycle(
    params: Params, config: ModelConfig, place: Callable[[Spec], jax.sharding.Sharding]
) -> Params:
    """The params of a dense model as those of the model of `config`, with experts, on the devices
    that `place` names for each row of its table. The rows of the routers are missing."""
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
    """The blocks of a dense stack, with experts and stacked as the rows of a table are."""
    # Layers of a group are copied once.
    pairs = zip(layers_of(blocks), layers[:: layers[0].layers_in_group], strict=True)
    with_experts = [
        _layer(params, config) if config.feed_forward == "experts" else params
        for params, config in pairs
    ]
    stacked = jax.eval_shape(functools.partial(init_params, table), jax.random.key(0))
    return stacked_as(stacked, with_experts)


def _layer(params: Params, config: ModelConfig) -> Params:
    """The params of a dense layer with n_experts copies of its feed-forward; the norms of that are
    those of the experts."""
    layer = {
        f"experts{name.removeprefix('ffn')}" if name.startswith("ffn") else name: branch
        for name, branch in params.items()
    }
    number = config.n_experts
    copies = {
        name: jnp.broadcast_to(leaf, (number, *leaf.shape)) for name, leaf in params["ffn"].items()
    }
    return layer | {"experts": copies}
