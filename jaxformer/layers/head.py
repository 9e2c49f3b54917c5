"""Logits out: the heads of a model, each a reading of the residual stream and one matrix, so that
one loss serves them all.

language   the next token              x
masked     the token that was hidden   norm(act(x W + b)) (BERT, arXiv:1810.04805)
tags       a class of each token       x
classes    a class of each row         tanh(pooled W + b) in an encoder, pooled in a decoder
none       the residual stream, and no matrix
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.config_model import ModelConfig
from jaxformer.layers.ffn import ACTIVATIONS
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.params import Params, Spec, Specs, Weight, contract, zeros
from jaxformer.settings import ConfigError


def head_specs(config: ModelConfig) -> Specs:
    """Rows named pooler, head and next_sentence, those that the config has."""
    make = INITIALIZERS[config.init](config)
    d, over_tokens = config.d_model, config.output in ("language", "masked")
    over_classes = config.output in ("classes", "tags")
    if over_classes and not config.n_classes:
        raise ConfigError(
            f"model.n_classes=0 with model.head={config.output!r}: give their number."
        )
    size, axis = (config.vocab_size, "vocab") if over_tokens else (config.n_classes, "classes")
    square = Spec((d, d), ("embed", "hidden"), make.weight, inputs=("embed",))
    dense: Specs = {"dense": square, "dense_bias": Spec((d,), ("hidden",), zeros)}

    def matrix(size: int, axis: str, bias: bool) -> Specs:
        weight = Spec((size, d), (axis, "embed"), make.weight, inputs=("embed",))
        return {"weight": weight} | ({"bias": Spec((size,), (axis,), zeros)} if bias else {})

    own = matrix(size, axis, bias=config.head_bias or config.output != "language")
    if over_tokens and config.tied_head:
        own.pop("weight")
    if config.output == "masked":
        own |= dense | {"norm": norm_specs(config)}
    pooled = (
        config.pooler
        or config.next_sentence
        or (config.output == "classes" and config.family == "encoder")
    )
    table = {"pooler": dense if pooled else {}, "head": own if over_tokens or over_classes else {}}
    table["next_sentence"] = matrix(2, "classes", bias=True) if config.next_sentence else {}
    return {name: rows for name, rows in table.items() if rows}


def pooled(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B 1 D"]:
    """One vector a row: its first or last token or their mean, padding left out, through the pooler
    where there is one."""
    real = jnp.ones(x.shape[:2], bool) if layout.segments is None else layout.segments != 0
    index = jnp.arange(x.shape[1])
    share = {
        "first": index == jnp.argmax(real, axis=1, keepdims=True),
        "last": index == jnp.max(jnp.where(real, index, 0), axis=1, keepdims=True),
        "mean": real / jnp.maximum(real.sum(1, keepdims=True), 1),
    }[config.pooled]
    one = jnp.einsum("BT,BTD->BD", share.astype(x.dtype), x)[:, None]
    return (
        jnp.tanh(linear("BTD,DF->BTF", params["pooler"], "dense", one))
        if "pooler" in params
        else one
    )


def readout(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B Q D"]:
    """What `head_matrix` multiplies: [B, T, D] -> [B, T, D], or [B, 1, D] for a class of the
    row."""
    if config.output == "classes":
        x = pooled(params, config, x, layout)
    if config.output == "masked":
        act = ACTIVATIONS[config.activation]
        x = norm(
            params["head"].get("norm", {}),
            config,
            act(linear("BTD,DF->BTF", params["head"], "dense", x)),
        )
    return x / math.sqrt(config.d_model) if config.logit_scale == "rsqrt" else x


class OutputLayer(NamedTuple):
    """What the logits are made of: rows [B, T, D], matrix [V, D], and a bias [V] or None, logits =
    rows matrix^T + bias."""

    rows: jax.Array
    matrix: Weight
    bias: jax.Array | None


def head_matrix(params: Params, config: ModelConfig) -> Weight:
    """The output layer's matrix [V, D], its own or the embedding table."""
    tied = config.tied_head and config.output in ("language", "masked")
    weight: Weight = params["embed"]["tokens"] if tied else params["head"]["weight"]
    return weight


def output_layer(
    params: Params, config: ModelConfig, y: jax.Array, name: str = "head"
) -> OutputLayer:
    """The output layer of one of the heads, head or next_sentence, on the rows `y` [B, T, D] that
    it reads."""
    matrix = (
        params["next_sentence"]["weight"]
        if name == "next_sentence"
        else head_matrix(params, config)
    )
    return OutputLayer(y, matrix, params.get(name, {}).get("bias"))


def logits_of_rows(rows: jax.Array, matrix: Weight, bias: jax.Array | None = None) -> jax.Array:
    """rows matrix^T + bias, float32: [B, T, D], [V, D], [V] -> [B, T, V]."""
    logits = contract("BTD,VD->BTV", rows, matrix, to=("batch", None, "vocab"), dtype=jnp.float32)
    return logits if bias is None else logits + bias


def head(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B Q V"]:
    """Logits, float32: [B, T, D] -> [B, T, V], or [B, 1, C] for a class of the row, or [B, T, D]
    where there is no head."""
    if config.output == "none":
        return x.astype(jnp.float32)
    y = readout(params, config, x, layout)
    logits = logits_of_rows(*output_layer(params, config, y))
    cap = config.logit_soft_cap
    return cap * jnp.tanh(logits / cap) if cap else logits
