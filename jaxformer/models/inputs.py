"""The inputs of a model: tokens with their layout, and for an encoder-decoder the source too."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.embed import EMBEDDINGS, Inputs
from jaxformer.layers.masks import layout_of

# The row of model.embedding may read others.
INPUT_NAMES = (
    *("tokens", "positions", "segment_ids", "token_types"),
    *("source", "source_segment_ids"),
)


def inputs_of(batch: Mapping[str, Any]) -> Inputs:
    """The inputs in a batch: tokens, and the others that it has of `INPUT_NAMES` and of those that
    an embedding reads."""

    def array(name: str) -> Any:
        return jnp.asarray(batch[name]) if batch.get(name) is not None else None

    tokens, positions, segments = array("tokens"), array("positions"), array("segment_ids")
    types, source, source_segments = (
        array("token_types"),
        array("source"),
        array("source_segment_ids"),
    )
    source_layout = None if source is None else layout_of(source, None, source_segments)
    read_besides = {name for row in EMBEDDINGS.values() for name in row.reads if name in batch}
    arrays = {name: jnp.asarray(batch[name]) for name in sorted(read_besides)}
    layout = layout_of(tokens, positions, segments)
    return Inputs(tokens, layout, types, source, source_layout, arrays)


def check_inputs(config: ModelConfig, batch: Mapping[str, Any]) -> None:
    """Raises ConfigError for wrong shapes, and for inputs that the model lacks or does not read."""
    problems = [*_wrong_shapes(config, batch), *_wrong_inputs(config, batch)]
    if problems:
        raise ConfigError("\n".join(problems))


def _wrong_shapes(config: ModelConfig, batch: Mapping[str, Any]) -> Iterator[str]:
    tokens, source = batch["tokens"], batch.get("source")
    bounded = config.embedded_positions == "learned" and batch.get("positions") is None
    for name, array in (("tokens", tokens), ("source", source)):
        if array is None:
            continue
        if array.ndim != 2 or (bounded and array.shape[1] > config.max_length):
            yield (
                f"{name} of shape {list(array.shape)} must be [batch, length], and with learned"
                f" positions no longer than model.max_length={config.max_length}."
            )
    like_tokens = dict.fromkeys(("positions", "segment_ids", "token_types"), tokens)
    for name, like in (like_tokens | {"source_segment_ids": source}).items():
        array = batch.get(name)
        if array is not None and (like is None or array.shape != like.shape):
            yield (
                f"{name} has shape {list(array.shape)}, and belongs to"
                f" {'a source' if like is None else list(like.shape)}."
            )


def _wrong_inputs(config: ModelConfig, batch: Mapping[str, Any]) -> Iterator[str]:
    tokens, source = batch["tokens"], batch.get("source")
    if config.family == "encoder_decoder" and source is None:
        yield "an encoder-decoder reads source=[B, S] beside the target tokens."
    if config.family != "encoder_decoder" and source is not None:
        yield f"source= is for an encoder-decoder, and model.family is {config.family!r}."
    if source is not None and source.ndim == 2 and source.shape[0] != tokens.shape[0]:
        yield f"source has {source.shape[0]} rows, and tokens {tokens.shape[0]}."
    if batch.get("token_types") is not None and not config.token_types:
        yield "token_types need model.token_types, which is 0."
    names = (*INPUT_NAMES, *EMBEDDINGS[config.embedding].reads)
    for name in batch:
        if name not in names:
            yield (
                f"{name} is no input of a model with model.embedding={config.embedding!r}, whose"
                f" inputs are {', '.join(names)}."
            )
