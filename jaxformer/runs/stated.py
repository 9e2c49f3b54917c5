"""The rules on texts that a model's files state: the keys of transformers' GenerationConfig that
exclude tokens or decide where a text ends."""

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, located
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import PENALTIES, RULES_NOT_TAKEN, read_optional, stored_rules


def writing_rules(model: Tokenizer | str | Path) -> dict[str, Any]:
    """The rules on the texts of a model that its files state, as keywords of `jf.generate` and of
    `jf.beam_search`; `model` is its tokenizer, or its directory where that has no tokenizer.json.

    These are end_token, vocab_size (of a tokenizer) and what generation_config.json states of
    suppress_tokens (with the bad_words_ids of one token), bad_words (the longer ones),
    begin_suppress_tokens, min_length, min_new_tokens, no_repeat_ngram_size, forced_eos_token_id and
    repetition_penalty. Without that file those of config.json hold, as in transformers. A
    forced_bos_token_id belongs to the prompt of an encoder-decoder, behind the start token, where
    `Tokenizer.as_target` has it. Raises ConfigError for a rule that is not supported
    (encoder_no_repeat_ngram_size, sequence_bias and others) or is malformed.
    """
    if isinstance(model, Tokenizer):
        ends, metadata = model.end_tokens, model.metadata
        forced = model.forced_token is not None
        rules = text_rules(metadata.rules, ends, forced, metadata.rules_file)
        return {"end_token": ends, "vocab_size": model.vocab_size} | rules
    stored, file = stored_rules(located(model))
    values = read_optional(file)
    ends = _ids(values, "eos_token_id", str(file))
    forced = values.get("forced_bos_token_id") is not None
    return {"end_token": ends} | text_rules(stored, ends, forced, str(file))


def text_rules(
    stored: Mapping[str, Any], ends: Iterable[int], has_forced_token: bool, file: str
) -> dict[str, Any]:
    """The stored rules as keywords of `jf.generate`, where `ends` are the end tokens.

    With a forced token the prompt of a target has one token more, which transformers counts as a
    new one.
    """
    for key in RULES_NOT_TAKEN:
        if key in stored:
            raise ConfigError(
                f"{file}: {key} has {str(stored[key])[:80]}, which is not followed here when a text"
                " is written: generate with transformers, or remove it there to write without it."
            )
    penalties = [f"{key}={stored[key]}" for key in PENALTIES if key in stored]
    if penalties:
        warnings.warn(
            f"{file} has {', '.join(penalties)}, which jaxformer does not apply: its texts may"
            " repeat more than those of transformers.",
            stacklevel=4,
        )
    listed = stored.get("bad_words_ids", [])
    if not isinstance(listed, list) or not all(isinstance(word, list) and word for word in listed):
        raise _malformed(file, "bad_words_ids", listed, "a list of lists of token ids")
    words = [_ids({"bad_words_ids": word}, "bad_words_ids", file) for word in listed]
    # An end token is no bad word, as in transformers.
    tokens = [word[0] for word in words if len(word) == 1 and word[0] not in {*ends}]
    suppressed = [*_ids(stored, "suppress_tokens", file), *tokens]
    rules: dict[str, Any] = {
        "suppress_tokens": tuple(dict.fromkeys(suppressed)),
        "bad_words": tuple(word for word in words if len(word) > 1),
        "begin_suppress_tokens": _ids(stored, "begin_suppress_tokens", file),
        "forced_eos_token_id": _ids(stored, "forced_eos_token_id", file) or None,
    }
    for key in ("min_length", "min_new_tokens", "no_repeat_ngram_size"):
        rules[key] = stored.get(key, 0)
        if type(rules[key]) is not int or rules[key] < 0:
            raise _malformed(file, key, stored[key], "a whole number, at least 0")
    penalty = stored.get("repetition_penalty")
    if penalty is not None:
        if not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
            raise _malformed(file, "repetition_penalty", penalty, "a number above 0")
        rules["repetition_penalty"] = float(penalty)
    if has_forced_token:
        rules["min_new_tokens"] = max(0, rules["min_new_tokens"] - 1)
    return {key: value for key, value in rules.items() if value not in ((), None, 0)}


def _ids(stored: Mapping[str, Any], key: str, file: str) -> tuple[int, ...]:
    """The token ids of a key, which has one id, a list of them or None."""
    value = stored.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise _malformed(file, key, value, "token ids, at least 0")
    return tuple(ids)


def _malformed(file: str, key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{file}: {key} is {str(value)[:80]}, and must be {allowed}.")
