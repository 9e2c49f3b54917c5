"""Conversations, which are lists of messages, and chat templates: a conversation as the text that a
model reads, its token ids, and which of them the assistant wrote.

A template is a text in Jinja, as tokenizers of Hugging Face models have it: chat_template.jinja, or
chat_template in tokenizer_config.json.
"""

import contextlib
import copy
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxformer.cluster.bounded import BoundedProcess, OutOfBounds
from jaxformer.files import ConfigError, located, read_text
from jaxformer.tokenizer.metadata import SETTINGS_FILE, TEMPLATE_FILE
from jaxformer.tokenizer.pieces import without_panic
from jaxformer.tokenizer.tokenizer import Tokenizer

Message = dict[str, Any]  # a role, and a content or tool_calls
Span = tuple[int, int]  # the indices of the first character and after the last one
Marked = tuple[str, list[Span]]  # a text, and the spans that are learned

ASSISTANT = "assistant"  # the role whose turns are learned
SHAPE = 'a list of messages as [{"role": "user", "content": "..."}, ...]'
# Keys by which a turn is learned (1, true) or not (0, false): of OpenAI and Mistral, axolotl,
# ms-swift and others; and of torchtune by which it is not. No template reads them.
LEARNED = ("weight", "train", "training", "trainable", "train_on_turn", "loss")
NOT_LEARNED = ("mask", "masked")
OF_LEARNING = re.compile("train|loss|mask|weight")  # in the name of any such key
# What a record or a request has beside its messages for the template, and the key of the first
# message for it.
BESIDE = {key: f"{key} beside the messages" for key in ("tools", "documents")}
# What else a record may have beside its messages for the template.
NOT_RENDERED = ("functions", "chat_template_kwargs")
TEXT_PARTS = (None, "text", "input_text", "output_text")  # types of parts of a content

# To be increased when conversations become other ids, so that no older cache is read.
FORMAT_OF_CHATS = 4

# The day that strftime_now shows in training data, so that tokens do not depend on the date; Llama
# 3's template has it where there is no clock.
TRAINING_DAY = datetime.datetime(2024, 7, 26)

OLDEST_JINJA = (3, 1, 6)

# Classes of tokenizers that have no special tokens but those that the files name.
WITHOUT_DEFAULTS = ("PreTrainedTokenizerFast", "TokenizersBackend")

GENERATION = "{% generation %} ... {% endgeneration %}"
BLOCKS_REMEDY = (
    f"Put {GENERATION} around what the assistant writes, in a copy of the template that"
    " tokenizer.chat_template names"
)
ANOTHER_TEMPLATE = "correct it, or set tokenizer.chat_template to another one"
PROBE = "\u2042probe\u2042"  # a text that no template writes by itself

# One process for all templates of this process.
RENDERER = BoundedProcess("jaxformer.tokenizer.chat_environment", "answer")


