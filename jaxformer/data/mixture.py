"""Rows of several sources, in stated shares."""

import bisect
import itertools
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.phases import phases
from jaxformer.data.rows import Drawn, NumpyBatch, Rows
from jaxformer.files import ConfigError


class Phase(NamedTuple):
    """The first row of a phase, the rows of each source drawn before it, and its weights."""

    begin: int
    drawn: list[int]
    weights: list[int]

    def drawn_at(self, row: int) -> list[int]:
        """The rows of each source drawn before row `row` of the run, which is in this phase."""
        own = counts(row - self.begin, self.weights)
        return [before + more for before, more in zip(self.drawn, own, strict=True)]


class Mixture(Rows):
    """Rows of several named sources: one after the other by number, and to train on in the shares
    that data.weights or data.epochs state, or else in proportion to the sources' rows.

    A fixed rule gives the source of row n of a run: at any n from a phase's beginning each source
    is within log2(sources) / 2 rows of its share, so within one of two to four. A source continues
    where it was when shares change, and begins again, in another order, when all of it was read.
    Raises ConfigError where `check_shares` does.
    """

    def __init__(self, sources: Sequence[tuple[str, Rows]], data: DataConfig) -> None:
        self.names, self.parts = [name for name, _ in sources], [rows for _, rows in sources]
        check_shares(self.names, data)
        self.tokens = sum(part.tokens for part in self.parts)
        self.documents = sum(part.documents for part in self.parts)
        self.bytes = sum(part.bytes for part in self.parts)
        self.fingerprint = "+".join(part.fingerprint for part in self.parts)
        sizes = [len(part) for part in self.parts]
        numbers = (part.numbers for part in self.parts)
        self._firsts = list(itertools.accumulate(numbers, initial=0))  # of the rows of each source
        filled = sum(part.filled * size for part, size in zip(self.parts, sizes, strict=True))
        self.filled = filled / max(1, len(self))
        times = _numbers(data.epochs) or [Fraction(1)] * len(sizes)
        shares = [(0, [time * size for time, size in zip(times, sizes, strict=True)])]
        if data.weights.strip():
            shares = [(step, _numbers(text)) for step, text in phases("data.weights", data.weights)]
        self._shares = [(step, _whole(weights)) for step, weights in shares]

    def most_segments(self) -> int | None:
        found = [part.most_segments() for part in self.parts]
        known = [most for most in found if most is not None]
        return max(known) if len(known) == len(found) else None

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def numbers(self) -> int:
        return self._firsts[-1]

    def sources(self, name: str) -> list[tuple[str, Rows]]:
        return list(zip(self.names, self.parts, strict=True))

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        part = bisect.bisect_right(self._firsts, index) - 1
        return self.parts[part].row(index - self._firsts[part], rng)

    def order(self, seed: int, batch_size: int) -> Any:
        import grain

        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts)).tolist()
        # [source][n] is the row, numbered within the source, that is the n-th drawn of it.
        parts = [part.order(own, batch_size) for part, own in zip(self.parts, seeds, strict=True)]
        run_phases = self._phases(batch_size)

        def row_number(number: int) -> int:
            at = bisect.bisect_right(run_phases, number, key=lambda phase: phase.begin)
            phase = run_phases[at - 1]
            # Of one more row exactly one source has one more: row `number` is of that source.
            before, after = phase.drawn_at(number), phase.drawn_at(number + 1)
            grown = [more > less for less, more in zip(before, after, strict=True)]
            part = grown.index(True)
            return self._firsts[part] + int(parts[part][before[part]])

        return grain.MapDataset.range(sys.maxsize).map(row_number)

    def shares(self, steps: int, batch_size: int) -> list[Drawn]:
        """What a run of so many steps draws of each source."""
        rows = steps * batch_size
        last = [phase for phase in self._phases(batch_size) if phase.begin < rows][-1]
        read = zip(self.names, last.drawn_at(rows), self.parts, strict=True)
        return [
            Drawn(name, number, number / rows, number / len(part)) for name, number, part in read
        ]

    def _phases(self, batch_size: int) -> list[Phase]:
        found = [Phase(0, [0] * len(self.parts), self._shares[0][1])]
        for step, weights in self._shares[1:]:
            begin = step * batch_size
            found.append(Phase(begin, found[-1].drawn_at(begin), weights))
        return found


def check_shares(names: Sequence[str], data: DataConfig) -> None:
    """Raises ConfigError where data.weights or data.epochs are not shares of the sources of these
    names."""
    given = {"data.weights": data.weights.strip(), "data.epochs": data.epochs.strip()}
    found = {setting: text for setting, text in given.items() if text}
    sources = ", ".join(names)
    if len(found) > 1:
        raise ConfigError(
            f"data.weights={data.weights!r} and data.epochs={data.epochs!r} both say how much is"
            f" read of {sources}: leave one of them empty."
        )
    for setting, text in found.items():
        for _, value in phases(setting, text) if setting == "data.weights" else [(0, text)]:
            numbers = _numbers(value)
            if len(numbers) != len(names) or min(numbers) < 0 or not any(numbers):
                raise ConfigError(
                    f"{setting}={text!r}: {value!r} must be {len(names)}"
                    f" number{'s' * (len(names) > 1)}, none negative and not all 0: one for each"
                    f" source of data.train, in this order: {sources}."
                )


def counts(number: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `number` rows are of each source.

    `number` is divided between the two halves of the sources by their weights, to the nearest whole
    row, and within each half likewise: each of the log2(sources) divisions adds at most half a row
    of error. No count ever falls as `number` grows.
    """
    if len(weights) == 1:
        return [number]
    middle = len(weights) // 2
    whole, half = sum(weights), sum(weights[:middle])
    first = (2 * number * half + whole) // max(1, 2 * whole)  # number * half / whole, rounded
    return [*counts(first, weights[:middle]), *counts(number - first, weights[middle:])]


def _numbers(text: str) -> list[Fraction]:
    """Numbers separated by spaces, exactly; -1 for what is no number."""
    found = []
    for word in text.split():
        try:
            found.append(Fraction(word))
        except (ValueError, ZeroDivisionError):
            found.append(Fraction(-1))
    return found


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """Whole numbers in the same proportion."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    return [int(weight * scale) for weight in weights]
