"""Rows of conversations: messages in the chat template of the tokenizer, of which the turns of the
assistant are learned."""

import json
from collections.abc import Iterable

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.prompt_template import CUT_PROMPT, prompt_capacity, without_start
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sources.error_policy import RecordError
from jaxformer.data.sources.records import Record, Value
from jaxformer.data.templates import Template, joined
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Marked, UnboundedTemplate


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
        return np.maximum(lengths[:, :1] - 1, 0)  # the last token is a target alone

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        edges, examples, places = store.part(1)
        sizes = store.lengths()[:, 0]
        firsts = np.zeros(len(store), np.int64)
        firsts[examples[places == 0]] = edges[places == 0]
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
            kept = without_start(prompt, capacity, self.before)
            ids, edges = joined(kept, answers), edges - (len(prompt) - len(kept))
        ids = ids[: self.length + 1]
        # A token is learned where an odd number of edges has been passed.
        learned = np.searchsorted(edges, np.arange(len(ids)), side="right") % 2
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": learned[1:].astype(np.float32)}


def marked_text(chat: ChatTemplate, messages: Value, index: int) -> Marked:
    """The text of a conversation, and the places in it of what is learned; `index` is that of its
    record. Raises RecordError where the template refuses it."""
    try:
        return chat.marked([json.loads(message) for message in messages])
    except UnboundedTemplate:  # which no error policy skips: each record would take as long
        raise
    except ConfigError as error:
        reason = "conversations that the chat template refuses"
        raise RecordError(reason, f": {error}.", index) from None
