"""Texts to texts by an encoder-decoder: translation, or whatever its pairs were, and the measure of
how near it came."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.generation.beam import beam_search
from jaxformer.generation.decode import SLOTS
from jaxformer.params import Params
from jaxformer.tokenizer import Tokenizer


def translate(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beams: int = 5,
    length_penalty: float = 0.6,
    batch_size: int = 32,
) -> list[str]:
    """What the model writes for each text, by beam search in batches of texts of about the same
    length.

    A source and the start of its target are as in the objective `pairs`, by the tokenizer; a source
    is cut, with a warning, where it exceeds model.max_length. A target has at most 3/2 as many
    tokens as the longest source of its batch (rounded up), and ten more. Raises ConfigError for a
    model that is no encoder-decoder.
    """
    start, space = tokenizer.as_target([]), config.max_length
    encoded, most_read = tokenizer.encode_batch(texts), space - len(tokenizer.as_source([]))
    if cut := sum(len(ids) > most_read for ids in encoded):
        warnings.warn(
            f"{cut} of {len(texts)} texts are cut to the model.max_length={space} of this model.",
            stacklevel=2,
        )
    rules = {
        "beams": beams,
        "keep": 1,
        "length_penalty": length_penalty,
        "end_token": tokenizer.end_tokens,
        "vocab_size": tokenizer.vocab_size,
    }
    sources = [tokenizer.as_source(ids[:most_read]) for ids in encoded]
    written, size = [""] * len(texts), min(batch_size, len(texts))
    order = sorted(range(len(texts)), key=lambda index: len(sources[index]))
    for first in range(0, len(texts), size or 1):
        batch = order[first : first + size]
        rows = [sources[index] for index in [*batch, *[batch[-1]] * (size - len(batch))]]
        source, real = padded(rows)
        longest = _rounded(source.shape[1])
        most = min(_rounded(longest * 3 // 2 + 11), space) - len(start)
        starts = np.tile(start, (size, 1))
        found = beam_search(
            params, config, starts, most, source=source, source_segment_ids=real, **rules
        )
        for index, tokens in zip(batch, np.asarray(found.tokens[:, 0]), strict=False):
            written[index] = tokenizer.decode(tokens)
    return written


def bleu_metric() -> Any:
    """sacrebleu's BLEU (Papineni et al. 2002, arXiv:1804.08771), with `corpus_score` and
    `get_signature`.

    Raises ConfigError where it is not installed.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ConfigError(
            'BLEU is computed by sacrebleu, which is missing: pip install "jaxformer[translation]".'
        ) from None
    return BLEU()


def padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens filled up on the right to the longest, and their segment ids: int32 [B, T]
    twice."""
    lengths = np.array([[len(row)] for row in rows])
    real = np.arange(lengths.max()) < lengths
    tokens = np.zeros(real.shape, np.int32)
    tokens[real] = np.concatenate(rows)
    return tokens, real.astype(np.int32)


def _rounded(length: int) -> int:
    return -(-length // SLOTS) * SLOTS
