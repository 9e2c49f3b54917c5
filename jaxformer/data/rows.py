"""The rows that batches are made of: numbered, each a few arrays, the same whenever it is asked
for."""

import abc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.examples import ExampleStore
from jaxformer.data.store import TokenStore

if TYPE_CHECKING:
    import grain

# One row as arrays [T], or a batch of them as arrays [B, T]: int32, weights float32.
NumpyBatch = dict[str, np.ndarray]
SOURCE_ARRAYS = ("source", "source_segment_ids")
# The segments of the pieces of a row, and the array whose tokens they number.
SEGMENTS = {"segment_ids": "tokens", "source_segment_ids": "source"}
# The array of a batch of a mixture with the index of the source of each row, int32 [B].
SOURCE_IDS = "source_ids"


class RowFormat(NamedTuple):
    """How a row is laid out, as the model reads it.

    `length` is the number of tokens of a row, `source_length` that of a row of sources (an
    encoder-decoder's). With `marks` rows begin with [CLS] and end with [SEP], where the tokenizer
    has these (an encoder's). `token_types` is how many types of tokens the model has, 0 for none;
    where `pair_target` is a name, a row holds two texts, and under that name whether the second
    follows the first. `cut` is what a long example loses first: "prompt", the start of its prompt,
    or "end", its end alone. `negatives` is how many texts a row of contrastive has beside its pair.
    """

    length: int
    source_length: int
    marks: bool = False
    token_types: int = 0
    pair_target: str = ""
    cut: str = "prompt"
    negatives: int = 0

    @property
    def source_lengths(self) -> dict[str, int]:
        """Return the length of each array of a source."""
        return dict.fromkeys(SOURCE_ARRAYS, self.source_length)