def checked_messages(value: Any) -> list[Message]:
    """Return the messages of a conversation, each of which has a role and a text. Keys whose value
    is null are left out, since Parquet and Arrow cannot tell them from missing ones.

    A message with tool_calls may lack its content. Arguments of a call that are JSON, as those of
    OpenAI, become the object, since most templates write them as JSON."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{_shown(value)} is no conversation: give {SHAPE}")
    if not value:
        raise ConfigError(f"the conversation has no messages: give {SHAPE}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f'message {number} has no "role" that is a string, but is {_shown(message)}: give'
                f" {SHAPE}"
            )
        entries = {str(key): entry for key, entry in message.items() if entry is not None}
        if entries.get("tool_calls"):
            entries["tool_calls"] = _calls(entries["tool_calls"], number)
        content = entries.get("content", "" if entries.get("tool_calls") else None)
        if isinstance(content, list):
            texts = []
            for part in content:
                is_text = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS
                if is_text and isinstance(part.get("text"), str):
                    texts.append(part["text"])
            if len(texts) == len(content):
                content = entries["content"] = "".join(texts)
        if not isinstance(content, str):
            raise ConfigError(
                f"message {number} has the content {_shown(content)}: give one string, or a list of"
                ' {"type": "text", "text": "..."}, since only text is read'
            )
        messages.append(entries)
    return messages


def _calls(calls: Any, number: int) -> list[Any]:
    """Return the tool_calls of message `number`, with their arguments as objects."""
    checked = []
    for call in without_nulls(calls) if isinstance(calls, list | tuple) else [calls]:
        # Some records have the function alone.
        function = call
        if isinstance(call, Mapping) and "function" in call:
            function = call["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"message {number} has the tool call {_shown(call)}: give tool_calls as"
                ' [{"type": "function", "function": {"name": "...", "arguments": {...}}}, ...]'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # Text that is no JSON is what a model wrote, and stays.
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if isinstance(arguments, dict):
            function = {**function, "arguments": arguments}
        checked.append({**call, "function": function} if "function" in call else function)
    return checked


def learned_turns(messages: list[Message]) -> list[int]:
    """Return the indices of the assistant's messages that are learned: all but those that a key of
    `LEARNED` or `NOT_LEARNED` excludes. Raises ConfigError where there are none, for other values
    of such a key, and for another key that seems to be one."""
    turns = _turns(messages)
    learned = []
    for index in turns:
        is_learned = True
        for key, value in messages[index].items():
            if key in LEARNED:
                is_wrong = value not in (0, 1)
                is_learned &= bool(value)
            elif key in NOT_LEARNED:
                is_wrong = value not in (0, 1)
                is_learned &= not value
            else:
                is_wrong = bool(value and OF_LEARNING.search(key))
            if is_wrong:
                raise ConfigError(
                    f"message {index + 1} has {key}={_shown(value)}: a turn is learned whole"
                    f' ("weight": 1) or not ("weight": 0); write this in that way'
                )
        if is_learned:
            learned.append(index)
    if not turns:
        roles = ", ".join(repr(message["role"]) for message in messages)
        raise ConfigError(
            f"no message has the role {ASSISTANT!r} (the roles are {roles}), so there is nothing to"
            " learn: only the turns of that role are learned"
        )
    if not learned:
        raise ConfigError(
            f"{', '.join((*LEARNED, *NOT_LEARNED))} exclude all turns of the role {ASSISTANT!r}, so"
            " there is nothing to learn"
        )
    return learned


def _turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]


def rendered_message(message: Message) -> Message:
    """Return a message as a template reads it."""
    left_out = (*LEARNED, *NOT_LEARNED, *BESIDE.values())
    return {key: value for key, value in message.items() if key not in left_out}


def with_beside(message: Message, beside: Mapping[str, Any]) -> Message:
    """Return the first message of a conversation, with the tools and the documents that its record
    or request has `beside` the messages: lists of objects, or their JSON. Raises ConfigError for
    something else."""
    for key in NOT_RENDERED:
        if beside.get(key):
            raise ConfigError(f"{key} beside messages is not read: leave it out")
    for key, name in BESIDE.items():
        entries = beside.get(key)
        if isinstance(entries, str) and entries:
            try:
                entries = json.loads(entries)
            except (ValueError, RecursionError):
                entries = "no JSON"
        if not entries:
            continue
        if not isinstance(entries, list) or not all(isinstance(each, Mapping) for each in entries):
            raise ConfigError(f"{key} beside messages are a list of objects, or its JSON")
        message = {**message, name: without_nulls(entries)}
    return message


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects that are null, which Parquet and Arrow give to
    the objects that lack a key of others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(entry) for entry in value]
    return value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]!r})"


class UnboundedTemplate(ConfigError):
    """A template exceeds its bounds of time or memory."""


class ChatTemplate:
    """The chat template of a tokenizer. It is rendered in a process of its own with bounds of time
    and memory; `UnboundedTemplate` is raised where it exceeds them.

    Names of special tokens are these tokens wherever they are in the rendered text, as in
    transformers; nothing is added before or after it, since templates write <s> and so on
    themselves.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, where: str, today: bool = False) -> None:
        """`where` names the template in messages. With `today`, strftime_now shows the current day
        instead of `TRAINING_DAY`."""
        # Of older versions of jinja2 a template can leave the sandbox.
        try:
            version = importlib.metadata.version("jinja2")
            import jinja2  # noqa: F401  (its metadata may exist without it)
        except ImportError:
            version = ""
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST_JINJA:
            raise ConfigError(
                f"{where} needs jinja2 {'.'.join(map(str, OLDEST_JINJA))} or newer, and here it is"
                f" {version or 'not installed'}: pip install 'jaxformer[chat]'."
            )
        self.text = text
        self.tokenizer = tokenizer
        self.where = where
        # Marks that no text contains by chance: noncharacters of Unicode around random digits.
        digits = secrets.token_hex(8)
        self._marks = (f"\ufdd0{digits}\ufdd0", f"\ufdd1{digits}\ufdd1")
        self._day = None if today else TRAINING_DAY.isoformat()
        answer = self._ask("where it is compiled")
        if "wrong" in answer:
            raise ConfigError(
                f"{where} is no template of Jinja ({answer['wrong']}): {ANOTHER_TEMPLATE}."
            )
        self.has_blocks: bool = answer["blocks"]
        self._names = special_names(tokenizer)

    @classmethod
    def of(cls, tokenizer: Tokenizer, today: bool = False) -> "ChatTemplate":
        """Return the template with which a tokenizer was read, or that `set_chat_template` set."""
        text, where = template_of(tokenizer)
        return cls(text, tokenizer, where, today)

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them are learned: those of the assistant's
        turns.

        With generation blocks these are the tokens inside them. Otherwise a turn is what the
        template adds to the prompt for it, up to the special token that ends it. A token that also
        has text from outside a turn is not learned."""
        return self.encode_marked([self.marked(messages)])[0]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids after which the assistant writes its answer to a conversation."""
        text = self.render(checked_messages(messages), True)
        return [*self.tokenizer.encoder.rows([text], True)[0].tolist()]

    def encode_marked(self, conversations: Sequence[Marked]) -> list[tuple[list[int], list[bool]]]:
        """Return the result of `encode` for each result of `marked`, computed on all cores."""
        texts = [text for text, _ in conversations]
        try:
            encodings = without_panic(self._aligned.encode_batch, texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise self.tokenizer.encoder.unencodable(texts, error) from None
        encoded = []
        for encoding, (_, spans) in zip(encodings, conversations, strict=True):
            # A token is learned where it lies within one of the spans.
            learned = np.zeros(len(encoding.ids), bool)
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            for begin, end in spans:
                learned |= (begins >= begin) & (begins < end) & (ends <= end)
            encoded.append((encoding.ids, [*learned.tolist()]))
        return encoded

    def marked(self, messages: Sequence[Message]) -> Marked:
        """Return the text of a conversation, and the spans of it that are learned."""
        checked = checked_messages(messages)
        turns = learned_turns(checked)
        cuts = [(len(checked), False)]
        if self.has_blocks:
            text, spans = self._without_marks(self._texts(checked, cuts)[0])
            every = _turns(checked)
            # Those of the blocks that are of learned turns, where each turn has one.
            if len(turns) < len(every):
                if len(spans) != len(every):
                    raise ConfigError(
                        "the conversation excludes turns from what is learned, and"
                        f" {self.where} writes {len(spans)} generation blocks for {len(every)}"
                        " turns, so that those of a turn cannot be told: write one block a turn"
                    )
                spans = [spans[every.index(index)] for index in turns]
        else:
            # For each turn the prompt for it, and the messages up to its end.
            for index in turns:
                cuts += [(index, True), (index + 1, False)]
            text, *texts = (self._without_marks(text)[0] for text in self._texts(checked, cuts))
            spans = []
            following = [*texts[2::2], ""]  # the prompt for the next turn
            each = zip(turns, texts[::2], texts[1::2], following, strict=True)
            for index, prompt, turn, next_prompt in each:
                content = None
                if turn.startswith(prompt) and text.startswith(turn):
                    content = turn[len(prompt) :]
                elif turn.startswith(prompt) and text.startswith(prompt):
                    alone = turn[len(prompt) :]
                    after = text[len(prompt) : len(next_prompt)]
                    content = self._shortened(checked[index], alone, after)
                if content is None:
                    raise ConfigError(
                        f"{self.where} renders message {index + 1} otherwise than at the beginning"
                        " of what follows, or its prompt otherwise than before it, so that the"
                        f" turns of the assistant cannot be told. {BLOCKS_REMEDY}"
                    )
                # A template may write a line break behind the token that ends a turn. Generation
                # ends at that token, so there is nothing to learn after it.
                if content.rstrip().endswith(tuple(self._added)):
                    content = content.rstrip()
                if content:
                    spans.append((len(prompt), len(prompt) + len(content)))
        if not spans:
            raise ConfigError(
                f"{self.where} writes nothing of the assistant's turns inside of {GENERATION}, so"
                " there is nothing to learn: put these blocks around its content"
            )
        return text, spans

    def _shortened(self, message: Message, alone: str, after: str) -> str | None:
        """Return a turn that the template writes otherwise at the end of a conversation, `alone`,
        than where others follow, as that of Qwen 3, which then leaves out the thoughts: the part of
        the text `after` its prompt, before the next turn, up to the special token that ends it
        alone. None where that token does not tell the end."""
        end_name = next((name for name in self._added if alone.rstrip().endswith(name)), None)
        if end_name is None or end_name in json.dumps(message, ensure_ascii=False):
            return None
        content, found, _ = after.partition(end_name)
        # Another message would bring the special token that begins it.
        others = [name for name in self._added if name in content and name not in alone]
        if not found or others:
            return None
        return content + found

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of messages, with the beginning of an answer if
        `add_generation_prompt`."""
        text = self._texts(messages, [(len(messages), add_generation_prompt)])[0]
        return self._without_marks(text)[0]

    def end_of_turn(self, messages: Sequence[Message]) -> int | None:
        """Return the special token with which the template ends an answer to `messages`; None where
        no special token follows its content."""
        text = self.render([*messages, {"role": ASSISTANT, "content": PROBE}])
        after = text.rpartition(PROBE)[2].lstrip()
        for name, token in self._added.items():
            if after.startswith(name):
                return token
        return None

    def warnings(self) -> list[str]:
        """Return a warning where the learned text of an answer has no special token after its
        content: the consequence and the remedy; empty where the template refuses the conversation
        for it."""
        messages = [{"role": role, "content": PROBE} for role in ("user", ASSISTANT)]
        try:
            text, spans = self.marked(messages)
        except ConfigError:
            return []
        after = "".join(text[begin:end] for begin, end in spans).rpartition(PROBE)[2]
        if any(name in after for name in self._added):
            return []
        return [
            f"{self.where} writes no special token inside of what is learned of an answer, as where"
            " the marker of the next role ends a turn: the model does not learn to end its answers,"
            " and sample --chat writes on. In a copy of the template that tokenizer.chat_template"
            f" names, put the token that ends an answer after its content, inside of {GENERATION}."
        ]

    def _ask(self, when: str, rendering: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of `chat_environment`; `rendering` are the messages, names and cuts."""
        question = {
            "template": self.text,
            "marks": self._marks,
            "day": self._day,
            "rendering": rendering,
        }
        try:
            return RENDERER.ask(question)  # type: ignore[no-any-return]
        except OutOfBounds as error:
            raise UnboundedTemplate(f"{self.where} {error}, {when}: {ANOTHER_TEMPLATE}.") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the messages hold a value that JSON cannot hold ({error}): give texts, numbers,"
                " lists and objects"
            ) from None

    def _texts(self, messages: Sequence[Message], cuts: Sequence[tuple[int, bool]]) -> list[str]:
        """Return the text, with marks, of each cut: so many of the messages, and whether with the
        beginning of an answer."""
        rendering = {
            "messages": [*map(rendered_message, messages)],
            "beside": {key: messages[0].get(name) for key, name in BESIDE.items()},
            "names": self._names,
            "cuts": cuts,
        }
        answer = self._ask(f"where {len(messages)} messages are rendered", rendering)
        texts: list[str] = answer["texts"]
        if len(texts) == len(cuts):
            return texts
        turn = ""
        if texts:
            count = cuts[len(texts)][0]
            turn = f" (the first {count}, by which a turn is found). {BLOCKS_REMEDY}"
        raise ConfigError(f"{self.where} refuses the messages: {answer['refused']}{turn}")

    def _without_marks(self, marked: str) -> Marked:
        """Return the text without its marks, and the spans of the generation blocks that are not
        empty."""
        begin_mark, end_mark = self._marks
        text = ""
        begins = list[int]()
        spans = list[Span]()
        for piece in re.split(f"({begin_mark}|{end_mark})", marked):
            if piece == begin_mark:
                begins.append(len(text))
            elif piece != end_mark:
                text += piece
            elif begins:
                begin = begins.pop()
                if len(text) > begin:
                    spans.append((begin, len(text)))
        return text, spans

    @functools.cached_property
    def _added(self) -> dict[str, int]:
        """The ids of the added tokens by their names, the longest first."""
        added = self.tokenizer.encoder.spec()["added_tokens"]
        ids = {entry["content"]: entry["id"] for entry in added}
        return {name: ids[name] for name in sorted(ids, key=len, reverse=True)}

    @functools.cached_property
    def _aligned(self) -> tokenizers.Tokenizer:
        """The tokenizer that reads names of special tokens, without its post-processor, which may
        exclude spaces of tokens from their offsets."""
        backend = copy.deepcopy(self.tokenizer.encoder.marking)
        backend.post_processor = None  # type: ignore[assignment]
        return backend


