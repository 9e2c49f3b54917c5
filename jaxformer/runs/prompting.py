"""What a model reads of a prompt, how it writes after it, and the text of its tokens."""

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from jaxformer.config.run import RunConfig, RunSettings
from jaxformer.data.templates import ClassTemplate, TagTemplate, Template
from jaxformer.files import ConfigError
from jaxformer.generation.sampling import FILTERS, Sampling
from jaxformer.models.transformer import context_of
from jaxformer.runs.loading import Loaded, Reading, load
from jaxformer.runs.model_files import ModelFiles, writing_rules
from jaxformer.runs.objectives import row_format
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Message
from jaxformer.tokenizer.metadata import ROLES, TOKENIZER_FILE, missing
from jaxformer.training.compiler_options import keep_compiled


@dataclass(frozen=True, kw_only=True)
class Model(Loaded):
    """A model with all that a command needs to read a prompt: the settings of its `run`, and in
    `stops` token ids that end a text in addition to those of the tokenizer."""

    tokenizer: Tokenizer
    run: RunConfig
    stops: tuple[int, ...] = ()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*self.tokenizer.end_tokens, *self.stops]))

    def before_end(self, tokens: Iterable[int]) -> list[int]:
        """Return the tokens before the first end token."""
        end_tokens = self.end_tokens
        return list(itertools.takewhile(lambda token: token not in end_tokens, tokens))

    def writing_rules(self) -> dict[str, Any]:
        """Return the rules on the texts that it writes, as keywords of `jf.generate`."""
        return writing_rules(self.tokenizer) | {"end_token": self.end_tokens}

    def text_after(self, start: Sequence[int], made: Iterable[int]) -> str:
        """Return the text that new tokens add to that of `start`, before the first end token.

        They are decoded together and then cut: SentencePiece drops the space that begins a text, so
        that the new tokens by themselves would lose the one behind the prompt."""
        text = text_of(self.tokenizer, [*start, *self.before_end(made)])
        return text[len(text_of(self.tokenizer, start)) :]

    def context(self, source: bool = False) -> int:
        """Return the largest number of tokens that it reads, or of tokens of a source."""
        return context_of(self.params, self.config, source)


def open_model(
    path: Path, step: int | None = None, pair: str = "", **reading: Unpack[Reading]
) -> Model:
    """Return the model of a directory, with its tokenizer. Only an encoder reads the `pair` of a
    prompt."""
    # The second prompt for a model starts without compiling.
    keep_compiled(RunSettings().compilation_cache)
    files = ModelFiles(path)
    loaded = load(files, step, **reading)
    config = loaded.config
    if pair and config.family != "encoder":
        raise ConfigError(
            f"--pair needs an encoder, but {path} has model.family={config.family!r}."
        )
    if loaded.tokenizer is None:
        raise missing(files.path / TOKENIZER_FILE)
    # A model without names of its classes numbers them.
    labels = loaded.labels or tuple(f"class {index}" for index in range(config.head.n_classes))
    return Model(**vars(loaded) | {"labels": labels}, run=files.run)


