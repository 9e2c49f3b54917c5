"""Medians of runs with several seeds, and intervals for them that assume no distribution.

Of n independent numbers, the interval from the j-th smallest to the j-th largest has the median of
their distribution with a probability that is binomial in n and j alone. Five numbers, from the
smallest to the largest, have it with 94 %. An infinite number (a run that diverged) is one like any
other.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

CONFIDENCE = 0.9


class Interval(TypedDict):
    """A median with the interval of `interval_ranks` around it."""

    median: float
    low: float
    high: float


class PairedInterval(Interval):
    """`Interval` of the differences of pairs."""

    pairs: list[float]


class Ranks(NamedTuple):
    """An interval from the `rank`-th smallest to the `rank`-th largest number, which has the median
    with the probability `coverage`."""

    rank: int
    coverage: float


def interval_ranks(number: int) -> Ranks:
    """The narrowest interval of `number` independent numbers whose coverage is `CONFIDENCE` or
    more; that from the smallest to the largest where none has (fewer than five)."""
    outside = [2 * sum(math.comb(number, i) for i in range(j)) / 2**number for j in range(number)]
    allowed = 1 - CONFIDENCE
    rank = max([j for j in range(1, number) if outside[j] <= allowed], default=1)
    return Ranks(rank, 1 - outside[rank] if rank < number else 0.0)


def interval_of(values: Sequence[float]) -> Interval:
    """The median of one or several numbers, with their interval (`interval_ranks`)."""
    rank, ordered = interval_ranks(len(values)).rank, sorted(values)
    return {"median": statistics.median(ordered), "low": ordered[rank - 1], "high": ordered[-rank]}


def paired_interval(values: Sequence[float], baseline: Sequence[float]) -> PairedInterval:
    """The interval of `values[i] - baseline[i]`, whose i is a seed. `baseline` is finite. The
    interval of ratios is `interval_of` them."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    return {**interval_of(differences), "pairs": differences}


def is_apart(interval: Interval, number: float = 0.0) -> bool:
    """Whether a number lies outside an interval, as 0 for differences and 1 for ratios. With fewer
    than five numbers the interval has less than `CONFIDENCE`, and this says nothing."""
    return not interval["low"] <= number <= interval["high"]


def interval_text(interval: Interval) -> str:
    """As in "+0.0120 (+0.0030 to +0.0190)"."""
    return "{median:+.4f} ({low:+.4f} to {high:+.4f})".format(**interval)
