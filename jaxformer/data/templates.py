"""Templates of records: how each record becomes ids, and these the arrays of a row."""

import abc
from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
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
        self.types, self.cut = row_format.token_types, row_format.cut
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

    def warnings(self) -> list[str]:
        """What a user should know before training on these records."""
        return []

    @abc.abstractmethod
    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that examples of parts of these `lengths` [N, parts] would take of each stream,
        uncut: [N, streams]."""

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        """Whether each example has a target when it is cut to what a row holds, bool [N]. Those
        that have none are left out of the rows."""
        return np.ones(len(store), bool)

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
        capacity = np.array(self.capacity) - self.more
        source, target = (ids[:size] for ids, size in zip(parts, capacity, strict=True))
        tokens = self.tokenizer.as_target(target)
        return {
            "source": joined(self.tokenizer.as_source(source)),
            "tokens": joined(tokens),
            "targets": joined(tokens[1:], [self.end]),
            "weights": np.ones(len(tokens), np.float32),
        }


def joined(*sequences: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids one after the other: int32."""
    return np.concatenate([np.asarray(ids, np.int32) for ids in sequences])
