"""What a model reads: tokens and where they are, and for an encoder-decoder the source and where
that is."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config_model import ModelConfig
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.settings import ConfigError


@struct.dataclass
class Inputs:
    """`tokens` and `types` are int [B, T], `source` int [B, S]."""

    tokens: jax.Array
    layout: TokenLayout
    types: jax.Array | None = None
    source: jax.Array | None = None
    source_layout: TokenLayout | None = None


def inputs_of(batch: Mapping[str, Any]) -> Inputs:
    """The inputs in a batch: tokens, and what it has of positions, segment_ids, token_types,
    source, source_segment_ids."""
    names = ("tokens", "positions", "segment_ids", "token_types", "source", "source_segment_ids")
    arrays = (None if batch.get(name) is None else jnp.asarray(batch[name]) for name in names)
    tokens, positions, segments, types, source, source_segments = arrays
    source_layout = None if source is None else layout_of(source, None, source_segments)
    return Inputs(tokens, layout_of(tokens, positions, segments), types, source, source_layout)  # type: ignore[arg-type]


def check_inputs(config: ModelConfig, batch: Mapping[str, Any]) -> None:
    """ConfigError for shapes that cannot be, a sequence beyond learned positions, a source that
    lacks or is not wanted."""
    tokens, source, problems = batch["tokens"], batch.get("source"), []
    for name, array in (("tokens", tokens), ("source", source)):
        too_long = config.positions == "learned" and batch.get("positions") is None
        if array is not None and (
            array.ndim != 2 or (too_long and array.shape[1] > config.max_length)
        ):
            problems.append(
                f"{name} of shape {list(array.shape)} must be [batch, length], and with learned"
                f" positions no longer than model.max_length={config.max_length}: cut them, or make"
                " the model with a larger table."
            )
    for name, like in (
        ("positions", tokens),
        ("segment_ids", tokens),
        ("token_types", tokens),
        ("source_segment_ids", source),
    ):
        array = batch.get(name)
        if array is not None and (like is None or array.shape != like.shape):
            shape = "a source" if like is None else list(like.shape)
            problems.append(f"{name} has shape {list(array.shape)}, and belongs to {shape}.")
    if (config.family == "encoder_decoder") != (source is not None):
        problems.append(
            "an encoder-decoder reads source=[B, S] beside the target tokens."
            if source is None
            else f"source= is for an encoder-decoder, and model.family is {config.family!r}."
        )
    if source is not None and source.ndim == 2 and source.shape[0] != tokens.shape[0]:
        problems.append(f"source has {source.shape[0]} rows, and tokens {tokens.shape[0]}.")
    if batch.get("token_types") is not None and not config.token_types:
        problems.append("token_types need model.token_types, which is 0.")
    if problems:
        raise ConfigError("\n".join(problems))
