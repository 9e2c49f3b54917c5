"""Packing that cuts no document it need not: best-fit decreasing over lengths
(arXiv:2404.10830)."""

from collections.abc import Iterator

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.rows import NumpyBatch, Rows, padded
from jaxformer.data.store import TokenStore


class BestFit:
    """Which stretches of a store each row holds: whole documents, or parts of one that is longer
    than `capacity`.

    A longer document fills rows of its own, and what is left of it is packed as the others are.
    `ends` [documents] are the places after each document, ascending from 1; `filled` is the part of
    the rows that holds tokens.
    """

    def __init__(self, ends: np.ndarray, capacity: int) -> None:
        sizes = np.diff(ends, prepend=0)
        begins, (whole, rest) = ends - sizes, np.divmod(sizes, capacity)
        firsts = np.cumsum(whole) - whole
        self._capacity = capacity
        self._full = (
            np.repeat(begins - firsts * capacity, whole) + np.arange(whole.sum()) * capacity
        )
        kept = rest > 0
        sizes = rest[kept].astype(np.min_scalar_type(capacity))
        rows = best_fit(sizes, capacity)
        order = np.argsort(rows, kind="stable")
        self._begins, self._sizes = (ends - rest)[kept][order], sizes[order]
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        self.filled = float(ends[-1] / (len(self) * capacity))

    def __len__(self) -> int:
        return len(self._bounds) - 1 + len(self._full)

    def stretches(self, row: int) -> Iterator[tuple[int, int]]:
        """(first place, place after the last) of each stretch of a row."""
        packed = len(self._bounds) - 1
        if row >= packed:
            begin = int(self._full[row - packed])
            return iter([(begin, begin + self._capacity)])
        held = slice(self._bounds[row], self._bounds[row + 1])
        begins = self._begins[held]
        return zip(begins.tolist(), (begins + self._sizes[held]).tolist(), strict=True)


class BestFitRows(Rows):
    """Every token of a store is a target once, its input the one before it; the store's first
    follows an end token.

    A row is a `BestFit` row: each stretch is a segment, and what it leaves free is padded (token 0,
    weight 0, segment 0).
    """

    def __init__(self, store: TokenStore, data: DataConfig, end_token: int) -> None:
        self.store, self.length = store, data.sequence_length
        self.tokens, self.documents, self.bytes = store.tokens, store.documents, store.bytes
        self.fingerprint = store.fingerprint
        self._fit, self._end = BestFit(store.ends(), self.length), np.array([end_token], np.int32)
        self.filled = self._fit.filled

    def __len__(self) -> int:
        return len(self._fit)

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        parts = [
            self._with_one_before(begin, end) for begin, end in self._fit.stretches(int(index))
        ]
        targets = np.concatenate([part[1:] for part in parts])
        row = {
            "tokens": np.concatenate([part[:-1] for part in parts]),
            "targets": targets,
            "weights": np.ones(len(targets), np.float32),
            "segment_ids": numbered([len(part) - 1 for part in parts]),
        }
        return padded(row, dict.fromkeys(row, self.length))

    def _with_one_before(self, begin: int, end: int) -> np.ndarray:
        return (
            self.store.read(begin - 1, end)
            if begin
            else np.concatenate([self._end, self.store.read(0, end)])
        )


def numbered(sizes: list[int]) -> np.ndarray:
    """The segments of stretches of these sizes, from 1: int32."""
    return np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, from 0: the largest pieces go first, each to the fullest row that has
    room for it.

    `sizes` [N] are from 1 to `capacity`. Pieces of a size, and rows with as much room, are dealt
    with together, so that the time follows how many sizes there are.
    """
    order = np.argsort((capacity - sizes).astype(np.min_scalar_type(capacity)), kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    placed = np.empty(len(sizes), np.int64)
    open_rows = _OpenRows(capacity)
    done = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        stop = done + int(counts[size])
        while done < stop:
            space = open_rows.least(size)
            each = (
                space // size
            )  # a row that takes one is the fullest that has room for the next, while it has
            rows = open_rows.take(space, -(-(stop - done) // each))
            number = min(stop - done, each * len(rows))
            placed[done : done + number] = np.repeat(rows, each)[:number]
            full, odd = divmod(number, each)
            open_rows.put(space - each * size, rows[:full])
            open_rows.put(space - odd * size, rows[full:])
            done += number
    found = np.empty_like(placed)
    found[order] = placed
    return found


class _OpenRows:
    """Rows by the room that they have left; new ones are always to be had."""

    def __init__(self, capacity: int) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._some = 1 << capacity  # bit r is set where rows have room for r; new rows have `room`
        self._capacity, self._made = capacity, 0

    def least(self, size: int) -> int:
        """The least room that some row has and that is enough for `size`."""
        enough = self._some >> size
        return size + (enough & -enough).bit_length() - 1

    def take(self, space: int, number: int) -> np.ndarray:
        """Rows with that much room, `number` or as many as there are."""
        if space == self._capacity:
            self._made += number
            return np.arange(self._made - number, self._made)
        held, taken = self._rows[space], []
        while held and number:
            rows = held.pop()
            taken.append(rows[:number])
            if len(rows) > number:
                held.append(rows[number:])
            number -= len(taken[-1])
        if not held:
            self._some ^= 1 << space
        return np.concatenate(taken)

    def put(self, space: int, rows: np.ndarray) -> None:
        if space and len(rows):
            self._rows.setdefault(space, []).append(rows)
            self._some |= 1 << space
