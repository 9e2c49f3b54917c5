"""Templates of records: how each record becomes ids, and these the arrays of a row."""

import abc
from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.data.examples import Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sources.records import Record
from jaxformer.tokenizer import Tokenizer


class Template(abc.ABC):
    """What records of an objective become.

    `capacity` is how many tokens each stream of a row holds, `lengths` how long each array of a row
    is; a template whose arrays have other names adds theirs.
    """

    packs = True

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.end = tokenizer, tokenizer.end_token
        self.length, self.source_length = row_format.length, row_format.source_length
        self.types = row_format.token_types
        names = ("tokens", "targets", "weights", "segment_ids", "token_types")
        self.lengths = dict.fromkeys(names, self.length) | dict.fromkeys(
            ("source", "source_segment_ids"), self.source_length
        )
        self.capacity: tuple[int, ...] = (self.length,)
        first = tokenizer.special("cls") if row_format.marks else None
        last = tokenizer.special("sep") if row_format.marks else None
        self.start = [] if first is None else [first]
        self.stop = [self.end if last is None else last]

    @abc.abstractmethod
    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """The ids of each record's parts; a label that is new gets the next number."""

    @abc.abstractmethod
    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that examples of parts of these `lengths` [N, parts] would take of each stream,
        uncut: [N, streams]."""

    @abc.abstractmethod
    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        """The arrays of one example, cut to what a row holds."""

    def ids(self, records: list[Record], field: int) -> list[list[int]]:
        return self.tokenizer.encode_batch([str(record[field]) for record in records])

    def with_types(self, row: NumpyBatch, *lengths: int) -> NumpyBatch:
        """A row with the types of its tokens, where the model has any: the first `lengths` tokens
        0, the next 1."""
        kinds = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return row | ({"token_types": np.minimum(kinds, self.types - 1)} if self.types else {})


class PairTemplate(Template):
    """Sequence to sequence: the source as the tokenizer closes it; the target, after its start, and
    with the end token."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.source_length, self.length)
        self.more = np.array([len(tokenizer.as_source([])), len(tokenizer.as_target([]))])

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        return zip(self.ids(records, 0), self.ids(records, 1), strict=True)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths + self.more

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        source, target = (
            part[: capacity - more]
            for part, capacity, more in zip(parts, self.capacity, self.more, strict=True)
        )
        tokens = self.tokenizer.as_target(target)
        return {
            "source": joined(self.tokenizer.as_source(source)),
            "tokens": joined(tokens),
            "targets": joined(tokens[1:], [self.end]),
            "weights": np.ones(len(tokens), np.float32),
        }


class SFTTemplate(Template):
    """A prompt, its answer and the end token, of which only the answer and its end are learnt."""

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        return zip(self.ids(records, 0), self.ids(records, 1), strict=True)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.sum(1, keepdims=True) + len(self.tokenizer.prefix)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, answer = self.tokenizer.as_prompt(parts[0]), parts[1]
        text = joined(prompt, answer, [self.end])[: self.length + 1]
        learnt = np.arange(1, len(text)) >= len(prompt)
        return {"tokens": text[:-1], "targets": text[1:], "weights": learnt.astype(np.float32)}


class ClassTemplate(Template):
    """One text or two and their class, one example a row: [CLS] text [SEP] (text [SEP]) in an
    encoder whose tokenizer has these, else each text with the end token. Of two that are too long
    the longer is cut first (BERT, arXiv:1810.04805).
    """

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.lengths |= {"targets": 1, "weights": 1}

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        texts = [self.ids(records, field) for field in range(len(records[0]) - 1)]
        numbers = [[labels.setdefault(str(record[-1]), len(labels))] for record in records]
        return zip(*texts, numbers, strict=True)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :-1].sum(1, keepdims=True) + len(self.start) + lengths.shape[1] - 1

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        *texts, label = parts
        capacity = self.length - len(self.start) - len(texts)
        if len(texts) == 2:
            first = min(len(texts[0]), max(capacity - len(texts[1]), -(-capacity // 2)))
            texts = [texts[0][:first], texts[1][: capacity - first]]
        closed = [joined(text[:capacity], self.stop) for text in texts]
        closed[0] = joined(self.start, closed[0])
        row = {
            "tokens": np.concatenate(closed),
            "targets": label,
            "weights": np.ones(1, np.float32),
        }
        return self.with_types(row, *map(len, closed))


class TagTemplate(Template):
    """Words and a tag for each, learnt on the word's first piece, between [CLS] and [SEP] as
    classes are."""

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        words = [
            (" " * (place > 0) + word) for record in records for place, word in enumerate(record[0])
        ]
        pieces = iter(self.tokenizer.encode_batch(words))
        for _, tags in records:
            ids: list[int] = []
            numbers: list[int] = []
            for tag in tags:
                word = next(pieces)
                ids += word
                numbers += [labels.setdefault(tag, len(labels)), *[-1] * len(word)][: len(word)]
            yield ids, numbers

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :1] + len(self.start) + len(self.stop)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        capacity = self.length - len(self.start) - len(self.stop)
        ids, tags = (
            parts[0][:capacity],
            np.pad(parts[1][:capacity], (len(self.start), len(self.stop)), constant_values=-1),
        )
        row = {
            "tokens": joined(self.start, ids, self.stop),
            "targets": np.maximum(tags, 0),
            "weights": (tags >= 0).astype(np.float32),
        }
        return self.with_types(row, len(tags))


def joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids one after the other: int32."""
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