def drawing_rules(
    tokenizer: Tokenizer, commanded: Mapping[str, Any], chat: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how a token is drawn where this is not commanded: what the generation_config.json of
    a model states, and the defaults where it states nothing. A value that cannot be is refused by
    name."""
    stored = tokenizer.metadata.rules
    file = tokenizer.metadata.rules_file
    stated = {}
    for name in FILTERS:
        if name not in stored or name in commanded:
            continue
        values = Sampling.values[name]
        if not values.allowed(stored[name]):
            raise ConfigError(
                f"{file}: {name} is {str(stored[name])[:80]}, and must be {values.words}:"
                f" correct it, or state --{name}."
            )
        stated[name] = stored[name]
    if "temperature" not in commanded:
        draws = stored.get("do_sample")
        if not isinstance(draws, bool | None):
            raise ConfigError(
                f"{file}: do_sample is {str(draws)[:80]}, and must be true or false: correct it,"
                " or state --temperature."
            )
        if draws is False and not {*FILTERS} & {*commanded}:
            stated["temperature"] = 0.0
        elif draws or stated:
            # As in transformers, where a file that says how to draw states no temperature.
            stated.setdefault("temperature", 1.0)
    # Temperature 1 without a filter writes nonsense of a small model. A model with a chat template
    # was tuned to answer, and its likeliest answer is the safest.
    defaults = {"temperature": 0.7}
    if not {*FILTERS[1:]} & {*commanded, *stated}:
        defaults["min_p"] = 0.05
        if chat:
            defaults["temperature"] = 0.0
    return stated, defaults


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a prompt, in which [MASK] and <extra_id_0> and so on stand for these
    special tokens if the tokenizer has them.

    Where tokens include the space before a word, a masked word includes its space as well.
    """
    special = {f"<extra_id_{index}>": token for index, token in enumerate(tokenizer.sentinels())}
    mask = tokenizer.special("mask")
    if mask is not None:
        special |= dict.fromkeys(ROLES["mask"], mask)
    if not any(name in text for name in special):
        return tokenizer.encode(text)
    token_texts = map(tokenizer.shown, tokenizer.ordinary().tolist())
    # As " the" of GPT-2 and its relatives: " [MASK]" then stands for a word with its space.
    has_spaces = any(len(token) > 1 and token[0] == " " for token in token_texts)
    names = "|".join(map(re.escape, special))
    pattern = f" ?({names})" if has_spaces else f"({names})"
    tokens: list[int] = []
    for piece in re.split(pattern, text):
        tokens += [special[piece]] if piece in special else tokenizer.encode(piece)
    return tokens


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens as `Tokenizer.decode` gives it, but with the names of sentinels,
    which say where each span of text belongs."""
    sentinels = {*tokenizer.sentinels()}
    texts: list[str] = []
    for are_sentinels, group in itertools.groupby(tokens, sentinels.__contains__):
        span = list(group)
        texts += map(tokenizer.shown, span) if are_sentinels else [tokenizer.decode(span)]
    return "".join(texts)


def start_of(model: Model, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens that a model continues, and the source that an encoder-decoder reads (empty
    for a decoder)."""
    tokenizer = model.tokenizer
    ids = tokens_of(tokenizer, text)
    if model.config.family == "encoder_decoder":
        return tokenizer.as_target([]), tokenizer.as_source(ids)
    return tokenizer.as_prompt(ids), []


def turn_of(model: Model, messages: Sequence[Message]) -> tuple[Model, list[int]]:
    """Return the model that ends its text where the chat template of its tokenizer ends a turn, and
    the tokens that it continues to answer the messages."""
    template = ChatTemplate.of(model.tokenizer, today=True)
    start = template.encode_prompt(messages)
    end = template.end_of_turn(messages)
    if end is None:
        return model, start
    return replace(model, stops=(end,)), start


def row_of(model: Model, text: str, pair: str = "") -> dict[str, np.ndarray]:
    """Return the row of one text or two as in training: tokens [T] between [CLS] and [SEP], and
    token_types [T] if the model has them."""
    texts = [text, pair] if pair else [text]
    # [0] below is the class, which the template wants and nothing reads.
    ids = [tokens_of(model.tokenizer, each) for each in texts]
    template = ClassTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    return _row(template, [*ids, [0]])


def words_of(model: Model, text: str) -> tuple[list[str], list[int], dict[str, np.ndarray]]:
    """Return the words of a text; the indices of those that the tokenizer makes tokens of (of
    U+200B it may make none); and their row, in which weights [T] are 1 on the first token of each
    of these.
    """
    words = text.split()
    template = TagTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    numbers = tuple(map(str, range(len(words))))  # as tags, so that each word has its own
    (example,) = template.encode([(tuple(words), numbers)], {})  # token ids, and tags
    encoded_words = [number for number in example[1] if number >= 0]
    return words, encoded_words, _row(template, list(example))


def _row(template: Template, example: list[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the row of one encoded example, whose first sequence are the tokens of its text."""
    lengths = np.array([[len(sequence) for sequence in example]])
    size = int(template.sizes(lengths)[0, 0])
    check_size(size if len(example[0]) else 0, template.length, "into a row of its training")
    return template.arrays(*(np.asarray(sequence, np.int32) for sequence in example))


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank."""
    is_terminal = sys.stdin.isatty()
    any_line = False
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not UTF-8 ({error}): convert it.") from None
        if not line:
            break
        if line.strip():
            any_line = True
            yield line.rstrip("\r\n")
    if not any_line and not is_terminal:
        raise ConfigError("standard input has no line of text: type one, or give --prompt.")


def check_size(size: int, limit: int, where: str) -> None:
    """Raise ConfigError for a prompt of no tokens, or of more than `limit`, which fit `where`."""
    if not size:
        raise ConfigError("the prompt is empty: give --prompt some text.")
    if size > limit:
        raise ConfigError(f"the prompt is {size} tokens, but only {limit} fit {where}: shorten it.")
