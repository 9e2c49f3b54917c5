"""Mixtures: each source's share to the row, its epochs whole, whatever the phases and the
processes."""

import functools
import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import PACKINGS, assert_shared, rows_of, same, stored, targets
from stored import data as settings_of

from jaxformer.config.run import DataConfig
from jaxformer.data import Batches, NumpyBatch, Rows, evaluation_batches
from jaxformer.data.mixture import Mixture, counts, shares_of
from jaxformer.files import ConfigError

WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any)


class Numbers(Rows):
    """Rows that say of which source they are, and which of its rows."""

    def __init__(self, source: int, size: int) -> None:
        self.source, self.size = source, size
        self.documents, self.bytes, self.fingerprint = size, 3 * size, f"print{source}"

    @property
    def tokens(self) -> int:
        return 2 * self.size

    def __len__(self) -> int:
        return self.size

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        assert 0 <= index < self.size
        tokens = np.array([self.source, index], np.int32)
        return {"tokens": tokens, "chance": rng.integers(2**31, size=2)}


def mixed(sizes: list[int], **data: str) -> tuple[Mixture, DataConfig]:
    config = DataConfig(**data)  # type: ignore[arg-type]
    named = [(f"text{source}", Numbers(source, size)) for source, size in enumerate(sizes)]
    return Mixture(named, config), config


def drawn(
    mixture: Mixture, config: DataConfig, batch_size: int, steps: int, seed: int = 7
) -> np.ndarray:
    """(source, row) of the rows of the steps, in order."""
    batches = Batches(mixture, config, batch_size, seed)
    return np.concatenate([batches[step]["tokens"] for step in range(steps)])


@settings(max_examples=100)
@given(WEIGHTS, st.integers(0, 10**12))
def test_shares_are_the_weights_to_the_row_and_each_row_is_of_one_source(
    weights: list[int], number: int
) -> None:
    found, after = counts(number, weights), counts(number + 1, weights)
    # Half a row each time that the sources are halved.
    most = math.ceil(math.log2(len(weights))) / 2
    for count, weight in zip(found, weights, strict=True):
        assert abs(count * sum(weights) - number * weight) <= most * sum(weights)
    grown = [more - less for less, more in zip(found, after, strict=True)]
    assert sorted(grown) == [0] * (len(weights) - 1) + [1] and weights[grown.index(1)]


@settings(max_examples=12)
@given(
    st.lists(st.integers(20, 60), min_size=2, max_size=4),
    st.data(),
    st.integers(1, 7),
    st.integers(0, 2**40),
)
def test_no_row_comes_again_before_all_of_its_source_was_read(
    sizes: list[int], choose: st.DataObject, batch_size: int, seed: int
) -> None:
    shares = st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)).filter(any)
    steps = [0, *sorted(choose.draw(st.sets(st.integers(1, 30), max_size=3)))]
    weights = {step: choose.draw(shares) for step in steps}
    text = "; ".join(
        f"{step}: " * bool(step) + " ".join(map(str, each)) for step, each in weights.items()
    )
    mixture, config = mixed(sizes, weights=text)
    found = drawn(mixture, config, batch_size, 40, seed)
    for source, size in enumerate(sizes):
        rows = found[found[:, 0] == source, 1]
        for begin in range(0, len(rows), size):
            epoch = rows[begin : begin + size].tolist()
            assert len({*epoch}) == len(epoch) and (len(epoch) < size or {*epoch} == {*range(size)})
    for begin, stop in zip(steps, [*steps[1:], 40], strict=True):
        part = np.bincount(found[begin * batch_size : stop * batch_size, 0], minlength=len(sizes))
        assert part.tolist() == counts((stop - begin) * batch_size, weights[begin])
    told = mixture.shares(40, batch_size)
    assert [each.rows for each in told] == np.bincount(found[:, 0], minlength=len(sizes)).tolist()
    assert [each.name for each in told] == [f"text{source}" for source in range(len(sizes))]
    assert [each.epochs for each in told] == [
        each.rows / size for each, size in zip(told, sizes, strict=True)
    ]
    assert sum(each.share for each in told) == pytest.approx(1)


