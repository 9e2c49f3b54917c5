"""Batches: a function of seed and step that loses no token, mixes no document, and is shared by any
number of processes."""

import functools
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import PACKINGS, SIZES, assert_shared, data, rows_of, same, stored, targets

from jaxformer.config.run import DataConfig
from jaxformer.data import Batches, EvaluationBatches, RowBlocks, TokenStore
from jaxformer.data import evaluation_batches as batches_of_rows
from jaxformer.files import ConfigError
from jaxformer.runs.states import Rollback, ShiftedBatches


def batches_of(made: TokenStore, data: DataConfig, *rest: Any) -> Batches:
    return Batches(rows_of(made, data), data, *rest)


def evaluation_batches(made: TokenStore, data: DataConfig, *rest: Any) -> EvaluationBatches:
    return batches_of_rows(rows_of(made, data), data, *rest)


@settings(max_examples=12)
@given(SIZES, st.integers(1, 20), st.integers(1, 5))
def test_every_token_but_the_first_is_a_target_once(
    sizes: list[int], length: int, batch_size: int
) -> None:
    with stored(sizes) as made:
        expected = made.read(1, made.tokens).tolist()
        batches = list(evaluation := evaluation_batches(made, data(length), batch_size))
        assert targets(batches) == expected
        assert len(evaluation) == len(batches) == -(-len(expected) // (length * batch_size))
        assert {array.shape for batch in batches for array in batch.values()} == {
            (batch_size, length)
        }
        if made.tokens > length:
            epoch = batches_of(made, data(length), 1, 0)
            assert sorted(targets([epoch[step] for step in range(epoch.examples)])) == sorted(
                expected
            )
            assert epoch.steps_per_epoch == epoch.examples == -(-len(expected) // length)


@settings(max_examples=12)
@given(SIZES, st.integers(2, 20))
def test_packing_mixes_no_document_and_loses_no_token(sizes: list[int], length: int) -> None:
    with stored(sizes) as made:
        # A document's segment begins with the end token before it, and what it predicts ends with
        # its own.
        lengths = [sizes[0], *(size + 1 for size in sizes[1:]), 1]
        owner = np.repeat(np.arange(len(lengths)), lengths)
        rows = rows_of(made, data(length, "documents"))
        weighted = 0
        for index in range(len(rows)):
            row = rows[index]
            places = index * length + np.arange(length)
            used = places < made.tokens - 1
            assert (row["tokens"][used] == made.read(0, made.tokens)[places[used]]).all()
            segments = row["segment_ids"]
            assert (segments[~used] == 0).all() and (row["weights"][~used] == 0).all()
            assert (segments[used] == owner[places[used]] - owner[places[0]] + 1).all()
            weighted += int(row["weights"].sum())
        assert weighted == made.tokens - 1


@settings(max_examples=5)
@given(SIZES.filter(lambda sizes: sum(sizes) > 8), st.integers(0, 2**40), st.integers(0, 1000))
def test_two_and_four_processes_read_together_what_one_reads(
    sizes: list[int], seed: int, step: int
) -> None:
    with stored(sizes) as made:
        for packing in PACKINGS:
            read = functools.partial(batches_of, made, data(6, packing), 4, seed)
            assert_shared(read, [step])
        split = [list(evaluation_batches(made, data(6), 4, RowBlocks((i,), 2))) for i in range(2)]
        for batch, left, right in zip(evaluation_batches(made, data(6), 4), *split, strict=True):
            assert (batch["targets"][:2] == left["targets"]).all()
            assert (batch["targets"][2:] == right["targets"]).all()


def test_a_process_that_holds_several_blocks_makes_their_rows_in_order() -> None:
    with stored([40] * 10) as made:
        whole, some = (
            batches_of(made, data(8), 6, 3, *blocks) for blocks in ((), (RowBlocks((0, 2), 3),))
        )
        rows = [0, 1, 4, 5]  # the first and the last third
        for step in (0, 3):
            assert all((whole[step][name][rows] == some[step][name]).all() for name in whole[step])


def test_the_rows_of_a_batch_are_those_that_row_numbers_names() -> None:
    with stored([40] * 10) as made:
        rows = rows_of(made, data(8))
        batches = batches_of(made, data(8), 4, 7)
        for step in (0, 5, 1_003):
            for at, number in enumerate(batches.row_numbers(step)):
                row = {name: array[at] for name, array in batches[step].items()}
                assert same(row, rows[number])


def test_a_rollback_moves_all_later_batches() -> None:
    rollbacks = [Rollback(at=3, skip=2), Rollback(at=3, skip=1), Rollback(at=6, skip=4)]
    with stored([40] * 10) as made:
        batches = batches_of(made, data(8), 4, 7)
        shifted = ShiftedBatches(batches, rollbacks, lambda batch: batch)
        expected = [0, 1, 2, 6, 7, 8, 13, 14, 15]
        for start in (0, 3, 4, 8):
            found = islice(shifted.iterate(start), len(expected) - start)
            for step, batch in enumerate(found, start):
                assert same(batch, batches[expected[step]]) and same(batch, shifted[step])


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_epoch_has_every_row_in_another_order(packing: str) -> None:
    with stored([40] * 10) as made:
        batches = batches_of(made, data(8, packing), 1, 3)
        rows = [
            bytes(batches[step]["tokens"].astype(np.uint8)) for step in range(2 * batches.examples)
        ]
        first, second = rows[: batches.examples], rows[batches.examples :]
        assert sorted(first) == sorted(second) and first != second and first != sorted(first)
        # The next seed's first epoch is not this seed's second.
        other = batches_of(made, data(8, packing), 1, 4)
        assert [
            bytes(other[step]["tokens"].astype(np.uint8)) for step in range(other.examples)
        ] != second


def test_text_that_is_too_short_is_one_message() -> None:
    message = r"has 8 tokens.*data\.sequence_length=8 takes 9.*at most 7"
    with stored([7]) as made:
        with pytest.raises(ConfigError, match=message):
            batches_of(made, data(8), 1, 0)
        # Held-out text may be shorter than a row.
        short = list(evaluation_batches(made, data(20, "documents"), 2))
        assert len(short) == 1
        assert short[0]["weights"].sum() == 7
        assert short[0]["segment_ids"].sum() == 7
    with stored([0]) as made, pytest.raises(ConfigError, match="has 1 tokens: at least 2"):
        evaluation_batches(made, data(8), 1)


def test_a_batch_that_processes_cannot_share_is_one_message() -> None:
    message = r"train\.batch_size=3 is not divisible by the 2 blocks"
    with stored([30]) as made, pytest.raises(ConfigError, match=message):
        batches_of(made, data(8), 3, 0, RowBlocks((0,), 2))
