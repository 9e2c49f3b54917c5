"""Prompts of the commands: what a model reads of a text, what it writes, and the text of its
tokens."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.cli.arguments import ModelArguments
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import ROLES, without_tokenizer

if TYPE_CHECKING:
    from jaxformer.data.templates import Template


@dataclass(frozen=True)
class Model:
    """A model with all that a command needs to read a prompt. `stops` are ids that end a text
    beside those of the tokenizer."""

    path: Path
    params: dict[str, Any]
    config: ModelConfig
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    run: RunConfig
    stops: tuple[int, ...] = ()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*self.tokenizer.end_tokens, *self.stops]))

    def writing_rules(self) -> dict[str, Any]:
        """What the texts that it writes may hold, as keywords of `jf.generate`."""
        from jaxformer.runs.stated import writing_rules

        return writing_rules(self.tokenizer) | {"end_token": self.end_tokens}

    def context(self, source: bool = False) -> int:
        """How many tokens it reads at most, or tokens of a source."""
        from jaxformer.generation.prompts import context_of

        return context_of(self.params, self.config, source)


def open_model(asked: ModelArguments, pair: str) -> Model:
    """The model that a command names. Raises ConfigError where it has no tokenizer, or cannot read
    a second text `pair`."""
    from jaxformer.runs.loading import load, run_of

    path, found = asked.path, load(asked.path, asked.step, quantize=asked.quantize)
    if found.tokenizer is None:
        raise without_tokenizer(path)
    if pair and found.config.family != "encoder":
        raise ConfigError(
            f"--pair needs an encoder, but {path} has model.family={found.config.family!r}."
        )
    labels = found.labels or tuple(f"class {index}" for index in range(found.config.n_classes))
    return Model(path, found.params, found.config, found.tokenizer, labels, run_of(path))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a prompt, in which [MASK] and <extra_id_0> and so on stand for these special
    tokens if the tokenizer has them.

    Where tokens include the space before a word, a masked word includes its space as well.
    """
    special = {f"<extra_id_{index}>": token for index, token in enumerate(tokenizer.sentinels())}
    if (mask := tokenizer.special("mask")) is not None:
        special |= dict.fromkeys(ROLES["mask"], mask)
    if not any(name in text for name in special):
        return tokenizer.encode(text)
    shown = map(tokenizer.shown, tokenizer.ordinary().tolist())
    spaced = any(len(token) > 1 and token[0] == " " for token in shown)
    names = "|".join(map(re.escape, special))
    tokens: list[int] = []
    for part in re.split(f"{' ?' * spaced}({names})", text):
        tokens += [special[part]] if part in special else tokenizer.encode(part)
    return tokens


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens as `Tokenizer.decode` gives it, but with the names of sentinels, which
    tell where each part belongs."""
    sentinels = {*tokenizer.sentinels()}
    runs = ((marks, list(run)) for marks, run in itertools.groupby(tokens, sentinels.__contains__))
    return "".join(
        "".join(map(tokenizer.shown, run)) if marks else tokenizer.decode(run)
        for marks, run in runs
    )


def start_of(model: Model, text: str) -> tuple[list[int], list[int]]:
    """The tokens that a model continues, and the source that an encoder-decoder reads (empty for a
    decoder)."""
    tokenizer, ids = model.tokenizer, tokens_of(model.tokenizer, text)
    if model.config.family == "encoder_decoder":
        return tokenizer.as_target([]), tokenizer.as_source(ids)
    return tokenizer.as_prompt(ids), []


def written(
    model: Model, start: list[int], source: list[int], count: int, beams: int, **rules: Any
) -> Iterator[list[int]]:
    """At most `count` new tokens as they are made; `rules` are those of the beam search, or of
    sampling if `beams` is 0."""
    from jaxformer.generation.beam import beam_search
    from jaxformer.generation.decode import stream_tokens

    rules |= model.writing_rules()
    if source:
        rules["source"] = [source]
    if beams:
        found = beam_search(
            model.params, model.config, [start], count, beams=beams, keep=1, **rules
        )
        yield np.asarray(found.tokens[0, 0]).tolist()
        return
    for piece in stream_tokens(model.params, model.config, [start], count, **rules):
        yield piece[0].tolist()


def row_of(model: Model, text: str, pair: str = "") -> dict[str, np.ndarray]:
    """The row of one text or two as in training: tokens [T] between [CLS] and [SEP], and
    token_types [T] if the model has them."""
    from jaxformer.data.label_templates import ClassTemplate
    from jaxformer.runs.objectives import row_format

    ids = [tokens_of(model.tokenizer, part) for part in (text, *([pair] if pair else []))]
    template = ClassTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    return _row(template, [*ids, [0]])


def words_of(model: Model, text: str) -> tuple[list[str], list[int], dict[str, np.ndarray]]:
    """The words of a text, the indices of those of which the tokenizer makes tokens (of U+200B it
    may make none), and their row, in which weights [T] are 1 on the first token of each of these.
    """
    from jaxformer.data.label_templates import TagTemplate
    from jaxformer.runs.objectives import row_format

    words = text.split()
    template = TagTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    numbers = tuple(map(str, range(len(words))))  # as tags, so that each word has its own
    (parts,) = template.encode([(tuple(words), numbers)], {})
    return words, [number for number in parts[1] if number >= 0], _row(template, list(parts))


def _row(template: "Template", parts: list[Sequence[int]]) -> dict[str, np.ndarray]:
    size = int(template.sizes(np.array([[len(part) for part in parts]]))[0, 0])
    check_size(size if len(parts[0]) else 0, template.length, "into a row of its training")
    return template.arrays(*(np.asarray(part, np.int32) for part in parts))


def check_size(size: int, most: int, where: str) -> None:
    """Raises ConfigError for a prompt of no tokens, or of more than fit."""
    if not size:
        raise ConfigError("the prompt is empty: give --prompt some text.")
    if size > most:
        raise ConfigError(f"the prompt is {size} tokens, but only {most} fit {where}: shorten it.")