def test_each_epoch_of_a_source_has_another_order_and_each_source_its_own() -> None:
    found = drawn(*mixed([40, 40], weights="0.5 0.5"), batch_size=8, steps=20)
    first, second = (found[found[:, 0] == source, 1].tolist() for source in (0, 1))
    assert sorted(first[:40]) == sorted(first[40:]) and first[:40] != first[40:]
    assert first[:40] != second[:40]
    other = drawn(*mixed([40, 40], weights="0.5 0.5"), batch_size=8, steps=20, seed=8)
    assert (other[:, 1] != found[:, 1]).mean() > 0.8


def test_without_weights_every_row_is_read_as_often() -> None:
    found = drawn(*mixed([30, 10, 60]), batch_size=10, steps=10)
    assert np.unique(found, axis=0).shape == (100, 2)


@settings(max_examples=6)
@given(st.sampled_from(PACKINGS), st.integers(0, 2**40), st.integers(0, 1000))
def test_any_number_of_processes_reads_the_same_and_any_batch_alone(
    packing: str, seed: int, step: int
) -> None:
    with stored([30, 4, 17]) as left, stored([9] * 9, 13) as right:
        config = settings_of(6, packing, weights="0.7 0.3; 400: 1 2")
        named = [("left", rows_of(left, config)), ("right", rows_of(right, config))]
        make = functools.partial(Batches, Mixture(named, config), config, 4, seed)
        assert_shared(make, [step])
        for offset, batch in enumerate(islice(make().iterate(step), 4)):
            assert same(batch, make()[step + offset])


def test_evaluation_reads_each_source_once_one_after_the_other() -> None:
    with stored([30, 4]) as left, stored([9] * 3, 13) as right:
        config = settings_of(8)
        parts = [rows_of(made, config) for made in (left, right)]
        mixture = Mixture([("left", parts[0]), ("right", parts[1])], config)
        alone = [targets([*evaluation_batches(part, config, 3)]) for part in parts]
        assert targets([*evaluation_batches(mixture, config, 3)]) == [*alone[0], *alone[1]]
        assert len(mixture) == sum(map(len, parts))
        assert mixture.tokens == left.tokens + right.tokens
        assert mixture.documents == 5
        assert mixture.bytes == 34 + 27
        assert mixture.fingerprint == f"{left.fingerprint}+{right.fingerprint}"


REFUSED = {
    "1": r"data\.weights='1': '1' must be 2 numbers.*in this order: a\.txt, b\.txt",
    "1 2 3": r"must be 2 numbers",
    "1 -2": r"none negative",
    "0 0": r"not all 0",
    "1 x": r"'1 x' must be 2 numbers",
    "1 nan": r"must be 2 numbers",
    "1 2; 10: 0 0": r"data\.weights='1 2; 10: 0 0': '0 0' must",
    "1 2; 10: 1 1; 10: 2 1": r"'10: 2 1' is not allowed there\. .* steps ascending",
    "1 2; 1 1": r"'1 1' is not allowed there",
    "1 2;": r"'' is not allowed there",
}


@pytest.mark.parametrize("case", REFUSED)
def test_shares_that_are_none_are_one_message(case: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[case]):
        shares_of(["a.txt", "b.txt"], DataConfig(weights=case))


def test_a_source_too_small_for_a_row_is_named() -> None:
    with stored([30]) as left, stored([5]) as right:
        config = settings_of(8)
        named = [("left.txt", rows_of(left, config)), ("right.txt", rows_of(right, config))]
        mixture = Mixture(named, config)
        with pytest.raises(ConfigError, match=r"data\.train=right\.txt has 6 tokens, .* takes 9"):
            Batches(mixture, config, 2, 0)
