"""Output heads: each transforms the residual stream and multiplies it by one matrix, so that the
same loss serves all of them.

language   the next token              x
masked     the token that was masked   norm(act(x W + b)) (BERT, arXiv:1810.04805)
tags       a class of each token       x, or as model.head.class_layers says, act(x W + b)
classes    a class of each row         act(pooled W + b) in an encoder, pooled in a decoder
projection a vector of each row        as classes, without a bias (CLIP, arXiv:2103.00020)
none       the residual stream, and no matrix
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.exact import exactly
from jaxformer.arrays.params import Params, Spec, Specs, Weight, contract, zeros
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import HeadName
from jaxformer.files import ConfigError
from jaxformer.layers.embed import embedding_specs, of_embeddings
from jaxformer.layers.ffn import ACTIVATION_TEXTS, ACTIVATIONS
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs


class HeadKind(NamedTuple):
    """A row: logits = rows matrix^T + bias.

    Attributes:
      specs: config -> the table of its parameters: "weight" [V, D], "bias" [V], and others.
      rows: (params of the model, config, x [B, T, D], layout) -> [B, T, D], or [B, 1, D].
      formula: config -> the lines of text that compute a row from x; the last one names it.
      of_tokens: whether it predicts tokens, so that its matrix may be the table of tokens.
      of_row: whether it predicts a class of the whole row, in an encoder from its pooler.
    """

    specs: Callable[[ModelConfig], Specs]
    rows: Callable[[Params, ModelConfig, jax.Array, TokenLayout], jax.Array] = (
        lambda params, config, x, layout: x
    )
    formula: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    of_tokens: bool = False
    of_row: bool = False


def reads_pooler(config: ModelConfig) -> bool:
    """Return whether the head reads the pooler: that of a row in an encoder, or asked to."""
    if not HEADS[config.output].of_row:
        return False
    return config.family == "encoder" or config.head.class_layers != "auto"


def has_pooler(config: ModelConfig) -> bool:
    """Return whether a model has BERT's pooler: with a head that reads it, or asked to."""
    return config.head.pooler or bool(config.second_heads) or reads_pooler(config)


def is_tied(config: ModelConfig) -> bool:
    """Return whether the matrix of the head is the table of tokens."""
    return config.tied_head and HEADS[config.output].of_tokens


def matrix_path(config: ModelConfig, name: str = "head") -> tuple[str, str]:
    """Return where the params have the matrix of the head, or of a second head by its name."""
    if name == "head" and is_tied(config):
        return "embed", "tokens"
    return name, "weight"


def head_specs(config: ModelConfig) -> Specs:
    """Return the rows named pooler, head and those of second heads, as far as the config has
    them."""
    table: Specs = {}
    if has_pooler(config):
        table["pooler"] = _class_dense_specs(config, reads_pooler(config))
    table["head"] = HEADS[config.output].specs(config)
    table |= {name: _output_specs(config, 2, "classes") for name in config.second_heads}
    if is_tied(config):
        if "tokens" not in embedding_specs(config):
            raise ConfigError(
                f"model.tied_head=True needs a table of tokens, and model.embedding.kind="
                f"{config.embedding.kind!r} has none: set one of the two differently."
            )
        table["head"] = {name: row for name, row in table["head"].items() if name != "weight"}
    return {name: rows for name, rows in table.items() if rows}


def _dense_specs(config: ModelConfig, size: int) -> Specs:
    """Return a matrix [D, size], and a bias if the config has one."""
    make = INITIALIZERS[config.init](config)
    specs: Specs = {
        "dense": Spec((config.d_model, size), ("embed", "hidden"), make.weight, inputs=("embed",))
    }
    if config.head.dense_bias:
        specs["dense_bias"] = Spec((size,), ("hidden",), zeros)
    return specs


def _output_specs(config: ModelConfig, size: int, axis: str, bias: bool = True) -> Specs:
    """Return a matrix [size, D], and a bias [size]."""
    make = INITIALIZERS[config.init](config)
    specs: Specs = {
        "weight": Spec((size, config.d_model), (axis, "embed"), make.weight, inputs=("embed",))
    }
    if bias:
        specs["bias"] = Spec((size,), (axis,), zeros)
    return specs


def _masked_specs(config: ModelConfig) -> Specs:
    narrow = of_embeddings(config)
    output = _output_specs(narrow, config.vocab_size, "vocab")
    return output | _dense_specs(config, narrow.d_model) | {"norm": norm_specs(narrow)}


