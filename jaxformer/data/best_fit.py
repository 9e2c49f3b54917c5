"""Packing that cuts no document that fits in a row: best-fit decreasing over lengths
(arXiv:2404.10830)."""

from collections.abc import Iterator

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.rows import NumpyBatch, Rows, numbered, padded
from jaxformer.data.store import TokenStore


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
        """The most pieces that a row holds."""
        return max(int(np.diff(self._bounds).max(initial=0)), 1)

    def pieces(self, row: int) -> Iterator[tuple[int, int]]:
        """(first place, place after the last) of each piece of a row."""
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

    def __init__(self, store: TokenStore, data: DataConfig, end_token: int) -> None:
        self.store = store
        self.length = data.sequence_length
        self.take_counts(store)
        self._fit = BestFit(store.ends(), self.length)
        self._end = np.array([end_token], np.int32)
        self.filled = self._fit.filled

    def __len__(self) -> int:
        return len(self._fit)

    def most_segments(self) -> int | None:
        return self._fit.most_pieces()

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        pieces = [*self._fit.pieces(int(index))]
        if self.store.beginning:
            windows = [self._with_one_after(begin, end) for begin, end in pieces]
            learned = [self.store.is_text(begin + 1, end + 1) for begin, end in pieces]
        else:
            windows = [self._with_one_before(begin, end) for begin, end in pieces]
            learned = [np.ones(len(window) - 1, bool) for window in windows]
        weights = np.concatenate(learned).astype(np.float32)
        row = {
            "tokens": np.concatenate([window[:-1] for window in windows]),
            "targets": np.concatenate([window[1:] for window in windows]),
            "weights": weights,
            "segment_ids": numbered([len(window) - 1 for window in windows]),
        }
        return padded(row, dict.fromkeys(row, self.length))

    def _with_one_after(self, begin: int, end: int) -> np.ndarray:
        """Tokens begin to end, and the one at `end`, or 0 where the store ends there."""
        tokens = self.store.read(begin, end + 1)
        return np.pad(tokens, (0, end + 1 - begin - len(tokens)))

    def _with_one_before(self, begin: int, end: int) -> np.ndarray:
        if begin:
            return self.store.read(begin - 1, end)
        return np.concatenate([self._end, self.store.read(0, end)])


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, from 0: the largest pieces go first, each to the fullest row that has
    room for it.

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
        """The least room that some row has and that is enough for `size`."""
        # Bit r of `enough` stands for room size + r, and x & -x is the lowest bit of x.
        enough = self._some >> size
        return size + (enough & -enough).bit_length() - 1

    def take(self, space: int, number: int) -> np.ndarray:
        """Rows with that much room, `number` or as many as there are."""
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
