"""Normalization over the last axis, in float32 for every dtype of the input."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.arrays.exact import by_tiles, is_exact
from jaxformer.arrays.params import Params, Spec, Specs, ones, zeros
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import Normalization


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float = 1e-5
) -> Float[Array, "... D"]:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last axis (arXiv:1910.07467)."""
    return _normalized(x.astype(jnp.float32), scale, None, eps, False).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, "*heads D"],
    bias: Float[Array, "D"] | None = None,
    eps: float = 1e-5,
) -> Float[Array, "... D"]:
    """Return (x - mean) / sqrt(var + eps) * scale + bias over the last axis (arXiv:1607.06450). The
    scale is [D], or of each head [N, D]."""
    return _normalized(x.astype(jnp.float32), scale, bias, eps, True).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _normalized(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float, centered: bool
) -> jax.Array:
    """Return (x - m) r scale + bias with m and r of `_mean_and_root`: [..., D] float32."""

    def run(x: jax.Array) -> jax.Array:
        mean, root = _mean_and_root(x, eps, centered)
        y = (x - mean) * root * scale
        if bias is not None:
            y = y + bias
        return y

    if is_exact():
        return by_tiles(run, x, min(x.ndim - 1, 2))
    return run(x)


@_normalized.defjvp
def _normalized_tangent(
    eps: float, centered: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the derivative: with y = (x - m) r, dy = r (dx - mean(dx) - y mean(y dx)), without
    mean(dx) where m is 0: fewer arrays are kept for the backward pass than where each term is
    differentiated. Without the barrier XLA computes m and r again in each kernel of a GPU, and
    writes y dy in float32: 4 of the 104 ms of a step of gpt2_124m on an H100, by the count of
    benchmarks/compiled.py."""
    x, scale, bias = primals
    d_x, d_scale, d_bias = tangents
    mean, root = _mean_and_root(x, eps, centered)
    if centered:
        mean, root = jax.lax.optimization_barrier((mean, root))
        d_x = d_x - jnp.mean(d_x, axis=-1, keepdims=True)
    y = (x - mean) * root
    tangent = root * (d_x - y * jnp.mean(y * d_x, axis=-1, keepdims=True)) * scale + y * d_scale
    if bias is not None:
        tangent = tangent + d_bias
    return _normalized(x, scale, bias, eps, centered), tangent


def _mean_and_root(x: jax.Array, eps: float, centered: bool) -> tuple[jax.Array | float, jax.Array]:
    """Return (m, r = 1 / sqrt(mean((x - m)^2) + eps)) over the last axis, [..., 1]; m is the mean
    of x, or 0 unless `centered`."""
    mean: jax.Array | float = 0.0
    if centered:
        mean = jnp.mean(x, axis=-1, keepdims=True)
    # The mean of squares of the centered numbers: that of x^2 less the squared mean would cancel.
    return mean, jax.lax.rsqrt(jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True) + eps)


def scale_spec(config: ModelConfig, shape: tuple[int, ...]) -> Spec:
    """Return the stored scale of a norm, which starts at 1 less the row's offset."""
    return Spec(shape, ("norm",), zeros if NORMS[config.norm].offset else ones)


def scale_of(config: ModelConfig, scale: jax.Array) -> jax.Array:
    """Return the factor of a norm whose leaf is that of `scale_spec`."""
    offset = NORMS[config.norm].offset
    if not offset:
        return scale
    return offset + scale


class NormRow(NamedTuple):
    """A kind of norm: the specs of its leaves, its function, its formula (empty: its name), and
    what is added to stored scales."""

    specs: Callable[[ModelConfig], Specs]
    run: Callable[[Params, ModelConfig, jax.Array], jax.Array]
    formula: str = ""
    offset: int = 0


def _rms_specs(config: ModelConfig) -> Specs:
    return {"scale": scale_spec(config, (config.d_model,))}


def _rms(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    return rms_norm(x, scale_of(config, params["scale"]), config.norm_eps)


def _layer_specs(config: ModelConfig) -> Specs:
    specs = _rms_specs(config)
    if "norm" in config.biased:
        specs["bias"] = Spec((config.d_model,), ("norm",), zeros)
    return specs


def _layer(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    return layer_norm(x, params["scale"], params.get("bias"), config.norm_eps)


NORMS: Table[NormRow] = Table(
    Normalization,
    {
        "rms": NormRow(_rms_specs, _rms, "y = x / √(mean(x²) + ε) · g"),
        "rms1p": NormRow(_rms_specs, _rms, "y = x / √(mean(x²) + ε) · (1 + g)", offset=1),
        "layer": NormRow(_layer_specs, _layer, "y = (x - mean(x)) / √(var(x) + ε) · g"),
        "none": NormRow(lambda config: {}, lambda params, config, x: x, "y = x"),
    },
)


def norm_specs(config: ModelConfig) -> Specs:
    """Return the leaves of the config's norm."""
    return NORMS[config.norm].specs(config)


@jax.named_scope("norm")
def norm(params: Params, config: ModelConfig, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Apply the config's norm: [..., D] -> [..., D]."""
    return checkpoint_name(NORMS[config.norm].run(params, config, x), "normed")


def norm_formula(config: ModelConfig) -> str:
    """Return the config's norm as text."""
    row = NORMS[config.norm]
    bias = " + b" if "bias" in row.specs(config) else ""
    return (row.formula or f"y = {config.norm}(x)") + bias