class Rows(abc.ABC):
    """Rows by number, and the counts of the text that they are made of; `filled` is the fraction of
    the rows that holds tokens."""

    filled: float = 1.0

    def __init__(self, store: TokenStore | ExampleStore) -> None:
        self.store = store
        self.documents = store.documents
        self.bytes = store.bytes
        self.fingerprint = store.fingerprint

    @property
    def tokens(self) -> int:
        return self.store.tokens

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many rows there are in an epoch."""

    @abc.abstractmethod
    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        """Return row `index`; what is random in it is drawn from `rng`."""

    def __getitem__(self, index: int) -> NumpyBatch:
        """Return row `index` with randomness of its own, for evaluation."""
        return self.row(index, np.random.default_rng(index))

    def most_segments(self) -> int | None:
        """Return the highest segment id of a row, in which segments are numbered from 1 in order
        and padding comes last; None if it is not known."""
        return None

    def sources(self, name: str) -> "list[tuple[str, Rows]]":
        """Return the rows of each source by its name; `name` is that of a single source."""
        return [(name, self)]

    @property
    def numbers(self) -> int:
        """One more than the highest number of a row."""
        return len(self)

    def order(self, seed: int, batch_size: int) -> "grain.MapDataset[int]":
        """Return the numbers of the rows that a run reads, as an endless dataset: all rows in each
        epoch, shuffled anew."""
        return numbers_below(len(self)).shuffle(seed=seed).repeat()


def numbers_below(count: int) -> "grain.MapDataset[int]":
    """Return the numbers from 0 to `count` - 1 as a dataset."""
    import grain  # its start takes over a second, which commands without batches do without

    return grain.MapDataset.range(count)


def numbered(sizes: list[int]) -> np.ndarray:
    """Return the segments of pieces of these sizes, from 1: int32 [sum of sizes]."""
    return np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)


class TextRows(Rows):
    """Rows cut from a store, in order: row i reads `window` tokens from place i `stride` on, the
    last one maybe fewer; `window` is 0 where each row holds what it can."""

    store: TokenStore

    def __init__(self, store: TokenStore, window: int, stride: int) -> None:
        super().__init__(store)
        self.window = window
        self.stride = stride

    def has_tokens(self, number: int) -> bool:
        """Return whether there are so many, which does not wait for more of a text in the
        making."""
        return self.store.held(number) == number

    def __len__(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.stride))

    def most_segments(self) -> int | None:
        """Count as `Rows.most_segments`, where each document of a row is a segment."""
        ends = self.store.ends()
        starts = np.arange(len(self), dtype=np.int64) * self.stride
        # A document that begins in a row after its first token is a segment more.
        stops = np.searchsorted(ends, starts + self.window)
        begun = stops - np.searchsorted(ends, starts + 1, side="right")
        return int(begun.max(initial=0)) + 1

    def weights(self, start: int, used: int) -> np.ndarray:
        """Return 1 for each target of `used` places from `start` on, and 0 for a BOS: float32
        [used]."""
        return self.store.is_text(start + 1, start + 1 + used).astype(np.float32)

    def segments(self, start: int, used: int) -> np.ndarray:
        """Return the documents of `used` places from `start` on, numbered from 1: int32 [used].

        The end token before a document is the first token of its segment, so the first token of the
        document is a target too; a document that begins with a BOS is a segment from it on.
        """
        before = 0 if self.store.beginning else 1
        begins = self.store.boundaries(start, start + used + before) - start - before
        segments = np.zeros(used, np.int32)
        segments[begins[begins > 0]] = 1
        return np.cumsum(segments, dtype=np.int32) + 1


class CausalRows(TextRows):
    """Each token of a store but the first, and the BOS of documents, is a target once.

    Row i reads tokens i T to i T + T; a last row that the store cannot fill is padded (token 0,
    weight 0, segment 0).
    """

    def __init__(self, store: TokenStore, data: DataConfig) -> None:
        super().__init__(store, data.sequence_length + 1, data.sequence_length)
        self.packed = data.packing == "documents"

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        return self.row_from(int(index) * self.stride)

    def row_from(self, start: int) -> NumpyBatch:
        """Return the row whose first token is at place `start` of the store."""
        window = self.store.read(start, start + self.window)
        used = len(window) - 1
        weights = self.weights(start, used)
        row = {"tokens": window[:-1], "targets": window[1:], "weights": weights}
        if self.packed:
            row["segment_ids"] = self.segments(start, used)
        return padded(row, self.stride)


class OrderedRows(CausalRows):
    """The rows of `CausalRows`, which a run reads in the order of the text, each time anew. Until
    all are read their number is not needed, so the text may be in the making."""

    def order(self, seed: int, batch_size: int) -> "grain.MapDataset[int]":
        def row_number(number: int) -> int:
            # A row has a token to read and one to predict.
            if self.has_tokens(number * self.stride + 2):
                return number
            return number % len(self)

        return numbers_below(sys.maxsize).map(row_number)


class WindowRows(CausalRows):
    """Row i reads the T + 1 tokens from place i of the store on, of which all but the last predict
    the next one.

    A run draws its rows with replacement, from all places at which a whole window begins. Its
    length in epochs counts tokens: an epoch is as many windows as the store has rows.
    """

    @property
    def numbers(self) -> int:
        return max(0, self.tokens - self.window + 1)

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        return self.row_from(int(index))

    def order(self, seed: int, batch_size: int) -> "grain.MapDataset[int]":
        """Return the places of the windows of a run, as an endless dataset: entry `step *
        batch_size + row` is that of a row of a step."""
        count = self.numbers
        return numbers_below(sys.maxsize).map(lambda number: window_start(seed, number, count))


def window_start(seed: int, number: int, count: int) -> int:
    """Return where window `number` of a sequence of random windows begins: any of the `count`
    positions 0 to count - 1, each as likely, independently of the other windows.

    Drawn by Philox, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3"): `seed` is its key and `number` its counter, both at least 0, so that any
    window is computed alone, in any order and by any process.
    """
    # A window may take several numbers of the generator, which counts them in its lowest 64 bits.
    generator = np.random.Philox(key=seed, counter=number << 64)
    return int(np.random.Generator(generator).integers(count))


def joined(*sequences: Sequence[int] | np.ndarray) -> np.ndarray:
    """Join ids, one after the other: int32."""
    return np.concatenate([np.asarray(ids, np.int32) for ids in sequences])


def padded(row: NumpyBatch, length: int, others: Mapping[str, int] = {}) -> NumpyBatch:
    """Return each array filled with zeros to a length, which may be another for `others`: token 0,
    weight 0, segment 0."""
    longer = {}
    for name, array in row.items():
        longer[name] = np.zeros(others.get(name, length), array.dtype)
        longer[name][: len(array)] = array
    return longer


def joined_row(pieces: list[NumpyBatch], length: int, others: Mapping[str, int] = {}) -> NumpyBatch:
    """Return the arrays of a row: those of its pieces one after the other, numbered from 1 as
    segments, and padding as `padded` has it."""
    # Each array [T] of its stream; pieces follow each other in all streams alike.
    row = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    for name, array in SEGMENTS.items():
        if array in row:
            row[name] = numbered([len(piece[array]) for piece in pieces])
    return padded(row, length, others)


def stacked(rows: list[NumpyBatch]) -> NumpyBatch:
    """Return the arrays of rows, each with the rows as its first axis."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class BestFit:
    """Which pieces of a store each row holds: whole documents, or parts of one that is longer than
    `capacity`.

    A longer document fills rows of its own, and the rest of it is packed like the others. `ends`
    [documents] are the places after each document, ascending from 1; `filled` is the fraction of
    the rows that holds tokens.
    """

    def __init__(self, ends: np.ndarray, capacity: int) -> None:
        sizes = np.diff(ends, prepend=0)
        begins = ends - sizes
        # [documents]: how many full rows each document makes, and how many tokens remain
        full_rows, remainders = np.divmod(sizes, capacity)
        self._capacity = capacity
        # The full rows of a document begin at begin, begin + capacity, ...: with f full rows
        # before it, row f + i begins at (begin - f capacity) + (f + i) capacity.
        before = np.cumsum(full_rows) - full_rows
        rows_before = np.repeat(begins - before * capacity, full_rows)
        self._full = rows_before + np.arange(full_rows.sum()) * capacity
        is_left = remainders > 0
        sizes = remainders[is_left].astype(np.min_scalar_type(capacity))
        rows = best_fit(sizes, capacity)
        # Pieces sorted by row: those of row r are _bounds[r] to _bounds[r + 1].
        order = np.argsort(rows, kind="stable")
        self._begins = (ends - remainders)[is_left][order]
        self._sizes = sizes[order]
        self._bounds = np.append(0, np.cumsum(np.bincount(rows)))
        self.filled = float(ends[-1] / (len(self) * capacity))

    def __len__(self) -> int:
        return len(self._bounds) - 1 + len(self._full)

    def most_pieces(self) -> int:
        """Return the most pieces that a row holds."""
        return max(int(np.diff(self._bounds).max(initial=0)), 1)

    def pieces(self, row: int) -> Iterator[tuple[int, int]]:
        """Return (first place, place after the last) of each piece of a row."""
        packed = len(self._bounds) - 1
        if row >= packed:
            begin = int(self._full[row - packed])
            return iter([(begin, begin + self._capacity)])
        in_row = slice(self._bounds[row], self._bounds[row + 1])
        begins = self._begins[in_row]
        return zip(begins.tolist(), (begins + self._sizes[in_row]).tolist(), strict=True)