def _class_dense_specs(config: ModelConfig, normed: bool) -> Specs:
    """Return a matrix [D, D], and if `normed` the norm behind it of head.class_layers."""
    specs = _dense_specs(config, config.d_model)
    if normed and config.head.class_layers == "dense_norm":
        specs["norm"] = norm_specs(config)
    return specs


def _tag_specs(config: ModelConfig) -> Specs:
    specs = _class_specs(config)
    if config.head.class_layers != "auto":
        specs |= _class_dense_specs(config, normed=True)
    return specs


def _class_specs(config: ModelConfig) -> Specs:
    if not config.head.n_classes:
        raise ConfigError(
            f"model.head.n_classes=0 with model.head.kind={config.output!r}: give their number."
        )
    return _output_specs(config, config.head.n_classes, "classes")


def _projection_specs(config: ModelConfig) -> Specs:
    size = config.head.width or config.d_model
    return _output_specs(config, size, "classes", bias=False)


def pool(x: Float[Array, "B T D"], layout: TokenLayout, pooling: str) -> Float[Array, "B D"]:
    """Return one vector per row, by a name of `POOLINGS`: that of its first token, of its last, or
    the mean of all. Padding is none of them."""
    # A product with weights serves all poolings, and rows whose tokens a mesh divides.
    real = jnp.ones(x.shape[:2], bool)
    if layout.segments is not None:
        real = layout.segments != 0
    # [B, T], which sum to 1 in each row that has a token.
    weights = POOLINGS[pooling](real).astype(x.dtype)
    return jnp.einsum("BT,BTD->BD", weights, x)


def _first_of(real: jax.Array) -> jax.Array:
    """Mark the first token of the text of each row; a row that is all padding has none."""
    indices = jnp.arange(real.shape[1])
    return real & (indices == jnp.argmax(real, axis=1, keepdims=True))


def _last_of(real: jax.Array) -> jax.Array:
    """Mark the last token of the text of each row; a row that is all padding has none."""
    indices = jnp.arange(real.shape[1])
    return real & (indices == jnp.max(jnp.where(real, indices, 0), axis=1, keepdims=True))


# The weight of each token of a row, from whether it is a token of the text: bool [B, T] -> [B, T].
POOLINGS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "first": _first_of,
    "last": _last_of,
    "mean": lambda real: real / jnp.maximum(real.sum(1, keepdims=True), 1),
}


