"""Templates of what is learned as an answer: a prompt and its answer, a conversation in the chat
template of the tokenizer, of which the turns of the assistant are learned, or a prompt with the
completion that is preferred and the one that is not; and how all are cut."""

import functools
import json
from collections.abc import Iterable, Iterator

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat, padded
from jaxformer.data.sources.records import Record, Value
from jaxformer.data.sources.source_files import RecordError
from jaxformer.data.templates import Template, joined
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Marked, UnboundedTemplate, template_fingerprint


class AnswerTemplate(Template):
    """A template of an answer to a prompt, which begins with the tokens `before`."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.before = tokenizer.as_prompt([])
        if self.cut == "prompt":
            self.cut_where = "at the start of the prompt, and then at the end"

    def have_answers(self, prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Whether a token of each answer is learned when it is cut as in `arrays`, by the sizes of
        prompts and answers, arrays of one shape: bool of that shape."""
        if self.cut == "prompt":
            prompts = np.minimum(prompts, prompt_capacity(answers, self.length))
        ends = np.minimum(prompts + answers, self.length + 1)
        # The first token of a row is no target.
        return ends > np.maximum(prompts, 1)

    def answered(self, prompt: np.ndarray, answer: np.ndarray) -> NumpyBatch:
        """The arrays [at most T] of a prompt and an answer, of which the answer alone is learned,
        cut at the end to what a row holds. The last token is a target alone."""
        text = joined(prompt, answer)[: self.length + 1]
        learned = np.arange(1, len(text)) >= len(prompt)
        return {"tokens": text[:-1], "targets": text[1:], "weights": learned.astype(np.float32)}


class SFTTemplate(AnswerTemplate):
    """A prompt, its answer and the end token, of which only the answer and its end are learned.

    Where they do not fit, the prompt loses its start, but keeps at least half a row, and then the
    answer its end; with the cut "end" the answer loses its end alone.
    """

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.sum(1, keepdims=True) + len(self.before)

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        return self.have_answers(*store.lengths().T + np.array([[len(self.before)], [1]]))

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt = joined(self.before, parts[0])
        answer = joined(parts[1], [self.end])
        if self.cut == "prompt":
            capacity = int(prompt_capacity(len(answer), self.length))
            prompt = without_start(prompt, capacity, self.before)
        return self.answered(prompt, answer)


class MessagesTemplate(AnswerTemplate):
    """A conversation in its chat template; only what the assistant wrote is learned, with the token
    that ends its turn.

    Where it does not fit, what comes before the first answer loses its start, but keeps at least
    half a row, and then the conversation its end; with the cut "end" that alone.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.chat = ChatTemplate.of(tokenizer)
        self.recipe = (self.chat.fingerprint(),)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """Of each conversation its ids, and the places in these at which what is learned begins and
        ends, in turn."""
        marked = [marked_text(self.chat, record[0], index) for index, record in enumerate(records)]
        for ids, learned in self.chat.encode_marked(marked):
            steps = np.diff(np.array([0, *learned, 0], np.int8))
            yield ids, np.flatnonzero(steps).tolist()

    def warnings(self) -> list[str]:
        return self.chat.warnings()

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
        begins = edges[::2]
        ends = edges[1::2]
        examples = examples[::2]
        begins = np.maximum(begins - lost[examples], 1)
        ends = np.minimum(ends - lost[examples], self.length + 1)
        return np.bincount(examples[begins < ends], minlength=len(store)) > 0

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        ids, edges = parts
        if self.cut == "prompt" and len(edges):
            prompt = ids[: edges[0]]
            answers = ids[edges[0] :]
            capacity = int(prompt_capacity(len(answers), self.length))
            short_prompt = without_start(prompt, capacity, self.before)
            ids = joined(short_prompt, answers)
            edges = edges - (len(prompt) - len(short_prompt))
        ids = ids[: self.length + 1]
        # A token is learned where an odd number of edges has been passed.
        learned = np.searchsorted(edges, np.arange(len(ids)), side="right") % 2
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": learned[1:].astype(np.float32)}


class PreferenceTemplate(AnswerTemplate):
    """One pair a row, each array [2, T]: the prompt with the chosen completion and its end token,
    and the same prompt with the rejected one. Targets of a completion have the weight 1.

    Prompts and completions that are messages are in the chat template of the tokenizer, in which a
    completion ends with what ends a turn.

    Where the longer side does not fit, both lose the same tokens at the start of their prompt,
    which keeps at least half a row; what is still too long is cut at the end of its completion, and
    has no end token. So a completion keeps its beginning, with the end of the prompt before it.
    """

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.length, self.length)
        self.recipe = (template_fingerprint(tokenizer),)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """The ids of each prompt and of both completions, with the tokens that begin and end a
        text; of messages those of the chat template alone."""
        texts = [record for record in records if isinstance(record[0], str)]
        written = iter(super().encode(texts, labels) if texts else ())
        spoken = self._answers(records)
        for record in records:
            if not isinstance(record[0], str):
                yield next(spoken)
                continue
            prompt, *sides = next(written)
            yield [*self.before, *prompt], *([*side, self.end] for side in sides)

    def _answers(self, records: list[Record]) -> Iterator[Parts]:
        """The parts of the records whose prompt is messages."""
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
        return (_pair(*sides) for sides in zip(encoded[::2], encoded[1::2], strict=True))

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # The last token is a target alone.
        return lengths[:, :1] + lengths[:, 1:] - 1

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        prompts = store.lengths()[:, :1]
        completions = store.lengths()[:, 1:]
        # Both sides lose what the longer one does, and both have to have a target.
        capacity = prompt_capacity(completions.max(1, keepdims=True), self.length)
        return np.all(self.have_answers(np.minimum(prompts, capacity), completions), axis=1)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, *completions = parts
        capacity = int(prompt_capacity(max(map(len, completions)), self.length))
        prompt = without_start(prompt, capacity, self.before)
        sides = [self._side(prompt, completion) for completion in completions]
        return {name: np.stack([side[name] for side in sides]) for name in sides[0]}

    def _side(self, prompt: np.ndarray, completion: np.ndarray) -> NumpyBatch:
        """The arrays [T] of one side, padded with zeros: token 0, weight 0, segment 0."""
        row = self.answered(prompt, completion)
        row["segment_ids"] = np.ones(len(row["tokens"]), np.int32)
        return padded(row, dict.fromkeys(row, self.length))

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        (pair,) = examples
        return pair


def _pair(chosen: tuple[list[int], list[bool]], rejected: tuple[list[int], list[bool]]) -> Parts:
    """The prompt and both completions of two texts and what is learned of each.

    A completion begins with the first token that is learned. Where a token holds characters of both
    the prompt and an answer, so that the prompts differ in it, it is part of the completions.
    """
    spans = [_span(learned) for _, learned in (chosen, rejected)]
    begin = min(first for first, _ in spans)
    both = zip(chosen[0][:begin], rejected[0][:begin], strict=True)
    begin = next((position for position, ids in enumerate(both) if ids[0] != ids[1]), begin)
    sides = (ids[begin:end] for (ids, _), (_, end) in zip((chosen, rejected), spans, strict=True))
    return chosen[0][:begin], *sides


def _span(learned: list[bool]) -> tuple[int, int]:
    """The places of the first token that is learned and after the last; the end twice for none."""
    positions = np.flatnonzero(learned)
    if not len(positions):
        return len(learned), len(learned)
    return int(positions[0]), int(positions[-1]) + 1


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
