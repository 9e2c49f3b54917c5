"""Rows of several sources, in stated shares."""

import bisect
import itertools
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


class Phase(NamedTuple):
    """The first row of a phase, the rows of each source drawn before it, and its weights."""

    begin: int
    drawn: list[int]
    weights: list[int]

    def drawn_at(self, row: int) -> list[int]:
        """Return the rows of each source drawn before row `row` of the run, which is in this
        phase."""
        in_phase = counts(row - self.begin, self.weights)
        return [sum(pair) for pair in zip(self.drawn, in_phase, strict=True)]


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
        self.names = [name for name, _ in sources]
        self.source_rows = [rows for _, rows in sources]
        self.documents = sum(rows.documents for rows in self.source_rows)
        self.bytes = sum(rows.bytes for rows in self.source_rows)
        # In their order, which decides what a row number means.
        self.fingerprint = "+".join(rows.fingerprint for rows in self.source_rows)
        sizes = [len(rows) for rows in self.source_rows]
        numbers = (rows.numbers for rows in self.source_rows)
        # The first number of the rows of each source.
        self._firsts = list(itertools.accumulate(numbers, initial=0))
        # The mean over rows, of which sources have different numbers.
        filled = sum(rows.filled * size for rows, size in zip(self.source_rows, sizes, strict=True))
        self.filled = filled / max(1, len(self))
        # Without weights every row is read as often.
        self._shares = [(0, sizes)]
        if data.weights.strip():
            self._shares = []
            for step, text in phases("data.weights", data.weights):
                weights = _numbers(text)
                # Whole numbers in the same proportion.
                scale = math.lcm(*(weight.denominator for weight in weights))
                self._shares.append((step, [int(weight * scale) for weight in weights]))

    def most_segments(self) -> int | None:
        # Of one source whose number is not known, that of all is not.
        segment_counts = [rows.most_segments() for rows in self.source_rows]
        stated_counts = [count for count in segment_counts if count is not None]
        return max(stated_counts) if len(stated_counts) == len(segment_counts) else None

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
        run_phases = self._phases(batch_size)

        def row_number(number: int) -> int:
            at = bisect.bisect_right(run_phases, number, key=lambda phase: phase.begin)
            phase = run_phases[at - 1]
            # Of one more row exactly one source has one more: row `number` is of that source.
            before = phase.drawn_at(number)
            after = phase.drawn_at(number + 1)
            grown = [now - then for then, now in zip(before, after, strict=True)]
            source = grown.index(1)
            return self._firsts[source] + int(orders[source][before[source]])

        return numbers_below(sys.maxsize).map(row_number)

    def shares(self, steps: int, batch_size: int) -> list[Drawn]:
        """Return what a run of so many steps draws of each source."""
        rows = steps * batch_size
        last = [phase for phase in self._phases(batch_size) if phase.begin < rows][-1]
        read = zip(self.names, last.drawn_at(rows), self.source_rows, strict=True)
        return [
            Drawn(name, number, number / rows, number / len(source_rows))
            for name, number, source_rows in read
        ]

    def _phases(self, batch_size: int) -> list[Phase]:
        # A phase begins where the one before ends, so that no row of a source is skipped.
        run_phases = [Phase(0, [0] * len(self.source_rows), self._shares[0][1])]
        for step, weights in self._shares[1:]:
            begin = step * batch_size
            run_phases.append(Phase(begin, run_phases[-1].drawn_at(begin), weights))
        return run_phases


def check_shares(names: Sequence[str], data: DataConfig) -> None:
    """Raise ConfigError where data.weights are not shares of the sources of these names."""
    text = data.weights.strip()
    if not text:
        return
    for _, value in phases("data.weights", text):
        numbers = _numbers(value)
        if len(numbers) != len(names) or min(numbers) < 0 or not any(numbers):
            raise ConfigError(
                f"data.weights={text!r}: {value!r} must be {len(names)}"
                f" {'number' if len(names) == 1 else 'numbers'}, none negative and not all 0:"
                f" one for each source of data.train, in this order: {', '.join(names)}."
            )


def phases(setting: str, text: str) -> list[tuple[int, str]]:
    """Return (first step, value) of each phase of 'FIRST; STEP: NEXT; ...', in order; the first
    phase begins at step 0."""
    changes: list[tuple[int, str]] = []
    for entry in text.split(";"):
        step, colon, value = entry.partition(":") if changes else ("0", ":", entry)
        number = int(step) if step.strip().isdecimal() else -1
        if not colon or not value.strip() or number < 0 or (changes and number <= changes[-1][0]):
            raise ConfigError(
                f"{setting}={text!r}: {entry.strip()!r} is not allowed there. Write the first"
                " value, and then '; STEP: VALUE' for each change, steps ascending from 1."
            )
        changes.append((number, value.strip()))
    return changes


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


def _numbers(text: str) -> list[Fraction]:
    """Read numbers separated by spaces, exactly; -1 for what is no number."""
    numbers = []
    for word in text.split():
        try:
            # 0.1 exactly, as a float is not: the source of a far row would depend on rounding.
            numbers.append(Fraction(word))
        except (ValueError, ZeroDivisionError):
            numbers.append(Fraction(-1))
    return numbers