class BestFitRows(Rows):
    """Every token of a store is a target once, and its input is the one before it; the store's
    first follows an end token. Where documents begin with a BOS, that is no target: each token is
    then an input once, and its target is the one after it, none for the last one of a document.

    A row is a `BestFit` row: each piece is a segment, and the rest of the row is padded (token 0,
    weight 0, segment 0).
    """

    store: TokenStore

    def __init__(self, store: TokenStore, data: DataConfig, end_token: int) -> None:
        super().__init__(store)
        self.length = data.sequence_length
        self._fit = BestFit(store.ends(), self.length)
        self._end = np.array([end_token], np.int32)
        self.filled = self._fit.filled

    def __len__(self) -> int:
        return len(self._fit)

    def most_segments(self) -> int | None:
        return self._fit.most_pieces()

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        pieces = []
        # A piece is what is read, or with 1 what is predicted, from the token before it on.
        back = 0 if self.store.beginning else 1
        for begin, end in self._fit.pieces(int(index)):
            window = self.store.read(max(begin - back, 0), end + 1 - back)
            # Before the store's first token is an end token, and after its last one a 0.
            before = self._end[: max(back - begin, 0)]
            after = np.zeros(end + 1 - begin - len(window) - len(before), np.int32)
            window = np.concatenate([before, window, after])
            weights = self.store.is_text(begin + 1 - back, end + 1 - back).astype(np.float32)
            pieces.append({"tokens": window[:-1], "targets": window[1:], "weights": weights})
        return joined_row(pieces, self.length)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece, from 0: the largest pieces go first, each to the fullest row
    that has room for it.

    `sizes` [N] are from 1 to `capacity`. Pieces of one size are placed together, and so are rows
    with equal room, so the time depends on the number of different sizes.
    """
    # A stable sort by capacity - size is one by descending size; the small type makes it a radix
    # sort. counts [capacity + 1] is how many pieces have each size.
    order = np.argsort((capacity - sizes).astype(np.min_scalar_type(capacity)), kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    # The row of each piece, in that order.
    placed = np.empty(len(sizes), np.int64)
    open_rows = _OpenRows(capacity)
    done = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        stop = done + int(counts[size])
        while done < stop:
            # A row that takes a piece is then the fullest with room for the next one, as long as it
            # has room: so each of the rows with least room takes as many pieces as fit, `each`.
            space = open_rows.least(size)
            each = space // size
            rows = open_rows.take(space, -(-(stop - done) // each))
            number = min(stop - done, each * len(rows))
            placed[done : done + number] = np.repeat(rows, each)[:number]
            # The last row may take fewer, `odd`.
            full, odd = divmod(number, each)
            open_rows.put(space - each * size, rows[:full])
            open_rows.put(space - odd * size, rows[full:])
            done += number
    rows_of_pieces = np.empty_like(placed)
    rows_of_pieces[order] = placed
    return rows_of_pieces


class _OpenRows:
    """Rows by the room that they have left; there are always new ones."""

    def __init__(self, capacity: int) -> None:
        # Arrays of row numbers, by the room of these rows.
        self._rows: dict[int, list[np.ndarray]] = {}
        # Bit r is set where rows have room r; new ones have `capacity`.
        self._some = 1 << capacity
        self._capacity = capacity
        self._made = 0

    def least(self, size: int) -> int:
        """Return the least room that some row has and that is enough for `size`."""
        # Bit r of `enough` stands for room size + r, and x & -x is the lowest bit of x.
        enough = self._some >> size
        return size + (enough & -enough).bit_length() - 1

    def take(self, space: int, number: int) -> np.ndarray:
        """Take rows with that much room, `number` or as many as there are."""
        if space == self._capacity:
            self._made += number
            return np.arange(self._made - number, self._made)
        groups = self._rows[space]
        row_groups = []
        while groups and number:
            rows = groups.pop()
            row_groups.append(rows[:number])
            if len(rows) > number:
                groups.append(rows[number:])
            number -= len(row_groups[-1])
        if not groups:
            self._some ^= 1 << space
        return np.concatenate(row_groups)

    def put(self, space: int, rows: np.ndarray) -> None:
        if space and len(rows):
            self._rows.setdefault(space, []).append(rows)
            self._some |= 1 << space
