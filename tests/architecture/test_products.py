"""What `pytest` runs of a product holds every combination, and the rest is slow."""

import itertools

import pytest
from products import covering, slow_but


def is_slow(row):
    return any(mark.name == "slow" for mark in getattr(row, "marks", ()))


@pytest.mark.parametrize("together", [1, 2, 3])
def test_the_rows_that_are_not_slow_hold_every_combination(together):
    product = [*itertools.product("abc", (1, 2), (True, False, None), "xyz")]
    rows = covering(product, together)
    kept = [row for row in rows if not is_slow(row)]
    assert [row.values if is_slow(row) else row for row in rows] == product
    found, whole = (
        {part for row in some for part in itertools.combinations(enumerate(row), together)}
        for some in (kept, product)
    )
    assert found == whole
    assert len(kept) < {1: 4, 2: 14, 3: 40}[together] < len(product)


def test_options_are_taken_in_turn():
    kept = [row for row in covering(itertools.product(range(6), "ab"), 1) if not is_slow(row)]
    assert len(kept) == 6 and sum(kind == "a" for _, kind in kept) == 3


def test_rows_that_stay_are_named_and_have_to_exist():
    rows = slow_but(["a", "b", "c"], "b")
    assert [is_slow(row) for row in rows] == [True, False, True]
    with pytest.raises(ValueError, match="'d'"):
        slow_but(["a"], "d")
