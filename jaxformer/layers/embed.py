"""Tokens in: the embedding table, and what a stack adds to it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.config_model import ModelConfig
from jaxformer.layers.linear import INITIALIZERS, dropout
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.positions import sinusoids
from jaxformer.params import Params, Spec, Specs, lookup

Tokens = Int[Array | np.ndarray, "B T"]
WHOLE = ("batch", None, None)  # a row is wanted whole where its token is


def token_specs(config: ModelConfig) -> Specs:
    """The table of tokens [V, D], one for the whole model."""
    make = INITIALIZERS[config.init](config)
    shape = (config.vocab_size, config.d_model)
    return {
        "tokens": Spec(shape, ("vocab", "embed"), make.embedding, inputs=("vocab",), lookup=True)
    }


def embed_specs(config: ModelConfig) -> Specs:
    """What a stack adds to the tokens: learned positions, types of tokens, a norm."""
    make = INITIALIZERS[config.init](config)
    table = {
        "positions": (
            config.position_offset + config.max_length if config.positions == "learned" else 0,
            make.positions,
        ),
        "types": (config.token_types, make.embedding),
    }
    specs: Specs = {
        name: Spec((size, config.d_model), (name, "embed"), init, inputs=(name,), lookup=True)
        for name, (size, init) in table.items()
        if size
    }
    return specs | ({"norm": norm_specs(config)} if config.embedding_norm else {})


def embed(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    layout: TokenLayout,
    types: Tokens | None = None,
    key: jax.Array | None = None,
) -> Float[Array, "B T D"]:
    """[B, T] int -> [B, T, D] float32; `params` has the rows of both tables above. A key turns
    dropout on."""
    x = lookup(params["tokens"], tokens, WHOLE)
    if config.embedding_scale == "sqrt":
        x = x * math.sqrt(config.d_model)
    if config.positions in ADDED:
        x = x + ADDED[config.positions](params, config, layout)
    if config.token_types:
        x = x + lookup(
            params["types"], jnp.zeros_like(layout.positions) if types is None else types, WHOLE
        )
    if config.embedding_norm:
        x = norm(params["norm"], config, x)
    return dropout(x, config.dropout, key)


ADDED = {
    "learned": lambda params, config, layout: lookup(
        params["positions"], layout.positions + config.position_offset, WHOLE
    ),
    "sinusoidal": lambda params, config, layout: sinusoids(
        layout.positions, config.d_model, config.sinusoid_order
    ),
}
