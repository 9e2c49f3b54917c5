"""Rows of several sources, in stated shares."""

import bisect
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.rows import SOURCE_IDS, NumpyBatch, Rows, numbers_below
from jaxformer.files import ConfigError

if TYPE_CHECKING:
    import grain


class Drawn(NamedTuple):
    """What a run draws of a source: rows, their share of all, and how often that is each of its
    rows."""

    name: str
    rows: int
    share: float
    epochs: float


class Mixture(Rows):
    """Rows of several named sources: one after the other by number, and to train on in the shares
    that data.weights states, or else in proportion to the sources' rows.

    A fixed rule gives the source of row n of a run: at any n from a phase's beginning each source
    is within log2(sources) / 2 rows of its share, so within one of two to four. A source continues
    where it was when shares change, and begins again, in another order, when all of it was read. A
    row also has the index of its source, "source_ids", int32 [].
    """

    def __init__(self, sources: Sequence[tuple[str, Rows]], data: DataConfig) -> None:
        self.names: list[str] = []
        self.source_rows: list[Rows] = []
        self.documents = 0
        self.bytes = 0
        # The first number of the rows of each source, and the number of all.
        self._firsts = [0]
        filled = 0.0
        for name, rows in sources:
            self.names.append(name)
            self.source_rows.append(rows)
            self.documents += rows.documents
            self.bytes += rows.bytes
            self._firsts.append(self._firsts[-1] + rows.numbers)
            filled += rows.filled * len(rows)
        # The mean over rows, of which sources have different numbers.
        self.filled = filled / max(1, len(self))
        # In their order, which decides what a row number means.
        self.fingerprint = "+".join(rows.fingerprint for rows in self.source_rows)
        # Without weights every row is read as often.
        self._shares = shares_of(self.names, data) or [(0, [*map(len, self.source_rows)])]

    def most_segments(self) -> int | None:
        most = 0
        for rows in self.source_rows:
            count = rows.most_segments()
            # Of one source it is not known, so it is not of all.
            if count is None:
                return None
            most = max(most, count)
        return most

    @property
    def tokens(self) -> int:
        return sum(rows.tokens for rows in self.source_rows)

    def __len__(self) -> int:
        return sum(map(len, self.source_rows))

    @property
    def numbers(self) -> int:
        return self._firsts[-1]

    def sources(self, name: str) -> list[tuple[str, Rows]]:
        return list(zip(self.names, self.source_rows, strict=True))

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        # `_firsts` ascends, so the last one that is not above the number is its source's.
        source = bisect.bisect_right(self._firsts, index) - 1
        row = self.source_rows[source].row(index - self._firsts[source], rng)
        return row | {SOURCE_IDS: np.array(source, np.int32)}

    def order(self, seed: int, batch_size: int) -> "grain.MapDataset[int]":
        # A seed for each source, so that equal sources are not read in step.
        seeds = np.random.SeedSequence(seed).generate_state(len(self.source_rows)).tolist()
        # [source][n] is the row, numbered within the source, that is the n-th drawn of it.
        orders = [
            rows.order(source_seed, batch_size)
            for rows, source_seed in zip(self.source_rows, seeds, strict=True)
        ]

        def row_number(number: int) -> int:
            # Of one more row exactly one source has one more: row `number` is of that source.
            before = self.drawn(number, batch_size)
            source = int((self.drawn(number + 1, batch_size) - before).argmax())
            return self._firsts[source] + int(orders[source][int(before[source])])

        return numbers_below(sys.maxsize).map(row_number)

    def drawn(self, number: int, batch_size: int) -> np.ndarray:
        """Return how many of the first `number` rows of a run are of each source: int64
        [sources]."""
        drawn = np.zeros(len(self.names), np.int64)
        # A phase begins where the one before ends, so that no row of a source is skipped.
        stop = number
        for step, shares in reversed(self._shares):
            begin = step * batch_size
            if begin < stop:
                drawn += counts(stop - begin, shares)
                stop = begin
        return drawn

    def shares(self, steps: int, batch_size: int) -> list[Drawn]:
        """Return what a run of so many steps draws of each source."""
        rows = steps * batch_size
        shares = []
        for name, number, source_rows in zip(
            self.names, self.drawn(rows, batch_size).tolist(), self.source_rows, strict=True
        ):
            shares.append(Drawn(name, number, number / rows, number / len(source_rows)))
        return shares


def shares_of(names: Sequence[str], data: DataConfig) -> list[tuple[int, list[int]]]:
    """Return the first step of each phase of data.weights, 'FIRST; STEP: NEXT; ...', and the shares
    of the sources of these names from it on, as whole numbers; none where it is empty. Raises
    ConfigError."""
    text = data.weights.strip()
    phases: list[tuple[int, list[int]]] = []
    if not text:
        return phases
    last = -1
    for entry in text.split(";"):
        step = 0
        value = entry.strip()
        if phases:
            number, _, value = map(str.strip, entry.partition(":"))
            step = int(number) if number.isdecimal() else -1
        if not value or step <= last:
            raise ConfigError(
                f"data.weights={text!r}: {entry.strip()!r} is not allowed there. Write the first"
                " value, and then '; STEP: VALUE' for each change, steps ascending from 1."
            )
        last = step
        weights = []
        for word in value.split():
            try:
                # 0.1 exactly, as a float is not: the source of a far row would depend on rounding.
                weights.append(Fraction(word))
            except (ValueError, ZeroDivisionError):
                weights.append(Fraction(-1))
        if len(weights) != len(names) or min(weights) < 0 or not any(weights):
            raise ConfigError(
                f"data.weights={text!r}: {value!r} must be {len(names)}"
                f" {'number' if len(names) == 1 else 'numbers'}, none negative and not all 0:"
                f" one for each source of data.train, in this order: {', '.join(names)}."
            )
        # Whole numbers in the same proportion.
        scale = math.lcm(*(weight.denominator for weight in weights))
        phases.append((step, [int(weight * scale) for weight in weights]))
    return phases


def counts(number: int, weights: Sequence[int]) -> list[int]:
    """Return how many of the first `number` rows are of each source.

    `number` is divided between the two halves of the sources by their weights, to the nearest whole
    row, and within each half likewise: each of the log2(sources) divisions adds at most half a row
    of error. No count ever falls as `number` grows.
    """
    if len(weights) == 1:
        return [number]
    middle = len(weights) // 2
    total = sum(weights)
    half = sum(weights[:middle])
    # number * half / total, rounded.
    first = (2 * number * half + total) // max(1, 2 * total)
    return [*counts(first, weights[:middle]), *counts(number - first, weights[middle:])]
