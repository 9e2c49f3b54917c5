"""Templates of what is learned as an answer: a prompt and its answer, a conversation in the chat
template of the tokenizer, of which the turns of the assistant are learned, or a prompt with the
completion that is preferred and the one that is not; and how all are cut."""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxformer.data.examples import Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sources.records import Record, Value
from jaxformer.data.sources.source_files import RecordError
from jaxformer.data.templates import SidesTemplate, Template, joined
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Marked, UnboundedTemplate, template_fingerprint

JOINT_IDS = "ids of joint texts"


def joint_ids(tokenizer: Tokenizer, records: list[Record]) -> list[list[list[int]]]:
    """The ids of each prompt, and those that follow for each of its completions: the ids of both as
    one text, which are others than those of each alone where a token reaches over the border, or
    where the tokenizer puts a space before a text. The prompt ends where the ids of a joint text
    are no longer those of the prompt alone, as it is given to the model that continues it."""
    prompts = tokenizer.encode_batch([str(prompt) for prompt, *_ in records])
    sides = range(1, len(records[0]))
    joint = [
        tokenizer.encode_batch([f"{record[0]}{record[side]}" for record in records])
        for side in sides
    ]
    parts: list[list[list[int]]] = [[] for _ in records[0]]  # the prompts, and each completion
    for prompt, *texts in zip(prompts, *joint, strict=True):
        border = min(common_length(prompt, ids) for ids in texts)
        parts[0].append(texts[0][:border])
        for completions, ids in zip(parts[1:], texts, strict=True):
            completions.append(ids[border:])
    return parts


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of ids with which both begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


class AnswerTemplate(Template):
    """A template of texts that are learned in part. An example is its ids, and the places in them
    at which what is learned begins and ends, in turn.

    Where it does not fit, what comes before the first answer loses its start, but not the tokens
    `before` with which texts begin, and keeps at least half a row; and then the text loses its end.
    With the cut "end" it loses its end alone.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.before = tokenizer.as_prompt([])
        if self.cut == "prompt":
            self.cut_where = "at the start of the prompt, and then at the end"

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # The last token is a target alone.
        return np.maximum(lengths[:, :1] - 1, 0)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        ids, edges = parts
        return self.answered(ids, edges, len(ids) - edges[0] if len(edges) else 0)

    def answered(self, ids: np.ndarray, edges: np.ndarray, answer: int) -> NumpyBatch:
        """The arrays [at most T] of a text that is learned between `edges`, whose prompt leaves
        room for `answer` tokens."""
        if self.cut == "prompt" and len(edges):
            # The last token is a target alone, so that a row has length + 1 tokens.
            capacity = max(self.length + 1 - answer, (self.length + 1) // 2)
            lost = max(int(edges[0]) - capacity, 0)
            begins = ids[: len(self.before)].tolist() == self.before
            start = len(self.before) if begins else 0
            ids = joined(ids[:start], ids[start + lost :])
            edges = edges - lost
        ids = ids[: self.length + 1]
        # A token is learned where an odd number of edges has been passed.
        learned = np.searchsorted(edges, np.arange(len(ids)), side="right") % 2
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": learned[1:].astype(np.float32)}


class SFTTemplate(AnswerTemplate):
    """A prompt, its answer and the end token, of which only the answer and its end are learned."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.recipe = (JOINT_IDS,)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        for prompt, answer in zip(*joint_ids(self.tokenizer, records), strict=True):
            ids = [*self.before, *prompt, *answer, self.end]
            yield ids, (len(ids) - len(answer) - 1, len(ids))


class MessagesTemplate(AnswerTemplate):
    """A conversation in its chat template; only what the assistant wrote is learned, with the token
    that ends its turn."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.chat = ChatTemplate.of(tokenizer)
        self.recipe = (template_fingerprint(tokenizer),)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        marked = [marked_text(self.chat, record[0], index) for index, record in enumerate(records)]
        for ids, learned in self.chat.encode_marked(marked):
            steps = np.diff(np.array([0, *learned, 0], np.int8))
            yield ids, np.flatnonzero(steps).tolist()

    def warnings(self) -> list[str]:
        return self.chat.warnings()


class PreferenceTemplate(SidesTemplate, AnswerTemplate):
    """One pair a row, each array [2, T]: the prompt with the chosen completion and its end token,
    and the same prompt with the rejected one. Targets of a completion have the weight 1.

    Prompts and completions that are messages are in the chat template of the tokenizer, in which a
    completion ends with what ends a turn. Where the longer side does not fit, both lose the same
    tokens at the start of their prompt.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.recipe = (JOINT_IDS, template_fingerprint(tokenizer))

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """The ids of each prompt and of both completions, with the tokens that begin and end a
        text; of messages those of the chat template alone."""
        texts = [record for record in records if isinstance(record[0], str)]
        written = zip(*joint_ids(self.tokenizer, texts), strict=True) if texts else iter(())
        spoken = self._answers(records)
        for record in records:
            if not isinstance(record[0], str):
                yield next(spoken)
                continue
            prompt, *sides = next(written)
            yield [*self.before, *prompt], *([*side, self.end] for side in sides)

    def _answers(self, records: list[Record]) -> Iterator[Parts]:
        """The parts of the records whose prompt is messages.

        A completion begins with the first token that is learned. Where a token holds characters of
        both the prompt and an answer, so that the prompts differ in it, it is part of the
        completions.
        """
        marked: list[Marked] = []
        for index, (prompt, *sides) in enumerate(records):
            if isinstance(prompt, str):
                continue
            for side in sides:
                text, spans = marked_text(self.chat, (*prompt, *side), index)
                marked.append((text, spans[-1:]))
            before = [text[: spans[0][0]] for text, spans in marked[-2:]]
            if before[0] != before[1]:
                raise RecordError(
                    "pairs whose prompts differ",
                    f"{self.chat.where} renders the prompt otherwise before the rejected answer:"
                    " set tokenizer.chat_template to one that does not.",
                    index,
                )
        encoded = self.chat.encode_marked(marked) if marked else []
        for pair in zip(encoded[::2], encoded[1::2], strict=True):
            chosen, rejected = (ids for ids, _ in pair)
            begin = min(len(chosen), len(rejected))
            ends = []
            for ids, learned in pair:
                places = np.flatnonzero(learned).tolist()
                if places:
                    begin = min(begin, places[0])
                ends.append(places[-1] + 1 if places else len(ids))
            begin = common_length(chosen[:begin], rejected[:begin])
            yield chosen[:begin], chosen[begin : ends[0]], rejected[begin : ends[1]]

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # The last token is a target alone.
        return lengths[:, :1] + lengths[:, 1:] - 1

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, *completions = parts
        longest = max(map(len, completions))
        sides = []
        for completion in completions:
            ids = joined(prompt, completion)
            sides.append(self.answered(ids, np.array([len(prompt), len(ids)]), longest))
        return self.stacked(sides)


def marked_text(chat: ChatTemplate, messages: Value, index: int) -> Marked:
    """The text of a conversation, and the places in it of what is learned; `index` is that of its
    record."""
    try:
        return chat.marked([json.loads(message) for message in messages])
    except UnboundedTemplate:
        # No error policy skips it: each record would take as long.
        raise
    except ConfigError as error:
        reason = "conversations that the chat template refuses"
        raise RecordError(reason, f"{error}.", index) from None
