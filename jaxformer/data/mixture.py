"""Rows of several sources, in stated shares."""

import bisect
import itertools
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data.phases import phases
from jaxformer.data.rows import NumpyBatch, Rows


class Drawn(NamedTuple):
    """What a run draws of a source: rows, their share of all, and how often that is each of its
    rows."""

    name: str
    rows: int
    share: float
    epochs: float


class Mixture(Rows):
    """Rows of several sources, each with its name: one after the other by number, and to train on
    in the shares that data.weights or data.epochs state, or else in proportion to the sources'
    rows.

    Row n of a run is of one source, by rule: at any n from a phase's beginning each source is
    within log2(sources) / 2 rows of its share, so within one of two to four. A source goes on where
    it was when shares change, and begins again, in another order, when all of it was read. Raises
    ConfigError where `check_shares` does.
    """

    def __init__(self, sources: Sequence[tuple[str, Rows]], data: DataConfig) -> None:
        self.names, self.parts = [name for name, _ in sources], [rows for _, rows in sources]
        check_shares(self.names, data)
        self.tokens, self.documents = (
            sum(part.tokens for part in self.parts),
            sum(part.documents for part in self.parts),
        )
        self.bytes = sum(part.bytes for part in self.parts)
        self.fingerprint = "+".join(part.fingerprint for part in self.parts)
        sizes = [len(part) for part in self.parts]
        self._firsts = list(itertools.accumulate(sizes, initial=0))
        self.filled = sum(
            part.filled * size for part, size in zip(self.parts, sizes, strict=True)
        ) / max(1, len(self))
        times = _numbers(data.epochs) or [Fraction(1)] * len(sizes)
        shares = [(0, [time * size for time, size in zip(times, sizes, strict=True)])]
        if data.weights.strip():
            shares = [(step, _numbers(text)) for step, text in phases("data.weights", data.weights)]
        self._phases = [(step, _whole(weights)) for step, weights in shares]

    def __len__(self) -> int:
        return self._firsts[-1]

    def sources(self, name: str) -> list[tuple[str, Rows]]:
        return list(zip(self.names, self.parts, strict=True))

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        part = bisect.bisect_right(self._firsts, index) - 1
        return self.parts[part].row(index - self._firsts[part], rng)

    def order(self, seed: int, batch_size: int) -> Any:
        import grain

        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts)).tolist()
        ranges = zip(self._firsts, self._firsts[1:], seeds, strict=False)
        parts = [
            grain.MapDataset.range(first, last).shuffle(seed=own).repeat()
            for first, last, own in ranges
        ]
        begins = self._begins(batch_size)

        def row_number(number: int) -> int:
            begin, drawn, weights = begins[
                bisect.bisect_right(begins, number, key=lambda phase: phase[0]) - 1
            ]
            before, after = (counts(number - begin + one, weights) for one in (0, 1))
            part = next(
                index
                for index, (less, more) in enumerate(zip(before, after, strict=True))
                if more > less
            )
            found: int = parts[part][drawn[part] + before[part]]
            return found

        return grain.MapDataset.range(sys.maxsize).map(row_number)

    def shares(self, steps: int, batch_size: int) -> list[Drawn]:
        """What a run of so many steps draws of each source."""
        rows = steps * batch_size
        begin, drawn, weights = [phase for phase in self._begins(batch_size) if phase[0] < rows][-1]
        numbers = _added(drawn, counts(rows - begin, weights))
        read = zip(self.names, numbers, self.parts, strict=True)
        return [
            Drawn(name, number, number / rows, number / len(part)) for name, number, part in read
        ]

    def _begins(self, batch_size: int) -> list[tuple[int, list[int], list[int]]]:
        """Of each phase: its first row, the rows of each source drawn before it, and its
        weights."""
        found = [(0, [0] * len(self.parts), self._phases[0][1])]
        for step, weights in self._phases[1:]:
            begin, drawn, before = found[-1]
            found.append(
                (
                    step * batch_size,
                    _added(drawn, counts(step * batch_size - begin, before)),
                    weights,
                )
            )
        return found


def check_shares(names: Sequence[str], data: DataConfig) -> None:
    """ConfigError where data.weights or data.epochs are not shares of the sources of these
    names."""
    found = {name: text for name in ("weights", "epochs") if (text := getattr(data, name).strip())}
    sources = ", ".join(names)
    if len(found) > 1:
        raise ConfigError(
            f"data.weights={data.weights!r} and data.epochs={data.epochs!r} both say how much is"
            f" read of {sources}: leave one of them empty."
        )
    for setting, text in found.items():
        for _, value in phases(f"data.{setting}", text) if setting == "weights" else [(0, text)]:
            numbers = _numbers(value)
            if len(numbers) != len(names) or min(numbers) < 0 or not any(numbers):
                raise ConfigError(
                    f"data.{setting}={text!r}: {value!r} must be {len(names)}"
                    f" number{'s' * (len(names) > 1)}, none negative and not all 0: one for each"
                    f" source of data.train, in this order: {sources}."
                )


def counts(number: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `number` rows are of each source: `number` is shared between the halves
    of the sources by their weights, to the nearest whole row, and within each half likewise. None
    ever falls as `number` grows.
    """
    if len(weights) == 1:
        return [number]
    middle = len(weights) // 2
    all_of_it, half = sum(weights), sum(weights[:middle])
    first = (2 * number * half + all_of_it) // max(1, 2 * all_of_it)
    return [*counts(first, weights[:middle]), *counts(number - first, weights[middle:])]


def _numbers(text: str) -> list[Fraction]:
    """Numbers apart by spaces, exactly; -1 for what is none."""
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


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
