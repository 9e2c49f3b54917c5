"""Functions that all linear layers share: initializers, a product with its bias, and dropout."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.arrays.params import InitFunction, Params, Spec, contract, normal
from jaxformer.arrays.sharding import Axes
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import Initializer as InitializerName
from jaxformer.layers.positions import sinusoids


class Initializers(NamedTuple):
    """The initializers of weights, of projections into the residual stream, of embeddings and of
    learned positions."""

    weight: InitFunction
    residual: InitFunction
    embedding: InitFunction
    positions: InitFunction


def truncated_normal(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw from N(0, 2 / (fan_in + fan_out)) cut at three sigma (Glorot and Bengio 2010)."""
    std = math.sqrt(2 / sum(spec.scale_fans))
    # The cut leaves a standard deviation of 0.987 std, which nothing corrects.
    return std * jax.random.truncated_normal(key, -3, 3, spec.shape)


def fan_in_normal(key: jax.Array, spec: Spec) -> jax.Array:
    return jax.random.normal(key, spec.shape) / math.sqrt(spec.scale_fans[0])


def xavier_uniform(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw uniformly within sqrt(6 / (fan_in + fan_out)) of zero (Glorot and Bengio 2010)."""
    bound = math.sqrt(6 / sum(spec.scale_fans))
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)


def unit_truncated_normal(key: jax.Array, spec: Spec) -> jax.Array:
    return jax.random.truncated_normal(key, -3, 3, spec.shape)


def _gpt2(config: ModelConfig) -> Initializers:
    """Draw from N(0, 0.02), residual projections divided by sqrt(2 n_layers) (Radford et al.
    2019)."""
    residual = normal(0.02 / math.sqrt(2 * config.n_layers))
    return Initializers(normal(0.02), residual, normal(0.02), normal(0.02))


def _truncated_normal(config: ModelConfig) -> Initializers:
    """Draw with variance 2 / (d_in + d_out) cut at three sigma; 1 for an embedding that is not
    tied."""
    # A table that is also the output matrix is as small as one.
    embedding = truncated_normal if config.tied_head else unit_truncated_normal
    return Initializers(truncated_normal, truncated_normal, embedding, embedding)


def _xavier(config: ModelConfig) -> Initializers:
    """Draw uniformly with variance 2 / (d_in + d_out) (Glorot and Bengio 2010); embeddings N(0, 1 /
    d_model) (arXiv:1706.03762).

    Learned positions start as sinusoids of that size: attention to a neighbor is then learned once
    for all positions, which takes small masked models very long otherwise.
    """

    def waves(key: jax.Array, spec: Spec) -> jax.Array:
        # Sinusoids have the mean square 1/2, and these 1 / d_model, the variance of the tokens.
        return math.sqrt(2 / config.d_model) * sinusoids(jnp.arange(spec.shape[0]), spec.shape[1])

    return Initializers(xavier_uniform, xavier_uniform, normal(config.d_model**-0.5), waves)


def _fan_in(config: ModelConfig) -> Initializers:
    """Draw from N(0, 1 / d_in), embeddings N(0, 1) (LeCun et al. 1998; T5's, arXiv:1910.10683)."""
    return Initializers(fan_in_normal, fan_in_normal, normal(1.0), normal(1.0))


INITIALIZERS: Table[Callable[[ModelConfig], Initializers]] = Table(
    InitializerName,
    {"gpt2": _gpt2, "truncated_normal": _truncated_normal, "xavier": _xavier, "fan_in": _fan_in},
)


def linear(
    equation: str, params: Params, name: str, x: jax.Array, to: Axes | None = None, point: str = ""
) -> jax.Array:
    """Return `contract(equation, x, params[name])`, plus `params[name_bias]` where there is one.
    The product is a point for `model.remat`, of that name if `point` is empty; to add the bias
    again takes less time than to write the sum."""
    y = checkpoint_name(contract(equation, x, params[name], to=to), point or name)
    bias = params.get(f"{name}_bias")
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Return `x` with a fraction `rate` of its elements set to zero, and the others divided by 1 -
    rate. Without a key it is `x` itself."""
    if key is None or rate == 0:
        return x
    remains = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(remains, x / (1 - rate), 0).astype(x.dtype)
