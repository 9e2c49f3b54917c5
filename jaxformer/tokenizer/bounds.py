"""Bounds on an untrusted tokenizer.json: it must neither make a text many times longer, nor take
more than a moment to split a short one.

The growth follows from the file. Whether its regular expressions end is tried in a process of its
own with bounds: those of the tokenizers library give up a match after ten million steps, with a
panic, but a text has as many matches as characters.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jaxformer.cluster.bounded import BoundedProcess, OutOfBounds
from jaxformer.files import ConfigError
from jaxformer.tokenizer.pieces import ANY_CHARACTER, without_panic
from jaxformer.tokenizer.words import WORD_PATTERNS

MOST_GROWTH = 1000.0  # characters that a normalizer or decoder may make of one
FORM_GROWTH = 18.0  # of Unicode's forms NFKC and NFKD, by U+FDFA
TRIAL_SECONDS = 10.0  # of a core
TRIAL_MEMORY = 8 << 30  # bytes of address space
TRIAL_LENGTH = 1000  # characters of each text of the trial
TRIAL_TEXTS = 200  # at most


def check_bounds(spec: dict[str, Any], file: Path) -> None:
    """Raises ConfigError for a tokenizer.json that makes a text too long, or splits it too
    slowly."""
    for stage in ("normalizer", "decoder"):
        growth = _growth(spec.get(stage))
        if growth > MOST_GROWTH:
            raise ConfigError(
                f"{file}: its {stage} can make {growth:.3g} characters of one, and at most"
                f" {MOST_GROWTH:g} are allowed: take another tokenizer."
            )
    trusted = {ANY_CHARACTER, *(pattern.words for pattern in WORD_PATTERNS.values())}
    patterns = [*dict.fromkeys(_patterns([spec.get("normalizer"), spec.get("pre_tokenizer")]))]
    untrusted = [pattern for pattern in patterns if pattern not in trusted]
    if untrusted:
        _try(untrusted, file)


def _growth(step: Any) -> float:
    """How many characters a normalizer or a decoder may make of one."""
    if not isinstance(step, dict):
        return 1.0
    inner = step.get("normalizers") or step.get("decoders")
    if isinstance(inner, list):
        return math.prod(map(_growth, inner))
    if step.get("type") in ("NFKC", "NFKD"):
        return FORM_GROWTH
    if step.get("type") == "Precompiled":  # maps of SentencePiece, which hold NFKC
        return FORM_GROWTH + 1
    if step.get("type") != "Replace":
        return 4.0 if step.get("type") in ("NFD", "ByteLevel") else 1.0
    pattern, content = step.get("pattern"), step.get("content")
    size = len(content) if isinstance(content, str) else 0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return max(1.0, size / len(literal))
    return 1.0 + size  # a regular expression may match between any two characters


def _patterns(spec: Any) -> Iterator[str]:
    """The regular expressions in an object or list of a tokenizer.json."""
    values = spec.items() if isinstance(spec, dict) else enumerate(spec)
    for key, value in values:
        if key == "Regex" and isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            yield from _patterns(value)


def _try(patterns: list[str], file: Path) -> None:
    """Splits texts on which a careless pattern takes long: repetitions of the characters that it
    names, and of others. Raises ConfigError where that takes too long or fails."""
    characters = {char for pattern in patterns for char in re.sub(r"\\.", "", pattern)}
    units = ["a", "A", "1", " ", "\n", "\t", ".", "é", "中", "\u0301", "a ", "a1", " \n"]
    units += characters
    texts = [unit * (TRIAL_LENGTH // len(unit)) + end for unit in units for end in ("", "\0")]
    try:
        TRIAL.ask({"file": str(file), "texts": texts[:TRIAL_TEXTS]})
    except OutOfBounds as error:
        raise ConfigError(
            f"{file}: splitting texts of {TRIAL_LENGTH:,} characters {error}; its patterns are"
            f" {', '.join(map(repr, patterns))[:300]}. Take another tokenizer."
        ) from None
    finally:
        TRIAL.close()


def encode_texts(question: dict[str, Any]) -> None:
    """Encodes the `texts` of a question with the tokenizer.json `file`, in the process of `TRIAL`.
    Raises RuntimeError where the library panics."""
    backend = tokenizers.Tokenizer.from_file(question["file"])
    backend.no_truncation()
    for text in question["texts"]:
        try:
            without_panic(backend.encode, text, add_special_tokens=False)
        except RuntimeError:
            raise
        except Exception:  # such as an unknown character
            pass


TRIAL = BoundedProcess("jaxformer.tokenizer.bounds", "encode_texts", TRIAL_SECONDS, TRIAL_MEMORY)
