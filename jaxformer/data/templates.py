"""Templates of records: how each record becomes ids, and these the arrays of a row."""

import abc
from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.data.examples import Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat, padded
from jaxformer.data.sources.records import Record
from jaxformer.tokenizer import Tokenizer

# The segments of packed examples, and the array whose tokens they number.
SEGMENTS = {"segment_ids": "tokens", "source_segment_ids": "source"}
ARRAYS = ("targets", "weights", "token_types", *SEGMENTS, *SEGMENTS.values())


class Template(abc.ABC):
    """What the records of an objective become.

    `capacity` is how many tokens each stream of a row holds (a row has one, or a source and a
    target), `lengths` how long each array of a row is; a template whose arrays have other names
    adds theirs. `recipe` is what its ids depend on beside the records and the tokenizer, and
    `cut_where` says where what does not fit is cut.
    """

    packs, cut_where = True, "at the end"
    recipe: tuple[str, ...] = ()

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.end = tokenizer, tokenizer.end_token
        self.length, self.source_length = row_format.length, row_format.source_length
        self.types = row_format.token_types
        self.lengths = row_format.lengths(ARRAYS)
        self.capacity: tuple[int, ...] = (self.length,)
        first = tokenizer.special("cls") if row_format.marks else None
        last = tokenizer.special("sep") if row_format.marks else None
        self.start = [] if first is None else [first]
        self.stop = [self.end if last is None else last]

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """The ids of each record's parts, which here are texts; a new label gets the next
        number."""
        return zip(*(self.ids(records, field) for field in range(len(records[0]))), strict=True)

    @abc.abstractmethod
    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that examples of parts of these `lengths` [N, parts] would take of each stream,
        uncut: [N, streams]."""

    @abc.abstractmethod
    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        """The arrays of one example, cut to what a row holds."""

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        """The arrays of a row: those of its examples one after the other, numbered from 1 as
        segments, and padding."""
        row = {
            name: np.concatenate([example[name] for example in examples]) for name in examples[0]
        }
        numbers = np.arange(1, len(examples) + 1, dtype=np.int32)
        for name, array in SEGMENTS.items():
            if array in row:
                row[name] = np.repeat(numbers, [len(example[array]) for example in examples])
        return padded(row, self.lengths)

    def ids(self, records: list[Record], field: int) -> list[list[int]]:
        return self.tokenizer.encode_batch([str(record[field]) for record in records])

    def with_types(self, row: NumpyBatch, *lengths: int) -> NumpyBatch:
        """A row with the types of its tokens, where the model has any: 0 for the tokens of the
        first of these lengths, 1 for the next."""
        kinds = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return row | ({"token_types": np.minimum(kinds, self.types - 1)} if self.types else {})


class PairTemplate(Template):
    """Sequence to sequence: a source and a target with their special tokens; the decoder reads the
    target after its start token, and predicts it and the end token."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.source_length, self.length)
        self.more = np.array([len(tokenizer.as_source([])), len(tokenizer.as_target([]))])

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths + self.more

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        most = np.array(self.capacity) - self.more
        source, target = (part[:size] for part, size in zip(parts, most, strict=True))
        tokens = self.tokenizer.as_target(target)
        return {
            "source": joined(self.tokenizer.as_source(source)),
            "tokens": joined(tokens),
            "targets": joined(tokens[1:], [self.end]),
            "weights": np.ones(len(tokens), np.float32),
        }


class SFTTemplate(Template):
    """A prompt, its answer and the end token, of which only the answer and its end are learned."""

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.sum(1, keepdims=True) + len(self.tokenizer.prefix)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, answer = self.tokenizer.as_prompt(parts[0]), parts[1]
        text = joined(prompt, answer, [self.end])[: self.length + 1]
        learned = np.arange(1, len(text)) >= len(prompt)
        return {"tokens": text[:-1], "targets": text[1:], "weights": learned.astype(np.float32)}


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
        texts = super().encode([record[:-1] for record in records], labels)
        for parts, record in zip(texts, records, strict=True):
            yield *parts, [labels.setdefault(str(record[-1]), len(labels))]

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :-1].sum(1, keepdims=True) + len(self.start) + lengths.shape[1] - 1

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        *texts, label = parts
        capacity = self.length - len(self.start) - len(texts)
        if len(texts) == 2:
            # The first keeps what the second leaves, but at least half (rounded up).
            first = min(len(texts[0]), max(capacity - len(texts[1]), -(-capacity // 2)))
            texts = [texts[0][:first], texts[1][: capacity - first]]
        closed = [joined(text[:capacity], self.stop) for text in texts]
        closed[0] = joined(self.start, closed[0])
        tokens, weights = np.concatenate(closed), np.ones(1, np.float32)
        row = {"tokens": tokens, "targets": label, "weights": weights}
        return self.with_types(row, *map(len, closed))


class TagTemplate(Template):
    """Words and a tag for each, learned on the word's first piece, between [CLS] and [SEP] as in
    `ClassTemplate`."""

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
                # The further pieces of a word, numbered -1, are not learned.
                numbers += [labels.setdefault(tag, len(labels)), *[-1] * len(word)][: len(word)]
            yield ids, numbers

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :1] + len(self.start) + len(self.stop)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        around = (len(self.start), len(self.stop))
        ids, tags = (part[: self.length - sum(around)] for part in parts)
        tags = np.pad(tags, around, constant_values=-1)
        row = {
            "tokens": joined(self.start, ids, self.stop),
            "targets": np.maximum(tags, 0),
            "weights": (tags >= 0).astype(np.float32),
        }
        return self.with_types(row, len(tags))


def joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids one after the other: int32."""
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
