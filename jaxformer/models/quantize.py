"""Params whose matrices are quantized leaves."""

import contextlib
import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxformer.adapters.quantized import QUANTIZERS
from jaxformer.arrays.mesh import parameter_sharding
from jaxformer.arrays.params import Params, Spec, dotted, is_custom, map_specs, rows, zeros
from jaxformer.config.adapter import Quantization
from jaxformer.config.model import ModelConfig
from jaxformer.config.records import Attention, Latent, RelativePositions
from jaxformer.config.settings import choices, with_settings
from jaxformer.config.variants import RECURRENT
from jaxformer.files import ConfigError
from jaxformer.layers.block import block_specs


def quantize(params: Params, kind: str) -> Params:
    """Return the params of a model with a quantized leaf for every matrix of its blocks.

    `kind` is "int8" (`to_int8`: a scale for each output channel), which also replaces the table of
    tokens and the head over them (a scale for each token), "int8_blocks" (the same without these),
    "nf4" (`to_nf4`: blocks of 64) or "nf4_double" (whose scales have 8 bits too).
    Of a layer of experts these are the matrices of the experts, each by itself. Other embeddings
    and heads, norms, biases and routers stay as they are. A leaf is used wherever its
    array was, and one of an array on a mesh stays on it. Raises ConfigError for params without
    blocks of our models, for leaves that are custom already, and for numbers that are not finite.
    """
    check_quantization(kind)
    specs_of_block = _block_rows()
    n_quantized = 0
    token_rows = _token_rows(params) if QUANTIZERS[kind].of_tokens else {}

    def leaf(path: Any, weight: Any) -> Any:
        nonlocal n_quantized
        name = dotted(path)
        names = name.split(".")
        if "blocks" not in names and name not in token_rows:
            return weight
        if is_custom(weight):
            raise ConfigError(
                f"quantize: {name} is a {type(weight).__name__} already: quantize the params before"
                " a leaf replaces one of their arrays."
            )
        if name in token_rows:
            return quantized_leaf(name, weight, token_rows[name], kind)
        # After "blocks" may stand the position in a repeating pattern.
        inside = names[names.index("blocks") + 1 :]
        spec = specs_of_block.get(".".join(inside[inside[0].isdecimal() :]))
        # A vector [L, D] of each layer that our blocks lack, such as one of a user's own norm.
        if spec is None and weight.ndim <= 2:
            return weight
        if spec is not None and not is_quantized(replace(spec, axes=("layers", *spec.axes)), kind):
            return weight
        if spec is None or weight.ndim != len(spec.axes) + 1:
            raise ConfigError(
                f"quantize: {name} {list(weight.shape)} is no leaf of the blocks of this package,"
                " so its output channels are not known: use to_int8 or to_nf4 of"
                " jaxformer.adapters.quantized, which take the row of a weight."
            )
        row = replace(spec, shape=tuple(weight.shape), axes=("layers", *spec.axes))
        n_quantized += 1
        return quantized_leaf(name, weight, row, kind)

    quantized = jax.tree.map_with_path(leaf, params, is_leaf=is_custom)
    if not n_quantized:
        raise ConfigError(
            "quantize: these params have no blocks; it takes those of jf.init or jf.load."
        )
    return quantized  # type: ignore[no-any-return]


def check_quantization(kind: str) -> None:
    """Raise ConfigError for a kind of quantization that does not exist."""
    if kind not in choices(Quantization):
        allowed = ", ".join(map(repr, choices(Quantization)))
        raise ConfigError(f"quantize={kind!r} is not one of {allowed}.")


def is_quantized(spec: Spec, kind: Quantization | str) -> bool:
    """Return whether `quantize` to a kind replaces the leaf of a row: the matrices of a stack of
    blocks, but for routers, and the tables of tokens where the kind has them."""
    if "vocab" in spec.axes:
        return spec.is_matrix and QUANTIZERS[kind].of_tokens
    return spec.is_matrix and spec.quantizable and not spec.lookup and spec.is_stacked


def quantized_leaf(path: str, weight: Any, spec: Spec, kind: str) -> Any:
    """Return the quantized leaf of one weight, placed as the weight is; `path` names it in a
    message."""
    quantizer = QUANTIZERS[kind]
    if isinstance(weight, jax.core.Tracer):
        return quantizer.make(weight, spec)
    weight = jnp.asarray(weight)
    shardings = None
    mesh: Any = weight.sharding.mesh if isinstance(weight.sharding, NamedSharding) else None
    if mesh is not None:
        specs = quantizer.rows(spec).astype(weight.dtype)
        shardings = map_specs(lambda _, row: parameter_sharding(mesh, row.shape, row.axes), specs)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        leaf = jax.jit(lambda w: quantizer.make(w, spec), out_shardings=shardings)(weight)
    # A scale is not finite where a number of its block or channel is not.
    scales = [array for array in jax.tree.leaves(leaf) if jnp.issubdtype(array.dtype, jnp.floating)]
    if not all(bool(jnp.isfinite(scale).all()) for scale in scales):
        raise ConfigError(
            f"quantize: {path} has numbers that are not finite, for which there is no code: load an"
            " earlier checkpoint, or download the weights again."
        )
    return leaf


def _token_rows(params: Params) -> dict[str, Spec]:
    """Return the rows of the table of tokens and of the head over them by their paths, as far as
    the params have them. A head of classes has another number of rows."""
    table = params.get("embed", {}).get("tokens")
    head = params.get("head", {}).get("weight")
    if table is None:
        return {}
    shape = tuple(table.shape)
    row = Spec(shape, ("vocab", "embed"), zeros, inputs=("vocab",), lookup=True)
    token_rows = {"embed.tokens": row}
    if head is not None and head.shape[0] == shape[0]:
        shape = tuple(head.shape)
        token_rows["head.weight"] = replace(row, shape=shape, inputs=("embed",), lookup=False)
    return token_rows


@functools.cache
def _block_rows() -> dict[str, Spec]:
    """Return the rows of one layer by their path in the block, with every matrix and every bias
    that a block can have. Only their axes and whether they are quantizable are used, which are the
    same in all models."""
    dense = ModelConfig(
        activation="swiglu",
        bias="all",
        positions="t5",
        attention=Attention(query_key_norm="layer"),
        relative=RelativePositions(bias="layer"),
    )
    experts = with_settings(
        dense,
        {
            "feed_forward": "experts",
            "experts.n": 2,
            "experts.per_token": 1,
            "experts.shared_ff": 1,
            "experts.d_ff": 1,
        },
    )
    latent = ModelConfig(
        mixer="latent", bias="all", latent=Latent(kv_rank=2, query_rank=2, rope_head_dim=2)
    )
    table = rows(block_specs(latent)) | rows(block_specs(experts))
    for mixer in RECURRENT.values():
        recurrent = with_settings(ModelConfig(), {"mixer": mixer, "positions": "none"})
        table |= rows(block_specs(recurrent))
    return table | rows(block_specs(dense, cross=True))
