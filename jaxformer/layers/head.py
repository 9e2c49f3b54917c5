"""Output heads: each transforms the residual stream and multiplies it by one matrix, so that the
same loss serves all of them.

language   the next token              x
masked     the token that was masked   norm(act(x W + b)) (BERT, arXiv:1810.04805)
tags       a class of each token       x
classes    a class of each row         tanh(pooled W + b) in an encoder, pooled in a decoder
none       the residual stream, and no matrix
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params, Spec, Specs, Weight, contract, zeros
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.ffn import ACTIVATION_TEXTS, ACTIVATIONS
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs


def head_specs(config: ModelConfig) -> Specs:
    """The rows named pooler, head and next_sentence, as far as the config has them."""
    make = INITIALIZERS[config.init](config)
    d, output = config.d_model, config.output
    square = Spec((d, d), ("embed", "hidden"), make.weight, inputs=("embed",))
    dense: Specs = {"dense": square, "dense_bias": Spec((d,), ("hidden",), zeros)}

    def matrix(size: int, axis: str, bias: bool = True) -> Specs:
        weight = Spec((size, d), (axis, "embed"), make.weight, inputs=("embed",))
        return {"weight": weight} | ({"bias": Spec((size,), (axis,), zeros)} if bias else {})

    table: Specs = {}
    if config.pooler or config.next_sentence or (output, config.family) == ("classes", "encoder"):
        table["pooler"] = dense
    if output in ("language", "masked"):
        head_rows = matrix(config.vocab_size, "vocab", bias=config.head_bias or output == "masked")
        # A tied head reads the embedding table as its matrix.
        if config.tied_head:
            del head_rows["weight"]
        if output == "masked":
            head_rows |= dense | {"norm": norm_specs(config)}
        table["head"] = head_rows
    elif output in ("classes", "tags"):
        if not config.n_classes:
            raise ConfigError(f"model.n_classes=0 with model.head={output!r}: give their number.")
        table["head"] = matrix(config.n_classes, "classes")
    if config.next_sentence:
        table["next_sentence"] = matrix(2, "classes")
    return {name: rows for name, rows in table.items() if rows}


def pooled(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B 1 D"]:
    """One vector per row: that of its first token, of its last, or the mean of all, then the pooler
    if there is one."""
    real = jnp.ones(x.shape[:2], bool) if layout.segments is None else layout.segments != 0
    index = jnp.arange(x.shape[1])
    weights = {
        "first": index == jnp.argmax(real, axis=1, keepdims=True),
        "last": index == jnp.max(jnp.where(real, index, 0), axis=1, keepdims=True),
        "mean": real / jnp.maximum(real.sum(1, keepdims=True), 1),
    }[config.pooled]
    pooled_rows = jnp.einsum("BT,BTD->BD", weights.astype(x.dtype), x)[:, None]
    if "pooler" not in params:
        return pooled_rows
    return jnp.tanh(linear("BTD,DF->BTF", params["pooler"], "dense", pooled_rows))


@jax.named_scope("head")
def readout(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B Q D"]:
    """The input of `output_layer`: [B, T, D] -> [B, T, D], or [B, 1, D] for a class of the row."""
    if config.output == "classes":
        x = pooled(params, config, x, layout)
    if config.output == "masked":
        head_params = params["head"]
        x = ACTIVATIONS[config.activation](linear("BTD,DF->BTF", head_params, "dense", x))
        x = norm(head_params.get("norm", {}), config, x)
    return x / math.sqrt(config.d_model) if config.logit_scale == "rsqrt" else x


class OutputLayer(NamedTuple):
    """The parts of logits = rows matrix^T + bias: [B, T, D], [V, D], and [V] or None."""

    rows: jax.Array
    matrix: Weight
    bias: jax.Array | None


def output_layer(
    params: Params, config: ModelConfig, y: jax.Array, name: str = "head"
) -> OutputLayer:
    """The output layer of the head `name` (or "next_sentence") on its input `y` [B, T, D]."""
    head_params = params.get(name, {})
    tied = name == "head" and config.tied_head and config.output in ("language", "masked")
    matrix = params["embed"]["tokens"] if tied else head_params["weight"]
    return OutputLayer(y, matrix, head_params.get("bias"))


def logits_of_rows(rows: jax.Array, matrix: Weight, bias: jax.Array | None = None) -> jax.Array:
    """rows matrix^T + bias, float32: [B, T, D], [V, D], [V] -> [B, T, V]."""
    logits = contract(
        "BTD,VD->BTV", rows, matrix, to=("batch", "sequence", "vocab"), dtype=jnp.float32
    )
    return logits if bias is None else logits + bias


@jax.named_scope("head")
def head(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B Q V"]:
    """float32 logits: [B, T, D] -> [B, T, V], or [B, 1, C] per row, or [B, T, D] without a head."""
    if config.output == "none":
        return x.astype(jnp.float32)
    y = readout(params, config, x, layout)
    logits = logits_of_rows(*output_layer(params, config, y))
    cap = config.logit_soft_cap
    return cap * jnp.tanh(logits / cap) if cap else logits


POOLED_TEXTS = {
    "first": "x of the first token",
    "last": "x of the last token",
    "mean": "mean of x over the tokens",
}


def head_formula(config: ModelConfig) -> tuple[str, ...]:
    """The formulas of the head, where x are the rows of the residual stream, as lines of text."""
    if config.output == "none":
        return ("out = x",)
    lines: list[str] = []
    # The name of the rows that the output matrix multiplies.
    rows = "x"
    if config.output == "classes":
        lines.append(f"p = {POOLED_TEXTS[config.pooled]}")
        rows = "p"
        if config.pooler or config.next_sentence or config.family == "encoder":
            lines.append("h = tanh(p W_h + b_h)")
            rows = "h"
    if config.output == "masked":
        act = ACTIVATION_TEXTS.get(config.activation, config.activation)
        lines.append(f"h = norm({act}(x W_h + b_h))")
        rows = "h"
    scale = " / √D" if config.logit_scale == "rsqrt" else ""
    over_tokens = config.output in ("language", "masked")
    matrix = "Eᵀ" if config.tied_head and over_tokens else "W_headᵀ"
    bias = " + b" if config.head_bias or config.output != "language" else ""
    logits = f"{rows}{scale} {matrix}{bias}"
    if config.logit_soft_cap:
        cap = f"{config.logit_soft_cap:g}"
        logits = f"{cap} tanh(({logits}) / {cap})"
    return (*lines, f"logits = {logits},  probabilities = softmax(logits)")
