"""Texts to texts by an encoder-decoder, such as translations, and their BLEU."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import full_batch, padded, rounded
from jaxformer.models.transformer import context_of
from jaxformer.runs.stated import writing_rules
from jaxformer.tokenizer import Tokenizer


def translate(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    **search: Any,
) -> list[str]:
    """What an encoder-decoder writes for each text by beam search, in batches of texts of similar
    length.

    Sources and the start of targets are those of the objective `pairs`. A source that exceeds
    model.max_length is cut, with a warning. A target has at most 3/2 as many tokens as the longest
    source of its batch (rounded up), and ten more. `search` are keywords of `beam_search`, which
    replace those that the model's files say.
    """
    start, target_context = tokenizer.as_target([]), context_of(params, config)
    context = context_of(params, config, source=True)
    encoded = tokenizer.encode_batch(texts)
    source_limit = context - len(tokenizer.as_source([]))
    cut = sum(len(ids) > source_limit for ids in encoded)
    if cut:
        warnings.warn(
            f"{cut} of {len(texts)} texts are cut to the model.max_length={context} of this model.",
            stacklevel=2,
        )
    rules = {"keep": 1} | writing_rules(tokenizer) | search
    sources = [tokenizer.as_source(ids[:source_limit]) for ids in encoded]
    targets, size = [""] * len(texts), min(batch_size, len(texts))
    order = sorted(range(len(texts)), key=lambda index: len(sources[index]))
    for first in range(0, len(texts), size or 1):
        batch = order[first : first + size]
        source, segment_ids = padded(full_batch([sources[index] for index in batch], size))
        # Rounded up twice, so that few programs compile.
        target_length = min(rounded(rounded(source.shape[1]) * 3 // 2 + 11), target_context)
        best = beam_search(
            params,
            config,
            np.tile(start, (size, 1)),
            target_length - len(start),
            source=source,
            source_segment_ids=segment_ids,
            **rules,
        )
        for index, tokens in zip(batch, np.asarray(best.tokens[:, 0]), strict=False):
            targets[index] = tokenizer.decode(tokens)
    return targets


def bleu_metric(tokenizer: str = "13a") -> Any:
    """sacrebleu's BLEU (Papineni et al. 2002, arXiv:1804.08771), with `corpus_score` and
    `get_signature`.

    `tokenizer` is the name of one of sacrebleu's, which split texts into what BLEU counts: 13a
    takes what stands between spaces for a word; zh, ja-mecab, ko-mecab and char are for scripts
    without spaces.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ConfigError(
            'BLEU needs sacrebleu, which is not installed: pip install "jaxformer[translation]".'
        ) from None
    if tokenizer not in BLEU.TOKENIZERS:
        raise ConfigError(
            f"there is no BLEU tokenizer {tokenizer!r}: choose one of"
            f" {', '.join(sorted(BLEU.TOKENIZERS))}."
        )
    try:
        return BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError, OSError) as error:  # of its package, or of its model
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the BLEU tokenizer {tokenizer!r} cannot be used here ({reason}): install what it"
            " needs, or choose another, such as char."
        ) from error
