"""The inputs of a model: tokens with their layout, and for an encoder-decoder the source too."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.embed import EMBEDDINGS, Inputs
from jaxformer.layers.masks import layout_of

# The row of model.embedding.kind may read others.
INPUT_NAMES = ("tokens", "positions", "segment_ids", "token_types", "source", "source_segment_ids")
# Equal tokens at the edge of a row that count as padding; text rarely begins or ends like this.
LEAST_RUN = 3


def inputs_of(batch: Mapping[str, Any]) -> Inputs:
    """Return the inputs in a batch: tokens, and the others that it has of `INPUT_NAMES` and of
    those that an embedding reads."""

    def array(name: str) -> Any:
        return jnp.asarray(batch[name]) if batch.get(name) is not None else None

    tokens = array("tokens")
    source = array("source")
    source_layout = None
    if source is not None:
        source_layout = layout_of(source, None, array("source_segment_ids"))
    read_besides = {name for row in EMBEDDINGS.values() for name in row.reads if name in batch}
    arrays = {name: jnp.asarray(batch[name]) for name in sorted(read_besides)}
    layout = layout_of(tokens, array("positions"), array("segment_ids"))
    return Inputs(tokens, layout, array("token_types"), source, source_layout, arrays)


def check_inputs(config: ModelConfig, batch: Mapping[str, Any]) -> None:
    """Raises ConfigError for wrong shapes, and for inputs that the model lacks or does not read."""
    problems = []
    tokens = batch["tokens"]
    source = batch.get("source")
    for name, array in (("tokens", tokens), ("source", source)):
        if array is not None and array.ndim != 2:
            problems.append(f"{name} of shape {list(array.shape)} must be [batch, length].")
    like_tokens = dict.fromkeys(("positions", "segment_ids", "token_types"), tokens)
    for name, like in (like_tokens | {"source_segment_ids": source}).items():
        array = batch.get(name)
        if array is not None and (like is None or array.shape != like.shape):
            belongs_to = "a source" if like is None else list(like.shape)
            problems.append(f"{name} has shape {list(array.shape)}, and belongs to {belongs_to}.")
    # Beyond its end JAX reads the last row of a table. Under a transform no values are known, and
    # of an array that other processes have parts of not all.
    ends = dict.fromkeys(("tokens", "source"), config.vocab_size)
    ends |= {"token_types": config.embedding.token_types or 1}
    if config.embedded_positions == "learned":
        ends["positions"] = config.max_length
    for name, end in ends.items():
        array = batch.get(name)
        is_traced = isinstance(array, jax.core.Tracer)
        if is_traced or not isinstance(array, np.ndarray | jax.Array) or not array.size:
            continue
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            continue
        ids = np.asarray(array)
        least = int(ids.min())
        most = int(ids.max())
        if least < 0 or most >= end:
            problems.append(f"{name} has {least} to {most}, and must have 0 to {end - 1}.")
    if config.family == "encoder_decoder" and source is None:
        problems.append("an encoder-decoder reads source=[B, S] beside the target tokens.")
    if config.family != "encoder_decoder" and source is not None:
        problems.append(
            f"source= is for an encoder-decoder, and model.family is {config.family!r}."
        )
    if source is not None and source.ndim == 2 and source.shape[0] != tokens.shape[0]:
        problems.append(f"source has {source.shape[0]} rows, and tokens {tokens.shape[0]}.")
    if batch.get("token_types") is not None and not config.embedding.token_types:
        problems.append("token_types need model.embedding.token_types, which is 0.")
    names = (*INPUT_NAMES, *EMBEDDINGS[config.embedding.kind].reads)
    for name in batch:
        if name not in names:
            problems.append(
                f"{name} is no input of a model with model.embedding.kind="
                f"{config.embedding.kind!r}, whose inputs are {', '.join(names)}."
            )
    if problems:
        raise ConfigError("\n".join(problems))


def warn_of_padding(
    name: str, tokens: Any, segment_ids: Any, sides: str = "left right", level: int = 3
) -> None:
    """Warn if one token id occurs in runs at one of the `sides` of rows [B, T] and nowhere else,
    and there are no segment ids, so that it is read as text. `name` is the argument of the rows,
    and `level` the stacklevel of the warning. Under a transform of JAX the values of the rows are
    not known, and there is no warning."""
    if segment_ids is not None or tokens is None or isinstance(tokens, jax.core.Tracer):
        return
    rows = np.asarray(tokens)
    if rows.ndim != 2 or rows.shape[1] <= LEAST_RUN:
        return
    for side in sides.split():
        seen = rows if side == "left" else rows[:, ::-1]
        for token in np.unique(seen[:, 0]):
            runs = np.cumprod(seen == token, axis=1).sum(axis=1)  # [B]
            padded = (runs >= LEAST_RUN) & (runs < rows.shape[1])
            if padded.any() and runs.sum() == (rows == token).sum():
                ids = "segment_ids" if name != "source" else "source_segment_ids"
                warnings.warn(
                    f"{name} has the token {token} in runs at the {side} of {padded.sum()} of"
                    f" {len(rows)} rows. If it is padding, give {ids}, of the same shape, with 0 on"
                    " padding and 1 elsewhere: without them it is read as text.",
                    stacklevel=level,
                )
                return


def warn_of_padded_batch(batch: Mapping[str, Any], family: str) -> None:
    """Apply `warn_of_padding` to a batch of a loss. Padding after the text of a decoder is harmless
    if its weights are 0, because no token before it sees it, and gets no warning."""
    tokens = batch.get("tokens")
    weights = batch.get("weights")
    sides = "left right"
    if family != "encoder" and weights is not None and not isinstance(weights, jax.core.Tracer):
        unweighted = np.asarray(weights)
        if unweighted.ndim == 2 and not unweighted[:, -1].all():
            sides = "left"
    warn_of_padding("tokens", tokens, batch.get("segment_ids"), sides, level=4)
    source = batch.get("source")
    source_ids = batch.get("source_segment_ids")
    warn_of_padding("source", source, source_ids, level=4)
