"""Templates of what is learned as an answer: a prompt and its answer, or a conversation in the chat
template of the tokenizer, of which the turns of the assistant are learned; and how both are cut."""

import json
from collections.abc import Iterable

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sources.error_policy import RecordError
from jaxformer.data.sources.records import Record, Value
from jaxformer.data.templates import Template, joined
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Marked, UnboundedTemplate

CUT_PROMPT = "at the start of the prompt, and then at the end"


class SFTTemplate(Template):
    """A prompt, its answer and the end token, of which only the answer and its end are learned.

    Where they do not fit, the prompt loses its start, but keeps at least half a row, and then the
    answer its end; with the cut "end" the answer loses its end alone.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.before = tokenizer.as_prompt([])
        self.cut_where = CUT_PROMPT if self.cut == "prompt" else "at the end"

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.sum(1, keepdims=True) + len(self.before)

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        prompts, answers = store.lengths().T + np.array([[len(self.before)], [1]])
        if self.cut == "prompt":
            prompts = np.minimum(prompts, prompt_capacity(answers, self.length))
        ends = np.minimum(prompts + answers, self.length + 1)
        # The first token of a row is no target.
        return ends > np.maximum(prompts, 1)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, answer = joined(self.before, parts[0]), joined(parts[1], [self.end])
        if self.cut == "prompt":
            capacity = int(prompt_capacity(len(answer), self.length))
            prompt = without_start(prompt, capacity, self.before)
        text = joined(prompt, answer)[: self.length + 1]
        learned = np.arange(1, len(text)) >= len(prompt)
        return {"tokens": text[:-1], "targets": text[1:], "weights": learned.astype(np.float32)}


class MessagesTemplate(Template):
    """A conversation in its chat template; only what the assistant wrote is learned, with the token
    that ends its turn.

    Where it does not fit, what comes before the first answer loses its start, but keeps at least
    half a row, and then the conversation its end; with the cut "end" that alone.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.chat = ChatTemplate.of(tokenizer)
        self.before = tokenizer.as_prompt([])
        self.cut_where = CUT_PROMPT if self.cut == "prompt" else "at the end"
        self.recipe = (self.chat.fingerprint(),)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """Of each conversation its ids, and the places in these at which what is learned begins and
        ends, in turn. Raises RecordError for one that the template refuses."""
        marked = [marked_text(self.chat, record[0], index) for index, record in enumerate(records)]
        for ids, learned in self.chat.encode_marked(marked):
            steps = np.diff(np.array([0, *learned, 0], np.int8))
            yield ids, np.flatnonzero(steps).tolist()

    def warnings(self) -> list[str]:
        return [] if self.chat.learns_end() else [self.chat.unlearned_end()]

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # The last token is a target alone.
        return np.maximum(lengths[:, :1] - 1, 0)

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        edges, examples, positions = store.part(1)
        sizes = store.lengths()[:, 0]
        firsts = np.zeros(len(store), np.int64)
        firsts[examples[positions == 0]] = edges[positions == 0]
        lost = np.zeros(len(store), np.int64)
        if self.cut == "prompt":
            lost = np.maximum(firsts - prompt_capacity(sizes - firsts, self.length), 0)
        # Edges are the beginning and the end of what is learned, in turn; the first token of a row
        # is no target.
        begins, ends, examples = edges[::2], edges[1::2], examples[::2]
        begins = np.maximum(begins - lost[examples], 1)
        ends = np.minimum(ends - lost[examples], self.length + 1)
        return np.bincount(examples[begins < ends], minlength=len(store)) > 0

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        ids, edges = parts
        if self.cut == "prompt" and len(edges):
            prompt, answers = ids[: edges[0]], ids[edges[0] :]
            capacity = int(prompt_capacity(len(answers), self.length))
            short_prompt = without_start(prompt, capacity, self.before)
            ids, edges = joined(short_prompt, answers), edges - (len(prompt) - len(short_prompt))
        ids = ids[: self.length + 1]
        # A token is learned where an odd number of edges has been passed.
        learned = np.searchsorted(edges, np.arange(len(ids)), side="right") % 2
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": learned[1:].astype(np.float32)}


def marked_text(chat: ChatTemplate, messages: Value, index: int) -> Marked:
    """The text of a conversation, and the places in it of what is learned; `index` is that of its
    record. Raises RecordError where the template refuses it."""
    try:
        return chat.marked([json.loads(message) for message in messages])
    except UnboundedTemplate:
        # No error policy skips it: each record would take as long.
        raise
    except ConfigError as error:
        reason = "conversations that the chat template refuses"
        raise RecordError(reason, f": {error}.", index) from None


def prompt_capacity(answer: int | np.ndarray, length: int) -> np.ndarray:
    """How many tokens a prompt keeps of a row of `length` before an answer of so many: those that
    the answer leaves, but at least half. The last token of an example is a target alone."""
    return np.maximum(length + 1 - answer, (length + 1) // 2)


def without_start(prompt: np.ndarray, capacity: int, before: list[int]) -> np.ndarray:
    """The last tokens of a prompt that has more than `capacity`, after those that begin a text,
    `before`, where it begins with them."""
    if len(prompt) <= capacity:
        return prompt
    start = len(before) if prompt[: len(before)].tolist() == before else 0
    return joined(prompt[:start], prompt[len(prompt) - capacity + start :])
