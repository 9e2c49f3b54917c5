"""Templates of records: how each record becomes ids, and these the arrays of a row; and the rows of
whole examples, packed."""

import abc
from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat, Rows, padded
from jaxformer.data.sources import fingerprint
from jaxformer.data.sources.records import Record
from jaxformer.tokenizer import Tokenizer

# The segments of packed examples, and the array whose tokens they number.
SEGMENTS = {"segment_ids": "tokens", "source_segment_ids": "source"}
ARRAYS = ("targets", "weights", "token_types", *SEGMENTS, *SEGMENTS.values())

# Rows that an example may go to; when none has room, the fullest is closed for a new one.
OPEN_ROWS = 512


class Template(abc.ABC):
    """What the records of an objective become.

    `capacity` is how many tokens each stream of a row holds (a row has one, or a source and a
    target), `lengths` how long each array of a row is; a template whose arrays have other names
    adds theirs. `recipe` is what its ids depend on beside the records and the tokenizer, and
    `cut_where` says where what does not fit is cut.
    """

    packs = True
    cut_where = "at the end"
    recipe: tuple[str, ...] = ()

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.end_token
        self.length = row_format.length
        self.source_length = row_format.source_length
        self.types = row_format.token_types
        self.cut = row_format.cut
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

    def ids(self, records: list[Record], field: int) -> list[list[int]]:
        """The ids of one field of each record, which is a text."""
        return self.tokenizer.encode_batch([str(record[field]) for record in records])

    def warnings(self) -> list[str]:
        """What a user should know before training on these records."""
        return []

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


class SidesTemplate(Template):
    """Two texts of one example a row, each array [2, T]."""

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.length, self.length)

    def stacked(self, sides: list[NumpyBatch]) -> NumpyBatch:
        """The arrays [2, T] of two texts, each padded as a row of its own."""
        rows = []
        for side in sides:
            rows.append(super().row([side]))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        (pair,) = examples
        return pair


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


class ExampleRows(Rows):
    """Rows of whole examples, packed in an order that the seed gives; one example a row where the
    template does not pack. Examples without a target are in no row.

    `left_out` counts these, and `cut` those of the others that are longer than a row, which the
    template cuts; `filled` is the fraction of the rows that holds tokens.
    """

    def __init__(self, store: ExampleStore, template: Template, seed: int) -> None:
        self.store = store
        self.template = template
        self.take_counts(store)
        # [examples, streams] and [streams]
        lengths = store.lengths()
        sizes = template.sizes(lengths)
        capacity = np.array(template.capacity)
        # An example that is whole and has something to learn, in its last part, has a target.
        doubtful = (sizes > capacity).any(1) | (sizes < 1).any(1) | (lengths[:, -1] == 0)
        learned = np.ones(len(store), bool)
        for index in np.flatnonzero(doubtful).tolist():
            weights = template.arrays(*store[index]).get("weights", np.ones(1))
            learned[index] = weights.any(-1).all()
        self.left_out = len(store) - int(learned.sum())
        if self.left_out:
            # A run that has them in its rows is another one.
            self.fingerprint = fingerprint(store.fingerprint, np.flatnonzero(~learned).tolist())
        self.cut = int((sizes > capacity)[learned].any(1).sum())
        fitted = np.minimum(sizes, capacity)
        rows = [[index] for index in np.flatnonzero(learned).tolist()]
        if template.packs:
            order = np.random.default_rng(seed).permutation(len(store))
            rows = first_fit(fitted, capacity, order[learned[order]])
        # The examples of row r are _members[_bounds[r] : _bounds[r + 1]].
        self._members = np.fromiter((index for row in rows for index in row), np.int64)
        self._bounds = np.cumsum([0, *map(len, rows)])
        self.filled = float(fitted[learned].sum() / max(1, len(rows) * capacity.sum()))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def most_segments(self) -> int | None:
        return int(np.diff(self._bounds).max(initial=1))

    def members(self, index: int) -> np.ndarray:
        """The numbers of the examples in a row, in order."""
        return self._members[self._bounds[index] : self._bounds[index + 1]]

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        members = self.members(index)
        return self.template.row([self.template.arrays(*self.store[member]) for member in members])


def first_fit(sizes: np.ndarray, capacity: np.ndarray, order: np.ndarray) -> list[list[int]]:
    """The numbers of the examples in each row: each goes to the first open row that has room in all
    streams.

    `sizes` [N, streams] are at most `capacity` [streams].
    """
    # The room in each open row, and its number; -1 has room for nothing, so no row is open yet.
    left = np.full((len(capacity), OPEN_ROWS), -1, np.int64)
    row_of_slot = np.zeros(OPEN_ROWS, np.int64)
    rows: list[list[int]] = []
    for index in order.tolist():
        size = sizes[index][:, None]
        fits = (left >= size).all(0)
        # The first that fits, or 0.
        slot = int(fits.argmax())
        if not fits[slot]:
            slot = int(left.min(0).argmin())
            left[:, slot] = capacity
            row_of_slot[slot] = len(rows)
            rows.append([])
        left[:, slot] -= size[:, 0]
        rows[row_of_slot[slot]].append(index)
    return rows


def joined(*sequences: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids one after the other: int32."""
    return np.concatenate([np.asarray(ids, np.int32) for ids in sequences])
