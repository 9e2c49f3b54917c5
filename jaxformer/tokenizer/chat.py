"""Chat templates: a conversation as the text that a model reads, its token ids, and which of them
the assistant wrote.

A template is a text in Jinja, as the tokenizers of Hugging Face models have it:
chat_template.jinja, or chat_template in tokenizer_config.json.
"""

import copy
import datetime
import functools
import hashlib
import importlib.metadata
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.cluster.bounded import BoundedProcess, OutOfBounds
from jaxformer.files import ConfigError, read_text
from jaxformer.tokenizer.chat_files import special_names, template_of
from jaxformer.tokenizer.messages import ASSISTANT, Message, checked_messages, require_assistant
from jaxformer.tokenizer.pieces import without_panic
from jaxformer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# A text, and the places of characters in it: (of the first, after the last).
Span = tuple[int, int]
Marked = tuple[str, list[Span]]
# How many of the first messages are rendered, and whether with the beginning of an answer.
Cut = tuple[int, bool]

# A change in how conversations become ids takes a new number, so that no older cache is read.
FORMAT_OF_CHATS = 1

# The day that strftime_now shows in training data, so that tokens do not depend on when they were
# made; it is the one that Llama 3's template names where there is no clock.
TRAINING_DAY = datetime.datetime(2024, 7, 26)

OLDEST_JINJA = (3, 1, 6)

GENERATION = "{% generation %} ... {% endgeneration %}"
ANOTHER_TEMPLATE = "correct it, or set tokenizer.chat_template to another one"
PROBE = "\u2042probe\u2042"  # a text that no template writes by itself
CUTS_AT_ONCE = 64  # which have the time of one question together

# It stays for all templates of this process.
RENDERER = BoundedProcess("jaxformer.tokenizer.chat_environment", "answer")


class UnboundedTemplate(ConfigError):
    """A template takes longer or more memory than it may."""


