"""Vectors of texts: the residual stream of a decoder or an encoder, pooled over each row."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.head import POOLINGS, pool
from jaxformer.layers.masks import TokenLayout
from jaxformer.models.inputs import check_inputs, inputs_of
from jaxformer.models.transformer import OptionalTokens, check_model, hidden

SMALLEST_NORM = 1e-12  # so that a row of padding alone has the vector 0, and a finite gradient


def embed(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    pooling: str = "auto",
    normalize: bool = True,
    segment_ids: OptionalTokens = None,
    positions: OptionalTokens = None,
    token_types: OptionalTokens = None,
) -> Float[Array, "B D"]:
    """Return a vector of each row: tokens [B, T] int -> [B, D] float32, of Euclidean length 1, or
    of any length with normalize=False (Sentence-BERT, arXiv:1908.10084).

    `pooling` is the mean over the tokens of a row, its first token, or its last; "auto" is what
    model.head.pooling says, and the mean where that is "auto" too. What is pooled is the residual
    stream after the last norm, before any head and any pooler. `segment_ids` [B, T] int are 0 on
    padding, on any side, and 1 elsewhere; a row that is all padding has the vector 0. `positions`
    and `token_types` are those of `jf.forward`.

    A pure function, to be jitted with `static_argnums=1`. Raises ConfigError for an
    encoder-decoder, for a pooling that there is not, for the first token in a decoder, which sees
    itself alone, and for rows of several segments, of which each text needs a row of its own.
    """
    if config.family == "encoder_decoder":
        raise ConfigError(
            "an encoder-decoder has no vector of a text: embed with a model of model.family="
            "'encoder' or 'decoder'."
        )
    if pooling not in ("auto", *POOLINGS):
        raise ConfigError(f"pooling={pooling!r} is not one of auto, {', '.join(POOLINGS)}.")
    if config.family == "decoder" and pooling == "first":
        raise ConfigError(
            "pooling='first' needs an encoder: the first token of a decoder sees itself alone."
        )
    known = segment_ids is not None and not isinstance(segment_ids, jax.core.Tracer)
    if known and np.asarray(segment_ids).max(initial=0) > 1:
        raise ConfigError(
            "segment_ids number several texts in a row, and a vector is that of one: give each text"
            " its own row, with 1 on its tokens and 0 on padding."
        )
    batch = {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "positions": positions,
        "token_types": token_types,
    }
    check_model(params, config)
    check_inputs(config, batch)
    inputs = inputs_of(batch)
    x = hidden(params, config, inputs).x
    return row_vectors(config, x, inputs.layout, pooling, normalize)


def row_vectors(
    config: ModelConfig,
    x: Float[Array, "B T D"],
    layout: TokenLayout,
    pooling: str = "auto",
    normalize: bool = True,
) -> Float[Array, "B D"]:
    """Return the vectors of `embed` from the residual stream of a model."""
    # A sum over as many tokens as a row has is float32.
    vectors = pool(
        x.astype(jnp.float32), layout, config.text_pooling if pooling == "auto" else pooling
    )
    if not normalize:
        return vectors
    return of_length_1(vectors)


def of_length_1(vectors: jax.Array) -> jax.Array:
    """Return vectors [..., D] divided by their lengths."""
    squares = jnp.square(vectors).sum(axis=-1, keepdims=True)
    # The maximum comes before the root, whose derivative at 0 is infinite.
    return vectors / jnp.sqrt(jnp.maximum(squares, SMALLEST_NORM**2))