def pooled(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B 1 D"]:
    """Return one vector per row, as model.head.pooling says, then the pooler if there is one."""
    pooled_rows = pool(x, layout, config.pooled)[:, None]
    return _class_dense(params.get("pooler", {}), config, pooled_rows)


def _class_dense(branch: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return [B, T, D] after the dense layer and the norm, as far as the branch has them."""
    if "dense" not in branch:
        return x
    x = ACTIVATIONS[config.head.pooler_activation](linear("BTD,DF->BTF", branch, "dense", x))
    if "norm" in branch:
        x = norm(branch["norm"], config, x)
    return x


def _transformed(
    params: Params, config: ModelConfig, x: jax.Array, layout: TokenLayout
) -> jax.Array:
    head_params = params["head"]
    x = ACTIVATIONS[config.activation](linear("BTD,DF->BTF", head_params, "dense", x))
    return norm(head_params.get("norm", {}), config, x)


POOLED_TEXTS = {
    "first": "x of the first token",
    "last": "x of the last token",
    "mean": "mean of x over the tokens",
}


def _pooled_formula(config: ModelConfig) -> tuple[str, ...]:
    pooled_row = f"p = {POOLED_TEXTS[config.pooled]}"
    if not has_pooler(config):
        return (pooled_row,)
    normed = config.head.class_layers == "dense_norm"
    return (pooled_row, _dense_formula(config, config.head.pooler_activation, "p", normed))


def _tag_formula(config: ModelConfig) -> tuple[str, ...]:
    if config.head.class_layers == "auto":
        return ()
    normed = config.head.class_layers == "dense_norm"
    return (_dense_formula(config, config.head.pooler_activation, "x", normed),)


def _masked_formula(config: ModelConfig) -> tuple[str, ...]:
    return (_dense_formula(config, config.activation, "x", normed=True),)


def _dense_formula(config: ModelConfig, activation: str, read: str, normed: bool) -> str:
    bias = " + b_h" if config.head.dense_bias else ""
    dense = f"{ACTIVATION_TEXTS.get(activation, activation)}({read} W_h{bias})"
    return f"h = norm({dense})" if normed else f"h = {dense}"


HEADS: Table[HeadKind] = Table(
    HeadName,
    {
        "language": HeadKind(
            lambda config: _output_specs(config, config.vocab_size, "vocab", config.head.bias),
            of_tokens=True,
        ),
        "masked": HeadKind(_masked_specs, _transformed, _masked_formula, of_tokens=True),
        "classes": HeadKind(_class_specs, pooled, _pooled_formula, of_row=True),
        "tags": HeadKind(
            _tag_specs,
            lambda params, config, x, layout: _class_dense(params["head"], config, x),
            _tag_formula,
        ),
        "projection": HeadKind(_projection_specs, pooled, _pooled_formula, of_row=True),
        "none": HeadKind(lambda config: {}),
    },
    besides=("auto",),
)


@jax.named_scope("head")
def readout(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B Q E"]:
    """Return the input of `output_layer`: [B, T, D] -> [B, T, D], or [B, 1, D] for a class of the
    row, and with model.embedding.width for a masked head as wide as that."""
    with exactly(config.exact):
        x = HEADS[config.output].rows(params, config, x, layout)
    # Rows are divided and not logits, of which there are V / D times as many.
    if config.head.scale == "rsqrt":
        x = x / math.sqrt(config.d_model)
    divisor = total_divisor(config)
    if divisor != 1:
        x = x / divisor
    return x


def total_divisor(config: ModelConfig) -> float:
    """Return model.head.divisor, and with a tied head the growth of the width over model.mup_base:
    the table of tokens has the initial scale and the rate of an input there, so that its products
    with rows are divided (arXiv:2203.03466, table 8). 1 divides nothing."""
    if not (config.mup_base and is_tied(config)):
        return config.head.divisor
    return config.head.divisor * config.embedded_width / config.base_model.embedded_width


class OutputLayer(NamedTuple):
    """The parts of logits = rows matrix^T + bias: [B, T, D], [V, D], and [V] or None."""

    rows: jax.Array
    matrix: Weight
    bias: jax.Array | None


def output_layer(
    params: Params, config: ModelConfig, y: jax.Array, name: str = "head"
) -> OutputLayer:
    """Return the output layer of the head `name` (or a second head) on its input `y` [B, T, D]."""
    branch, leaf = matrix_path(config, name)
    return OutputLayer(y, params[branch][leaf], params.get(name, {}).get("bias"))


def logits_of_rows(
    rows: jax.Array, matrix: Weight, bias: jax.Array | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Return float32: rows matrix^T, rounded to `dtype`, + bias: [B, T, D], [V, D], [V] -> [B, T,
    V]."""
    axes = ("batch", "sequence", "vocab")
    logits = contract("BTD,VD->BTV", rows, matrix, to=axes, dtype=dtype).astype(jnp.float32)
    if bias is not None:
        logits = logits + bias
    return logits


@jax.named_scope("head")
def head(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B Q V"]:
    """Return float32 logits: [B, T, D] -> [B, T, V], or [B, 1, C] per row, or [B, T, D] without a
    head."""
    if config.output == "none":
        return x.astype(jnp.float32)
    y = readout(params, config, x, layout)
    with exactly(config.exact):
        logits = logits_of_rows(*output_layer(params, config, y))
    cap = config.head.soft_cap
    if cap:
        # Between -cap and cap (arXiv:2408.00118), in float32, after the bias.
        logits = cap * jnp.tanh(logits / cap)
    return logits


def head_formula(config: ModelConfig) -> tuple[str, ...]:
    """Return the formulas of the head, where x are the rows of the residual stream, as lines of
    text."""
    if config.output == "none":
        return ("out = x",)
    row = HEADS[config.output]
    lines = row.formula(config)
    # The name of the rows that the output matrix multiplies.
    rows = lines[-1].partition(" = ")[0] if lines else "x"
    scale = " / √D" if config.head.scale == "rsqrt" else ""
    divisor = total_divisor(config)
    scale += "" if divisor == 1 else f" / {divisor:g}"
    matrix = "Eᵀ" if is_tied(config) else "W_headᵀ"
    bias = " + b" if "bias" in row.specs(config) else ""
    logits = f"{rows}{scale} {matrix}{bias}"
    if config.head.soft_cap:
        cap = f"{config.head.soft_cap:g}"
        logits = f"{cap} tanh(({logits}) / {cap})"
    return (*lines, f"logits = {logits},  probabilities = softmax(logits)")
