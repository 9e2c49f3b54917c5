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
from jaxformer.arrays.params import Params, Spec, dotted, is_custom, map_specs, rows
from jaxformer.config.adapter import Quantization
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import choices
from jaxformer.files import ConfigError
from jaxformer.layers.block import block_specs


def quantize(params: Params, kind: str) -> Params:
    """The params of a model with a quantized leaf for every matrix of its blocks.

    `kind` is "int8" (`to_int8`: a scale for each output channel), "nf4" (`to_nf4`: blocks of 64) or
    "nf4_double" (whose scales have 8 bits too).
    Embeddings, heads, norms and biases stay as they are, as in bitsandbytes. The leaves are used
    wherever the arrays were; those of a mesh stay on it. Raises ConfigError for params that hold no
    blocks of our models, leaves that are custom already, and numbers that are not finite.
    """
    check_quantization(kind)
    known, found = _block_rows(), 0

    def leaf(path: Any, weight: Any) -> Any:
        nonlocal found
        name = dotted(path)
        names = name.split(".")
        if "blocks" not in names:
            return weight
        spec = known.get(_within_block(names))
        if is_custom(weight):
            raise ConfigError(
                f"quantize: {name} is a {type(weight).__name__} already: quantize the params before"
                " a leaf replaces one of their arrays."
            )
        if spec is None and weight.ndim <= 2:  # a vector of each layer, as of a norm of your own
            return weight
        if spec is None or weight.ndim != len(spec.axes) + 1:
            raise ConfigError(
                f"quantize: {name} {list(weight.shape)} is no leaf of the blocks of this package,"
                " so its output channels are not known: use to_int8 or to_nf4 of"
                " jaxformer.adapters.quantized, which take the row of a weight."
            )
        row = replace(spec, shape=tuple(weight.shape), axes=("layers", *spec.axes))
        if not is_quantized(row):
            return weight
        found += 1
        return quantized_leaf(name, weight, row, kind)

    made = jax.tree.map_with_path(leaf, params, is_leaf=is_custom)
    if not found:
        raise ConfigError(
            "quantize: these params have no blocks; it takes those of jf.init or jf.load."
        )
    return made  # type: ignore[no-any-return]


def check_quantization(kind: str) -> None:
    """ConfigError for a kind of quantization that does not exist."""
    if kind not in choices(Quantization):
        allowed = ", ".join(map(repr, choices(Quantization)))
        raise ConfigError(f"quantize={kind!r} is not one of {allowed}.")


def is_quantized(spec: Spec) -> bool:
    """Whether the leaf of a row is one that `quantize` replaces: a matrix of a stack of blocks."""
    return spec.is_matrix and not spec.lookup and spec.is_stacked


def quantized_leaf(path: str, weight: Any, spec: Spec, kind: str) -> Any:
    """The quantized leaf of one weight, placed as the weight is. Raises ConfigError for numbers
    that are not finite, naming `path`."""
    quantizer = QUANTIZERS[kind]
    if isinstance(weight, jax.core.Tracer):
        return quantizer.make(weight, spec)
    weight, places = jnp.asarray(weight), None
    mesh: Any = weight.sharding.mesh if isinstance(weight.sharding, NamedSharding) else None
    if mesh is not None:
        parts = quantizer.rows(spec).astype(weight.dtype)
        places = map_specs(lambda _, row: parameter_sharding(mesh, row.shape, row.axes), parts)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        made = jax.jit(lambda w: quantizer.make(w, spec), out_shardings=places)(weight)
    scales = [part for part in jax.tree.leaves(made) if jnp.issubdtype(part.dtype, jnp.floating)]
    if not all(bool(jnp.isfinite(part).all()) for part in scales):
        raise ConfigError(
            f"quantize: {path} has numbers that are not finite, for which there is no code: load an"
            " earlier checkpoint, or download the weights again."
        )
    return made


@functools.cache
def _block_rows() -> dict[str, Spec]:
    """The rows of one layer by their path in the block, with every matrix and every bias of one
    that a block can have. Their axes are those of all models, their sizes those of none."""
    return rows(block_specs(ModelConfig(activation="swiglu", bias="all"), cross=True))


def _within_block(names: list[str]) -> str:
    """The path of a leaf in its block, after "blocks" and the position in a repeating pattern."""
    inside = names[names.index("blocks") + 1 :]
    return ".".join(inside[inside[0].isdecimal() :])
