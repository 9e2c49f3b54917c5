"""Tokens in, logits out: the embedding tables and the output layer."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.config import ModelConfig
from jaxformer.layers.linear import INITIALIZERS, dropout
from jaxformer.layers.masks import Places
from jaxformer.params import Params, Spec, Specs, contract
from jaxformer.sharding import activation, constrain, explicit_axes, gathered

Tokens = Int[Array | np.ndarray, "B T"]


def embed_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    specs: Specs = {
        "tokens": Spec((config.vocab_size, config.d_model), ("vocab", "embed"), make.embedding, inputs=("vocab",))
    }
    if config.positions == "learned":
        specs["positions"] = Spec(
            (config.max_length, config.d_model), ("positions", "embed"), make.embedding, inputs=("positions",)
        )
    return specs


def head_specs(config: ModelConfig) -> Specs:
    """The output layer [V, D]; nothing where it is the embedding table."""
    if config.tied_head:
        return {}
    make = INITIALIZERS[config.init](config)
    return {"weight": Spec((config.vocab_size, config.d_model), ("vocab", "embed"), make.weight, inputs=("embed",))}


def embed(
    params: Params, config: ModelConfig, tokens: Tokens, places: Places, dtype: jnp.dtype, key: jax.Array | None
) -> Float[Array, "B T D"]:
    """[B, T] int -> [B, T, D] in `dtype`. A key turns dropout on."""
    x = _lookup(params["tokens"], tokens)
    if config.positions == "learned":
        x = x + _lookup(params["positions"], places.positions)
    return dropout(x.astype(dtype), config.dropout, key)


def _lookup(table: jax.Array, index: jax.Array | np.ndarray) -> jax.Array:
    """Rows of a table [V, D], whose width is gathered first: a row is wanted whole where its token is."""
    axes = ("batch", None, None)
    if explicit_axes():
        return gathered(table).at[index].get(out_sharding=activation((*index.shape, table.shape[-1]), axes))
    return constrain(constrain(table, (None, None))[index], axes)


def head_weight(params: Params, config: ModelConfig) -> jax.Array:
    """The output layer's matrix [V, D], its own or the embedding table."""
    weight: jax.Array = params["embed"]["tokens"] if config.tied_head else params["head"]["weight"]
    return weight


def head(params: Params, config: ModelConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """[B, T, D] -> logits [B, T, V] float32."""
    return contract("BTD,VD->BTV", x, head_weight(params, config), to=("batch", None, "vocab"), dtype=jnp.float32)
