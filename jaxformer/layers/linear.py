"""What all linear layers share: how weights start, and a product with its bias."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxformer.config import ModelConfig
from jaxformer.params import Initializer, Params, contract, normal, truncated_normal, unit_truncated_normal
from jaxformer.sharding import Axes


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


INITIALIZERS: dict[str, Callable[[ModelConfig], Initializers]] = {"gpt2": _gpt2, "truncated_normal": _truncated_normal}


def linear(equation: str, params: Params, name: str, x: jax.Array, to: Axes | None = None) -> jax.Array:
    """`contract(equation, x, params[name])`, plus `params[name_bias]` where there is one."""
    y = contract(equation, x, params[name], to=to)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x` with a share `rate` of its elements zeroed and the rest scaled by 1 / (1 - rate); `x` itself without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jax.numpy.where(kept, x / (1 - rate), 0).astype(x.dtype)
