"""What a prompt is to a model: its tokens, with names of special tokens for those that it knows,
and its text again."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.files import ROLES, without_tokenizer

if TYPE_CHECKING:
    from jaxformer.data.templates import Template


@dataclass(frozen=True)
class Model:
    """A model, as commands that take a prompt read it."""

    params: dict[str, Any]
    config: ModelConfig
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    run: RunConfig


def open_run(path: Path, step: int | None) -> Model:
    """The model of a run or of a Hugging Face directory, with its tokenizer. Raises ConfigError
    where there is none."""
    from jaxformer.loading import load, run_of

    model = load(path, step)
    if model.tokenizer is None:
        raise without_tokenizer(path)
    labels = model.labels or tuple(f"class {index}" for index in range(model.config.n_classes))
    return Model(model.params, model.config, model.tokenizer, labels, run_of(path))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a prompt, in which [MASK] and <extra_id_0> and so on stand for these tokens if
    the tokenizer has them.

    Where tokens hold the space before a word, a hidden one hides that as well.
    """
    special = {f"<extra_id_{index}>": token for index, token in enumerate(tokenizer.sentinels())}
    if (mask := tokenizer.special("mask")) is not None:
        special |= dict.fromkeys(ROLES["mask"], mask)
    if not any(name in text for name in special):
        return tokenizer.encode(text)
    spaced = any(
        len(token) > 1 and token[0] == " "
        for token in map(tokenizer.shown, tokenizer.ordinary().tolist())
    )
    parts = re.split(f"{' ?' * spaced}({'|'.join(map(re.escape, special))})", text)
    return [
        token
        for part in parts
        for token in ([special[part]] if part in special else tokenizer.encode(part))
    ]


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, as `Tokenizer.decode` has it, with the names of sentinels, which tell
    what belongs where."""
    sentinels = {*tokenizer.sentinels()}
    runs = ((marks, list(run)) for marks, run in itertools.groupby(tokens, sentinels.__contains__))
    return "".join(
        "".join(map(tokenizer.shown, run)) if marks else tokenizer.decode(run)
        for marks, run in runs
    )


def source_of(model: Model, text: str) -> list[int]:
    """The tokens of a source, as an encoder-decoder was trained to read them."""
    return model.tokenizer.as_source(tokens_of(model.tokenizer, text))


def prompt_of(model: Model, text: str) -> list[int]:
    """The tokens of a text that a decoder is to write on."""
    return model.tokenizer.as_prompt(tokens_of(model.tokenizer, text))


def row_of(model: Model, text: str, pair: str = "") -> dict[str, np.ndarray]:
    """The row of one text or two as it was in training: tokens [T] between [CLS] and [SEP],
    token_types where it has any."""
    from jaxformer.data.templates import ClassTemplate
    from jaxformer.objectives import row_format

    ids = [tokens_of(model.tokenizer, part) for part in (text, *([pair] if pair else []))]
    template = ClassTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    return _fitted(template, [*ids, [0]])


def words_of(model: Model, text: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """The words of a text, and their row, in which weights [T] are 1 on the first piece of each."""
    from jaxformer.data.templates import TagTemplate
    from jaxformer.objectives import row_format

    words = text.split()
    template = TagTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    (parts,) = template.encode([(tuple(words), ("",) * len(words))], {})
    return words, _fitted(template, list(parts))


def _fitted(template: "Template", parts: list[Sequence[int]]) -> dict[str, np.ndarray]:
    size = int(template.sizes(np.array([[len(part) for part in parts]]))[0, 0])
    if len(parts[0]) == 0:
        raise ConfigError("the prompt is empty: give --prompt some text.")
    if size > template.length:
        trained = f"this model was trained on rows of {template.length}"
        raise ConfigError(f"the prompt is {size} tokens, and {trained}: shorten it.")
    return template.arrays(*(np.asarray(part, np.int32) for part in parts))
