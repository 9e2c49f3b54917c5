"""Rows of tokens that a model continues or reads: checked, filled up to one length, and counted
against the context."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.models.transformer import context_of

SLOTS = 32  # the least length of a cache or a padded prompt, and what divides them
EMPTY = (
    "a prompt is empty: give each row at least one token (the end-of-text token starts a new text)."
)


def rounded(length: int, multiple: int = SLOTS) -> int:
    """`length` rounded up."""
    return -(-int(length) // multiple) * multiple


def rung(length: int, longest: int) -> int:
    """Return the length of a cache or a padded prompt for `length` tokens: SLOTS times 1, 2, 3, 4,
    6, 8, 12 and so on, so that few programs serve all lengths, and at most what `longest` tokens
    take."""
    count = rounded(length) // SLOTS
    power = 1 << (count - 1).bit_length()
    if count <= 3 * power // 4:
        power = 3 * power // 4
    return min(SLOTS * power, rounded(max(length, longest)))


def padded(
    rows: Sequence[Sequence[int]], length: int = 0, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens filled up with zeros to the longest, or to `length`, and their segment ids,
    which are 0 on padding: int32 [B, T] twice. Padding is on the right, or on the `left`."""
    lengths = np.array([[len(row)] for row in rows])  # [B, 1]
    length = max(length, int(lengths.max()))
    index = np.arange(length)
    real = index < lengths  # bool [B, T]
    if left:
        real = index >= length - lengths
    tokens = np.zeros(real.shape, np.int32)
    tokens[real] = np.concatenate(rows)
    return tokens, real.astype(np.int32)


def full_batch(rows: list[Any], size: int) -> list[Any]:
    """Return the rows, and copies of the first up to `size`, so that every batch has one shape."""
    return [*rows, *rows[:1] * (size - len(rows))]


def capacity(
    params: Params, config: ModelConfig, prompt_length: int, source_length: int = 0
) -> int:
    """How many tokens fit into the context after a prompt."""
    source_context = context_of(params, config, source=True)
    if source_length > source_context:
        before = config.max_length - source_context
        behind_adapter = f" behind {before} tokens of an adapter" if before else ""
        raise ConfigError(
            f"a source of {source_length} tokens{behind_adapter} exceeds"
            f" model.max_length={config.max_length}: shorten it."
        )
    return max(context_of(params, config) - prompt_length, 0)


def read_rows(
    config: ModelConfig, name: str, rows: ArrayLike, segment_ids: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids (1, or 0 on padding) int32 [B, T], from tokens [B, T], padded on the
    left to a rung."""
    tokens = np.asarray(rows)
    if tokens.size == 0:
        raise ConfigError(EMPTY)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"{name} must be integer tokens [B, T], not {tokens.dtype}{list(tokens.shape)}."
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ConfigError(
            f"{name} must have tokens in 0 .. {config.vocab_size - 1}, and has {tokens.min()} to"
            f" {tokens.max()}."
        )
    segments = np.ones_like(tokens)
    if segment_ids is not None:
        segments = np.asarray(segment_ids) != 0
    if segments.shape != tokens.shape:
        raise ConfigError(
            f"the segment ids of {name} have shape {list(segments.shape)}, its tokens"
            f" {list(tokens.shape)}."
        )
    if not segments.any(axis=1).all():
        raise ConfigError(EMPTY)
    length = tokens.shape[1]
    padding = 0
    if length > 1:  # the start token of an encoder-decoder, which stands alone, is not padded
        padding = rung(length, config.max_length) - length
    on_the_left = ((0, 0), (padding, 0))
    tokens = np.pad(tokens, on_the_left)
    segments = np.pad(segments, on_the_left)
    return tokens.astype(np.int32), segments.astype(np.int32)
