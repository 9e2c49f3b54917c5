"""Embeddings: the table of tokens, and what a stack adds to it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.arrays.params import InitFunction, Params, Spec, Specs, lookup
from jaxformer.config.model import ModelConfig
from jaxformer.layers.linear import INITIALIZERS, dropout
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.positions import sinusoids

Tokens = Int[Array | np.ndarray, "B T"]
# The row of each token is whole, on the device of the token.
WHOLE = ("batch", "sequence", None)


def token_specs(config: ModelConfig) -> Specs:
    """The table of tokens [V, D], one for the whole model."""
    make = INITIALIZERS[config.init](config)
    shape, axes = (config.vocab_size, config.d_model), ("vocab", "embed")
    return {"tokens": Spec(shape, axes, make.embedding, inputs=("vocab",), lookup=True)}


def embed_specs(config: ModelConfig) -> Specs:
    """What a stack adds to the tokens: learned positions, token types, a norm."""
    make = INITIALIZERS[config.init](config)

    def table(name: str, size: int, init: InitFunction) -> Spec:
        return Spec((size, config.d_model), (name, "embed"), init, inputs=(name,), lookup=True)

    specs: Specs = {}
    if config.positions == "learned":
        size = config.position_offset + config.max_length
        specs["positions"] = table("positions", size, make.positions)
    if config.token_types:
        specs["types"] = table("types", config.token_types, make.embedding)
    if config.embedding_norm:
        specs["norm"] = norm_specs(config)
    return specs


def _learned(params: Params, config: ModelConfig, layout: TokenLayout) -> jax.Array:
    return lookup(params["positions"], layout.positions + config.position_offset, WHOLE)


def _sinusoidal(params: Params, config: ModelConfig, layout: TokenLayout) -> jax.Array:
    return sinusoids(layout.positions, config.d_model, config.sinusoid_order)


ADDED = {"learned": _learned, "sinusoidal": _sinusoidal}


@jax.named_scope("embed")
def embed(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    layout: TokenLayout,
    types: Tokens | None = None,
    key: jax.Array | None = None,
) -> Float[Array, "B T D"]:
    """[B, T] int -> [B, T, D] float32; `params` has the rows of both tables above. Dropout needs a
    key."""
    x = lookup(params["tokens"], tokens, WHOLE)
    if config.embedding_scale == "sqrt":
        x = x * math.sqrt(config.d_model)
    if config.positions in ADDED:
        x = x + ADDED[config.positions](params, config, layout)
    if config.token_types:
        types = jnp.zeros_like(layout.positions) if types is None else types
        x = x + lookup(params["types"], types, WHOLE)
    if config.embedding_norm:
        x = norm(params["norm"], config, x)
    return dropout(x, config.dropout, key)


ADDED_TEXTS = {"learned": "P[position]", "sinusoidal": "sinusoids(position)"}


def embed_formula(config: ModelConfig) -> tuple[str, ...]:
    """The rows of x as text."""
    text = "E[token]" + (" · √D" if config.embedding_scale == "sqrt" else "")
    if config.positions in ADDED:
        text += f" + {ADDED_TEXTS.get(config.positions, config.positions)}"
    if config.token_types:
        text += " + U[token type]"
    return (f"x = norm({text})" if config.embedding_norm else f"x = {text}",)