class ChatTemplate:
    """The chat template of a tokenizer. It is rendered in a process of its own, since a template
    may take longer, or more memory, than anybody has; then `UnboundedTemplate` is raised.

    Names of special tokens are these tokens wherever they are in the rendered text, as in
    transformers; nothing is put before or after it, since templates write <s> and so on themselves.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, where: str, today: bool = False) -> None:
        """`where` names the template in messages; `today`: strftime_now shows the present, and not
        `TRAINING_DAY`. Raises ConfigError for a text that is no template, and without jinja2."""
        _require_jinja(where)
        self.text, self.tokenizer, self.where = text, tokenizer, where
        # Marks that no text holds by chance: noncharacters of Unicode around random digits.
        digits = secrets.token_hex(8)
        self._marks = (f"\ufdd0{digits}\ufdd0", f"\ufdd1{digits}\ufdd1")
        self._day = None if today else TRAINING_DAY.isoformat()
        answer = self._ask("where it is compiled")
        if "wrong" in answer:
            line = f"line {answer['line']}: " if answer["line"] else ""
            raise ConfigError(
                f"{where} is no template of Jinja ({line}{answer['wrong']}): {ANOTHER_TEMPLATE}."
            )
        self.has_blocks: bool = answer["blocks"]
        self._names = special_names(tokenizer)

    @classmethod
    def of(cls, tokenizer: Tokenizer, today: bool = False) -> "ChatTemplate":
        """The template that a tokenizer was read with, or was given by `set_chat_template`. Raises
        ConfigError where it has none."""
        text, where = template_of(tokenizer)
        return cls(text, tokenizer, where, today)

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and which of them are learned: those of the assistant's turns.

        With generation blocks these are the tokens inside of them. Otherwise a turn is what the
        template adds to the prompt for it, up to the special token that ends it. A token that also
        holds text from outside of a turn is not learned. Raises ConfigError for messages that are
        none, that the template refuses or whose turns cannot be told.
        """
        return self.encode_marked([self.marked(messages)])[0]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids after which the assistant writes its answer to a conversation."""
        text = self.render(checked_messages(messages), True)
        return [int(token) for token in self.tokenizer.encoder.rows([text], True)[0]]

    def encode_marked(self, several: Sequence[Marked]) -> list[tuple[list[int], list[bool]]]:
        """What `encode` gives for each text of `marked`, computed on all cores."""
        texts = [text for text, _ in several]
        try:
            encodings = without_panic(self._aligned.encode_batch, texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise self.tokenizer.encoder.unencodable(texts, error) from None
        return [
            (encoding.ids, _inside(encoding.offsets, spans))
            for encoding, (_, spans) in zip(encodings, several, strict=True)
        ]

    def marked(self, messages: Sequence[Message]) -> Marked:
        """The text of a conversation, and the places in it of what is learned. Raises ConfigError
        as `encode` does."""
        checked = checked_messages(messages)
        require_assistant(checked)
        cuts = [(len(checked), False), *(() if self.has_blocks else _cuts_by_turn(checked))]
        texts = self._texts(checked, cuts)
        text, spans = self._without_marks(next(texts))
        if not self.has_blocks:
            spans = self._turns(checked, text, texts)
        if not spans:
            raise ConfigError(
                f"{self.where} writes nothing of the assistant's turns inside of {GENERATION}, so"
                " there is nothing to learn: put these blocks around its content"
            )
        return text, spans

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of messages, with the beginning of an answer if `add_generation_prompt`. Raises
        ConfigError for what the template refuses."""
        text = next(self._texts(messages, [(len(messages), add_generation_prompt)]))
        return self._without_marks(text)[0]

    def end_of_turn(self, messages: Sequence[Message]) -> int | None:
        """The special token with which the template ends an answer to `messages`; None where it
        writes no special token after its content."""
        text = self.render([*messages, {"role": ASSISTANT, "content": PROBE}])
        after = text.rpartition(PROBE)[2].lstrip()
        name = next((name for name in self._added if after.startswith(name)), None)
        return None if name is None else self._added[name]

    def learns_end(self) -> bool:
        """Whether what is learned of an answer ends with a special token after its content. True
        also where the template refuses the conversation by which this is found."""
        messages = [{"role": role, "content": PROBE} for role in ("user", ASSISTANT)]
        try:
            text, spans = self.marked(messages)
        except ConfigError:
            return True
        after = "".join(text[begin:end] for begin, end in spans).rpartition(PROBE)[2]
        return any(name in after for name in self._added)

    def unlearned_end(self) -> str:
        """The warning where `learns_end` is false: what follows, and the remedy."""
        return (
            f"{self.where} writes no special token inside of what is learned of an answer, as where"
            " the marker of the next role ends a turn: the model does not learn to end its answers,"
            " and sample --chat writes on. In a copy of the template that tokenizer.chat_template"
            f" names, put the token that ends an answer after its content, inside of {GENERATION}."
        )

    def fingerprint(self) -> str:
        """A digest that is the same for templates that give the same ids of a tokenizer."""
        return _digest(self.text, self._names)

    def _texts(self, messages: Sequence[Message], cuts: Sequence[Cut]) -> Iterator[str]:
        """What the template writes for each cut of messages, marks included. Raises ConfigError at
        the first that it refuses."""
        when = f"where {len(messages)} messages are rendered"
        for first in range(0, len(cuts), CUTS_AT_ONCE):
            asked = cuts[first : first + CUTS_AT_ONCE]
            more = {"messages": [*messages], "names": self._names, "cuts": asked}
            answer = self._ask(when, more)
            yield from answer["texts"]
            if answer["refused"] is not None:
                raise ConfigError(f"{self.where} refuses the messages: {answer['refused']}")

    def _ask(self, when: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """An answer of `chat_environment`. Raises UnboundedTemplate where there is none, and
        ConfigError for messages that are not of JSON."""
        question = {"text": self.text, "marks": self._marks, "day": self._day, **(more or {})}
        try:
            return RENDERER.ask(question)  # type: ignore[no-any-return]
        except OutOfBounds as error:
            raise UnboundedTemplate(f"{self.where} {error}, {when}: {ANOTHER_TEMPLATE}.") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the messages hold a value that JSON has not ({error}): give texts, numbers, lists"
                " and objects"
            ) from None

    def _without_marks(self, found: str) -> Marked:
        """A text, and the places in it of generation blocks that hold some text."""
        text, begins, spans = "", list[int](), list[Span]()
        for part in re.split("|".join(f"({mark})" for mark in self._marks), found):
            if part == self._marks[0]:
                begins.append(len(text))
            elif part == self._marks[1]:
                if begins and len(text) > (begin := begins.pop()):
                    spans.append((begin, len(text)))
            else:
                text += part or ""
        return text, spans

    def _turns(self, messages: list[Message], whole: str, texts: Iterator[str]) -> list[Span]:
        """The places of the assistant's turns in the text of all messages, each after the prompt
        for it, to the special token that ends it. `texts` are those of `_cuts_by_turn`. Raises
        ConfigError where the text of the first messages is no beginning of the whole."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            last = index == len(messages) - 1
            try:
                prompt = next(texts)
                turn = whole if last else next(texts)
            except ConfigError as error:
                raise ConfigError(
                    f"{error} (these are the first {index} or {index + 1} of {len(messages)}, by"
                    f" which a turn is found). {self._remedy()}"
                ) from None
            if not (turn.startswith(prompt) and whole.startswith(turn)):
                part = f"the first {index + 1} messages"
                if not turn.startswith(prompt):
                    part = f"the prompt for message {index + 1}"
                raise ConfigError(
                    f"{self.where} renders {part} otherwise than at the beginning of what follows,"
                    f" so that the turns of the assistant cannot be told. {self._remedy()}"
                )
            content = turn[len(prompt) :].rstrip()
            ended = content.endswith(tuple(self._added))
            spans.append((len(prompt), len(prompt) + len(content) if ended else len(turn)))
        return [(begin, end) for begin, end in spans if end > begin]

    @staticmethod
    def _remedy() -> str:
        return (
            f"Put {GENERATION} around what the assistant writes, in a copy of the template that"
            " tokenizer.chat_template names"
        )

    @functools.cached_property
    def _added(self) -> dict[str, int]:
        """The tokens that the tokenizer reads as a whole, the longest first."""
        added = self.tokenizer.encoder.spec()["added_tokens"]
        return {
            entry["content"]: entry["id"]
            for entry in sorted(added, key=lambda entry: -len(entry["content"]))
        }

    @functools.cached_property
    def _aligned(self) -> "tokenizers.Tokenizer":
        """The tokenizer that reads names of special tokens, and whose offsets are those of whole
        tokens: its last step may cut off spaces from them."""
        backend = copy.deepcopy(self.tokenizer.encoder.marking)
        backend.post_processor = None  # type: ignore[assignment]
        return backend


def _cuts_by_turn(messages: Sequence[Message]) -> Iterator[Cut]:
    """Of each turn of the assistant the prompt for it and, unless it is the last message, the
    messages to its end."""
    for index, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            yield index, True
            if index < len(messages) - 1:
                yield index + 1, False


def set_chat_template(tokenizer: Tokenizer, path: str | Path) -> None:
    """Gives a tokenizer the template of a file, in place of its own; it is saved with it. Raises
    ConfigError for a file that is missing or no template."""
    file = Path(path).expanduser()
    text = read_text(file, "set tokenizer.chat_template to a file of Jinja, or leave it empty")
    name = f"tokenizer.chat_template={path}"
    ChatTemplate(text, tokenizer, name)
    settings = {k: v for k, v in tokenizer.metadata.settings.items() if k != "chat_template"}
    tokenizer.metadata = replace(
        tokenizer.metadata, settings=settings, template=text, template_name=name
    )


def template_fingerprint(tokenizer: Tokenizer) -> str:
    """`ChatTemplate.fingerprint` of the template of a tokenizer, empty where it has none."""
    try:
        text, _ = template_of(tokenizer)
    except ConfigError:
        return ""
    return _digest(text, special_names(tokenizer))


def _digest(text: str, names: dict[str, str]) -> str:
    parts = json.dumps([FORMAT_OF_CHATS, text, names])
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def _require_jinja(where: str) -> None:
    """Raises ConfigError where jinja2 is missing, or is of a version from which a template can get
    out of its sandbox."""
    try:
        found = importlib.metadata.version("jinja2")
        import jinja2  # noqa: F401  (its metadata may be there without it)
    except ImportError:
        found = ""
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < OLDEST_JINJA:
        told = f"is {found}" if found else "is not installed"
        oldest = ".".join(map(str, OLDEST_JINJA))
        raise ConfigError(
            f"{where} needs jinja2 {oldest} or newer, which {told}: pip install 'jaxformer[chat]'."
        )


def _inside(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens lie within one of the spans, by the places of their first character and after
    their last."""
    learned = np.zeros(len(offsets), bool)
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    for begin, end in spans:
        learned |= (begins >= begin) & (begins < end) & (ends <= end)
    return [bool(value) for value in learned]