def template_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the template with which a tokenizer was read or that was set, and its name for
    messages. As in transformers, chat_template.jinja comes before tokenizer_config.json."""
    if tokenizer.metadata.template is not None:
        return tokenizer.metadata.template, tokenizer.metadata.template_name
    value = tokenizer.metadata.settings.get("chat_template")
    if value is None:
        raise ConfigError(
            f"{tokenizer.origin} has no chat template, neither {TEMPLATE_FILE} beside it nor"
            f" chat_template in {SETTINGS_FILE}: put {TEMPLATE_FILE} there, or train with"
            " tokenizer.chat_template set to a file of Jinja."
        )
    where = f"{os.path.join(os.path.dirname(tokenizer.origin), SETTINGS_FILE)}: chat_template"
    if isinstance(value, list):  # of named templates
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    if not isinstance(value, str):
        raise ConfigError(
            f'{where} must be a text, or a list with {{"name": "default", "template": "..."}}:'
            " correct it, or set tokenizer.chat_template."
        )
    return value, where


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of special tokens that a template reads, such as bos_token: those in the
    files and, for a class with default special tokens, the usual ones."""
    settings = tokenizer.metadata.settings
    names = dict[str, str]()
    if settings.get("tokenizer_class") not in WITHOUT_DEFAULTS:
        for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
            token = tokenizer.special(role)
            if token is not None and f"{role}_token" not in settings:
                names[f"{role}_token"] = tokenizer.shown(token)
    named = dict(settings)
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    for key, value in named.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            names[key] = value
    return names


def set_chat_template(tokenizer: Tokenizer, path: str | Path) -> None:
    """Sets the template of a tokenizer to that of a file; it is saved with the tokenizer."""
    file = located(path)
    text = read_text(file, "set tokenizer.chat_template to a file of Jinja, or leave it empty")
    name = f"tokenizer.chat_template={path}"
    ChatTemplate(text, tokenizer, name)
    settings = dict(tokenizer.metadata.settings)
    settings.pop("chat_template", None)
    tokenizer.metadata = replace(
        tokenizer.metadata, settings=settings, template=text, template_name=name
    )


def template_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a digest of the template of a tokenizer, the special tokens and the format: equal
    digests give equal ids with a tokenizer. Empty where it has no template."""
    try:
        text, _ = template_of(tokenizer)
    except ConfigError:
        return ""
    content = json.dumps([FORMAT_OF_CHATS, text, special_names(tokenizer)])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
