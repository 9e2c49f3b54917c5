"""The template of preferences: a prompt, the completion that is preferred, and the one that is
not."""

import functools
from collections.abc import Iterable, Iterator

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sft_templates import CUT_PROMPT, marked_text, prompt_capacity, without_start
from jaxformer.data.sources.error_policy import RecordError
from jaxformer.data.sources.records import Record
from jaxformer.data.templates import Template, joined
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Marked, template_fingerprint


class PreferenceTemplate(Template):
    """One pair a row, each array [2, T]: the prompt with the chosen completion and its end token,
    and the same prompt with the rejected one. Targets of a completion have the weight 1.

    Prompts and completions that are messages are in the chat template of the tokenizer, in which a
    completion ends with what ends a turn.

    Where the longer side does not fit, both lose the same tokens at the start of their prompt,
    which keeps at least half a row; what is still too long is cut at the end of its completion, and
    has no end token. So a completion keeps its beginning, with the end of the prompt before it.
    """

    packs = False
    cut_where = CUT_PROMPT

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.length, self.length)
        self.before = tokenizer.as_prompt([])
        # Stores of an earlier version have ids without the tokens that begin and end a text.
        self.recipe = ("with the end token", template_fingerprint(tokenizer))

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
                    f": {self.chat.where} renders the prompt otherwise before the rejected answer:"
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
        prompts, completions = store.lengths()[:, :1], store.lengths()[:, 1:]
        capacity = prompt_capacity(completions.max(1, keepdims=True), self.length)
        prompts = np.minimum(prompts, capacity)
        ends = np.minimum(prompts + completions, self.length + 1)
        # Both sides have to have one. The first token of a row is no target.
        return (ends > np.maximum(prompts, 1)).all(1)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, *completions = parts
        capacity = int(prompt_capacity(max(map(len, completions)), self.length))
        prompt = without_start(prompt, capacity, self.before)
        sides = [self._side(prompt, completion) for completion in completions]
        return {name: np.stack([side[name] for side in sides]) for name in sides[0]}

    def _side(self, prompt: np.ndarray, completion: np.ndarray) -> NumpyBatch:
        """The arrays [T] of one side, padded with zeros: token 0, weight 0, segment 0."""
        text = joined(prompt, completion)[: self.length + 1]
        used = max(len(text) - 1, 0)
        row = {name: np.zeros(self.length, np.int32) for name in ("tokens", "targets")}
        row["tokens"][:used], row["targets"][:used] = text[:-1], text[1:]
        positions = np.arange(self.length)
        learned = (positions + 1 >= len(prompt)) & (positions < used)
        row["weights"] = learned.astype(np.float32)
        row["segment_ids"] = (positions < used).astype(np.int32)
        return row

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
    begin = next((position for position, (one, other) in enumerate(both) if one != other), begin)
    sides = (ids[begin:end] for (ids, _), (_, end) in zip((chosen, rejected), spans, strict=True))
    return chosen[0][:begin], *sides


def _span(learned: list[bool]) -> tuple[int, int]:
    """The places of the first token that is learned and after the last; the end twice for none."""
    positions = np.flatnonzero(learned)
    if not len(positions):
        return len(learned), len(learned)
    return int(positions[0]), int(positions[-1]) + 1
