"""Products of options: `pytest` runs rows that hold every combination of two options, or each
option; `pytest -m slow` runs the rest."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def covering(rows: Iterable[Any], together: int = 2) -> list[Any]:
    """`rows` as the parameters of a test: those of `fewest` stay as they are; the others are
    slow."""
    rows = list(rows)
    kept = fewest(rows, together)
    return [row if row in kept else _slow(row) for row in rows]


def fewest(rows: Iterable[Any], together: int = 2) -> list[Any]:
    """The rows that together hold every combination of the options of `together` columns.

    They are chosen one by one: always a row with the most combinations that are not yet held, and
    of those the one whose options were taken least often.
    """
    rows = list(rows)
    parts = {}
    for at, row in enumerate(rows):
        options = enumerate(map(repr, row if isinstance(row, tuple) else (row,)))
        parts[at] = set(itertools.combinations(options, together))
    missing, taken, chosen = set().union(*parts.values()), Counter(), set()
    while missing:
        best = max(
            parts,
            key=lambda at: (len(parts[at] & missing), -sum(taken[part] for part in parts[at])),
        )
        chosen.add(best)
        missing -= parts[best]
        taken.update(parts[best])
    return [rows[at] for at in sorted(chosen)]


def slow_but(rows: Iterable[Any], *kept: Any) -> list[Any]:
    """`rows` as the parameters of a test, all slow but those of `kept`."""
    rows = list(rows)
    unknown = [row for row in kept if row not in rows]
    if unknown:
        raise ValueError(f"{unknown} are not among {rows}")
    return [row if row in kept else _slow(row) for row in rows]


def _slow(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
