"""Texts to texts by an encoder-decoder, such as translations, and their BLEU."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import context_of, full_batch, padded, rounded
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
    """What an encoder-decoder writes for each text, by beam search, in batches of texts of similar
    length.

    Sources and the start of targets are those of the objective `pairs`. A source that exceeds
    model.max_length is cut, with a warning. A target has at most 3/2 as many tokens as the longest
    source of its batch (rounded up), and ten more. Raises ConfigError for another kind of model.
    """
    start, space = tokenizer.as_target([]), context_of(params, config)
    context = context_of(params, config, source=True)
    encoded, most_read = tokenizer.encode_batch(texts), context - len(tokenizer.as_source([]))
    if cut := sum(len(ids) > most_read for ids in encoded):
        warnings.warn(
            f"{cut} of {len(texts)} texts are cut to the model.max_length={context} of this model.",
            stacklevel=2,
        )
    rules: dict[str, Any] = {"beams": beams, "keep": 1, "length_penalty": length_penalty}
    rules |= {"end_token": tokenizer.end_tokens, "vocab_size": tokenizer.vocab_size}
    sources = [tokenizer.as_source(ids[:most_read]) for ids in encoded]
    written, size = [""] * len(texts), min(batch_size, len(texts))
    order = sorted(range(len(texts)), key=lambda index: len(sources[index]))
    for first in range(0, len(texts), size or 1):
        batch = order[first : first + size]
        source, real = padded(full_batch([sources[index] for index in batch], size))
        most = min(rounded(rounded(source.shape[1]) * 3 // 2 + 11), space) - len(start)
        rules |= {"source": source, "source_segment_ids": real}
        found = beam_search(params, config, np.tile(start, (size, 1)), most, **rules)
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
            'BLEU needs sacrebleu, which is not installed: pip install "jaxformer[translation]".'
        ) from None
    return BLEU()
