"""What all linear layers share: how weights start, a product with its bias, rows of a table."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxformer.config import ModelConfig
from jaxformer.params import (
    Initializer,
    Params,
    contract,
    fan_in_normal,
    normal,
    truncated_normal,
    unit_truncated_normal,
    xavier_uniform,
)
from jaxformer.sharding import Axes, activation, constrain, explicit_axes, gathered


class Initializers(NamedTuple):
    """One initializer a role: ordinary weights, those that end in the residual stream, and lookup tables."""

    weight: Initializer
    residual: Initializer
    embedding: Initializer


def _gpt2(config: ModelConfig) -> Initializers:
    """N(0, 0.02), residual projections divided by sqrt(2 n_layers) (Radford et al. 2019)."""
    return Initializers(normal(0.02), normal(0.02 / math.sqrt(2 * config.n_layers)), normal(0.02))


def _truncated_normal(config: ModelConfig) -> Initializers:
    """Variance 2 / (d_in + d_out) cut at three sigma; an embedding that is no output layer has variance 1."""
    return Initializers(truncated_normal, truncated_normal, truncated_normal if config.tied_head else unit_truncated_normal)


def _xavier(config: ModelConfig) -> Initializers:
    """Uniform of variance 2 / (d_in + d_out) (Glorot and Bengio 2010); embeddings N(0, 1 / d_model) (arXiv:1706.03762)."""
    return Initializers(xavier_uniform, xavier_uniform, normal(config.d_model**-0.5))


def _fan_in(config: ModelConfig) -> Initializers:
    """N(0, 1 / d_in), embeddings N(0, 1) (LeCun et al. 1998; T5's, arXiv:1910.10683)."""
    return Initializers(fan_in_normal, fan_in_normal, normal(1.0))


INITIALIZERS: dict[str, Callable[[ModelConfig], Initializers]] = {
    "gpt2": _gpt2,
    "truncated_normal": _truncated_normal,
    "xavier": _xavier,
    "fan_in": _fan_in,
}


def linear(equation: str, params: Params, name: str, x: jax.Array, to: Axes | None = None) -> jax.Array:
    """`contract(equation, x, params[name])`, plus `params[name_bias]` where there is one."""
    y = contract(equation, x, params[name], to=to)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)


def lookup(table: jax.Array, index: Any, to: Axes) -> jax.Array:
    """Rows of a table [V, W] by an int index [...]: [..., W], the names of its axes in `to`. The rows are gathered first."""
    if explicit_axes():
        return gathered(table).at[index].get(out_sharding=activation((*index.shape, table.shape[-1]), to))
    return constrain(constrain(table, (None, to[-1]))[index], to)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x` with a share `rate` of its elements zeroed and the rest scaled by 1 / (1 - rate); `x` itself without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jax.numpy.where(kept, x / (1 - rate), 0).astype(x.dtype)
