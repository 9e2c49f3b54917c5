"""Bounds on an untrusted tokenizer.json: it must neither make a text many times longer, nor take
more than a moment to split a short one."""

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

MOST_GROWTH = 1000  # characters that the replacements of a stage may make of one
TRIAL_SECONDS = 10.0  # of a core
TRIAL_MEMORY = 8 << 30  # bytes of address space
TRIAL_LENGTH = 1000  # characters of each text of the trial
TRIAL_TEXTS = 200  # at most


def check_bounds(spec: dict[str, Any], file: Path) -> None:
    """Raises ConfigError for a tokenizer.json that makes a text too long, or splits it too
    slowly."""
    for stage in ("normalizer", "decoder"):
        # The content of each Replace may stand in place of one character.
        growth = math.prod(max(1, len(text)) for text in _values(spec.get(stage), "content"))
        if growth > MOST_GROWTH:
            raise ConfigError(
                f"{file}: its {stage} can make {growth:.3g} characters of one, and at most"
                f" {MOST_GROWTH:,} are allowed: take another tokenizer."
            )
    trusted = {ANY_CHARACTER, *(pattern.words for pattern in WORD_PATTERNS.values())}
    stages = [spec.get("normalizer"), spec.get("pre_tokenizer")]
    patterns = [pattern for pattern in _values(stages, "Regex") if pattern not in trusted]
    if not patterns:
        return
    # Texts on which a careless pattern takes long: repetitions of the characters that it names, and
    # of others. The tokenizers library gives up a match after ten million steps, with a panic, but
    # a text has as many matches as characters.
    units = ["a", "A", "1", " ", "\n", "\t", ".", "é", "中", "\u0301", "a ", "a1", " \n"]
    units += {char for pattern in patterns for char in re.sub(r"\\.", "", pattern)}
    texts = [unit * (TRIAL_LENGTH // len(unit)) + end for unit in units for end in ("", "\0")]
    trial = BoundedProcess(__name__, "encode_texts", TRIAL_SECONDS, TRIAL_MEMORY)
    try:
        trial.ask({"file": str(file), "texts": texts[:TRIAL_TEXTS]})
    except OutOfBounds as error:
        raise ConfigError(
            f"{file}: splitting texts of {TRIAL_LENGTH:,} characters {error}; its patterns are"
            f" {', '.join(map(repr, patterns))[:300]}. Take another tokenizer."
        ) from None
    finally:
        trial.close()


def _values(spec: Any, name: str) -> Iterator[str]:
    """The texts of this name in an object or list of a tokenizer.json."""
    if isinstance(spec, list):
        for value in spec:
            yield from _values(value, name)
    elif isinstance(spec, dict):
        for key, value in spec.items():
            if key == name and isinstance(value, str):
                yield value
            yield from _values(value, name)


def encode_texts(question: dict[str, Any]) -> None:
    """Encodes the `texts` of a question with the tokenizer.json `file`, in the process of a trial.
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
