"""Packs whole examples into rows, each with a segment of its own."""

import numpy as np

from jaxformer.data.examples import ExampleStore
from jaxformer.data.rows import NumpyBatch, Rows
from jaxformer.data.sources import fingerprint
from jaxformer.data.templates import Template

# Rows that an example may go to; when none has room, the fullest is closed for a new one.
OPEN_ROWS = 512


class ExampleRows(Rows):
    """Rows of whole examples, packed in an order that the seed gives; one example a row where the
    template does not pack. Examples without a target are in no row.

    `left_out` counts these, and `cut` those of the others that are longer than a row, which the
    template cuts; `filled` is the fraction of the rows that holds tokens.
    """

    def __init__(self, store: ExampleStore, template: Template, seed: int) -> None:
        self.store, self.template = store, template
        self.take_counts(store)
        # [examples, streams] and [streams]
        sizes, capacity = template.sizes(store.lengths()), np.array(template.capacity)
        learned = template.have_targets(store)
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
            left[:, slot], row_of_slot[slot] = capacity, len(rows)
            rows.append([])
        left[:, slot] -= size[:, 0]
        rows[row_of_slot[slot]].append(index)
    return rows
