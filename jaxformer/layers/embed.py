"""Embeddings: rows of tables, whose sum is the input of the first layer of a stack."""

import math
from collections.abc import Callable
from dataclasses import field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxformer.arrays.params import InitFunction, Params, Spec, Specs, lookup, zeros
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table, with_settings
from jaxformer.config.variants import EmbeddingName
from jaxformer.layers.linear import INITIALIZERS, dropout, linear
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.positions import sinusoids

# The row of each token is whole, on the device of the token.
WHOLE = ("batch", "sequence", None)


@struct.dataclass
class Inputs:
    """What a model reads: `tokens` and their `types` int [B, T], an encoder-decoder also `source`
    int [B, S]; `arrays` are by name what a row of `EMBEDDINGS` reads besides, [B, ...] each."""

    tokens: jax.Array
    layout: TokenLayout
    types: jax.Array | None = None
    source: jax.Array | None = None
    source_layout: TokenLayout | None = None
    arrays: dict[str, jax.Array] = field(default_factory=dict)


class EmbeddingKind(NamedTuple):
    """A row.

    Attributes:
      specs: config -> the table of its parameters, in the branch "embed".
      apply: (params of the branch, config, inputs) -> its summand, [B, T, D] float32.
      formula: config -> the summand as text, for `jaxformer shapes` and the page of attention.
      reads: the arrays of a batch that it reads besides tokens, such as "patches". They are absent
        where there are tokens alone, as in generation.
    """

    specs: Callable[[ModelConfig], Specs]
    apply: Callable[[Params, ModelConfig, Inputs], jax.Array]
    formula: Callable[[ModelConfig], str]
    reads: tuple[str, ...] = ()


def _table(config: ModelConfig, name: str, size: int, init: InitFunction) -> Spec:
    """Return a table [size, D] whose rows are looked up."""
    return Spec((size, config.d_model), (name, "embed"), init, inputs=(name,), lookup=True)


def _token_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    return {"tokens": _table(config, "vocab", config.vocab_size, make.embedding)}


def _tokens(params: Params, config: ModelConfig, inputs: Inputs) -> jax.Array:
    x = lookup(params["tokens"], inputs.tokens, WHOLE)
    # As in the first Transformer and Gemma, whose rows begin small (arXiv:1706.03762).
    if config.embedding.scale == "sqrt":
        x = x * math.sqrt(config.d_model)
    if config.embedding.multiplier != 1:
        x = x * config.embedding.multiplier
    return x


def _token_formula(config: ModelConfig) -> str:
    multiplier = config.embedding.multiplier
    scale = " · √D" if config.embedding.scale == "sqrt" else ""
    return f"E[token]{scale}" + ("" if multiplier == 1 else f" · {multiplier:g}")


def _position_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    size = config.embedding.position_offset + config.max_length
    return {"positions": _table(config, "positions", size, make.positions)}


def _learned(params: Params, config: ModelConfig, inputs: Inputs) -> jax.Array:
    return lookup(
        params["positions"], inputs.layout.positions + config.embedding.position_offset, WHOLE
    )


def _sinusoidal(params: Params, config: ModelConfig, inputs: Inputs) -> jax.Array:
    positions = inputs.layout.positions
    if config.embedding.position_offset:
        positions = positions + config.embedding.position_offset
    return sinusoids(positions, config.d_model, config.embedding.sinusoids)


def _type_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    return {"types": _table(config, "types", config.embedding.token_types, make.embedding)}


def _types(params: Params, config: ModelConfig, inputs: Inputs) -> jax.Array:
    types = inputs.types
    if types is None:
        types = jnp.zeros_like(inputs.layout.positions)
    return lookup(params["types"], types, WHOLE)


# The embedding of the inputs, with one table for the whole model.
EMBEDDINGS: Table[EmbeddingKind] = Table(
    EmbeddingName, {"tokens": EmbeddingKind(_token_specs, _tokens, _token_formula)}
)
# What a stack adds to it: the positions that are embedded, and token types.
ADDED = {
    "learned": EmbeddingKind(_position_specs, _learned, lambda config: "P[position]"),
    "sinusoidal": EmbeddingKind(
        lambda config: {}, _sinusoidal, lambda config: "sinusoids(position)"
    ),
}
TOKEN_TYPES = EmbeddingKind(_type_specs, _types, lambda config: "U[token type]")


def added_embeddings(config: ModelConfig) -> list[EmbeddingKind]:
    """Return the rows of what a stack adds to the embedding of its inputs, in their order."""
    name = config.embedded_positions
    added = []
    if name in ADDED:
        added.append(ADDED[name])
    if config.embedding.token_types:
        added.append(TOKEN_TYPES)
    return added


def of_embeddings(config: ModelConfig) -> ModelConfig:
    """Return the config of a model as wide as the embeddings of this one."""
    if config.embedded_width == config.d_model:
        return config
    width = config.embedded_width
    heads = config.head_width
    return with_settings(
        config, {"d_model": width, "head_dim": heads, "embedding.width": 0, "tied_head": False}
    )


def embedding_specs(config: ModelConfig) -> Specs:
    """Return the parameters of model.embedding.kind, which all stacks of the model share."""
    return EMBEDDINGS[config.embedding.kind].specs(of_embeddings(config))


def added_specs(config: ModelConfig) -> Specs:
    """Return the parameters of what a stack adds to its inputs: learned positions, token types, a
    norm, and the matrix that projects the sum."""
    specs: Specs = {}
    if config.embedded_width != config.d_model:
        make = INITIALIZERS[config.init](config)
        shape = (config.embedded_width, config.d_model)  # [E, D]
        specs["projection"] = Spec(shape, ("hidden", "embed"), make.weight, inputs=("hidden",))
        specs["projection_bias"] = Spec(shape[1:], ("residual",), zeros)
    narrow = of_embeddings(config)
    for row in added_embeddings(config):
        specs |= row.specs(narrow)
    if config.embedding.norm:
        specs["norm"] = norm_specs(narrow)
    return specs


@jax.named_scope("embed")
def embed(
    params: Params, config: ModelConfig, inputs: Inputs, key: jax.Array | None = None
) -> Float[Array, "B T D"]:
    """Map [B, T] int -> [B, T, D] float32; `params` has the rows of both tables above. Dropout
    needs a key."""
    narrow = of_embeddings(config)
    x = EMBEDDINGS[config.embedding.kind].apply(params, narrow, inputs)
    for row in added_embeddings(config):
        x = x + row.apply(params, narrow, inputs)
    if config.embedding.norm:
        x = norm(params["norm"], config, x)
    x = dropout(x, config.dropout, key)
    if config.embedded_width == config.d_model:
        return x
    # Tables have the width E, and one matrix maps their sum to D (ALBERT, arXiv:1909.11942).
    return linear("BTE,ED->BTD", params, "projection", x, to=WHOLE)


def embed_formula(config: ModelConfig) -> tuple[str, ...]:
    """Return the rows of x as text."""
    summands = [EMBEDDINGS[config.embedding.kind], *added_embeddings(config)]
    text = " + ".join(row.formula(config) for row in summands)
    text = f"norm({text})" if config.embedding.norm else text
    if config.embedded_width == config.d_model:
        return (f"x = {text}",)
    return f"e = {text}", "x = e W_e + b_e"
