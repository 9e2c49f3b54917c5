"""Packing without cuts: best-fit decreasing, by which no token is lost, none is there twice, and no
document is mixed."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import cut_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import BYTES, SIZES, data, rows_of, stored

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.data import evaluation_batches, open_or_build
from jaxformer.data.documents import Piece
from jaxformer.data.masking import MaskedRows
from jaxformer.data.rows import BestFit, best_fit
from jaxformer.tokenizer import MARKS, byte_tokenizer

CAPACITIES = st.integers(1, 40)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(CAPACITIES)
    return np.array(draw(st.lists(st.integers(1, capacity), max_size=80)), np.int64), capacity


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """The room left in the rows of best-fit decreasing, as the textbook has it."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(space, row) for row, space in enumerate(left) if space >= size]
        row = min(fitting)[1] if fitting else len(left)
        left += [capacity] * (not fitting)
        left[row] -= size
    return sorted(left)


@settings(max_examples=100)
@given(pieces())
def test_pieces_go_where_they_would_one_by_one(case: tuple[np.ndarray, int]) -> None:
    sizes, capacity = case
    rows = best_fit(sizes, capacity)
    held = np.bincount(rows, weights=sizes).astype(int) if len(sizes) else np.zeros(0, int)
    assert sorted(capacity - held) == one_by_one(sizes.tolist(), capacity)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), CAPACITIES)
def test_no_token_is_lost_or_there_twice_and_only_what_is_longer_than_a_row_is_cut(
    sizes: list[int], capacity: int
) -> None:
    ends = np.cumsum(sizes)
    fit = BestFit(ends, capacity)
    held = [list(fit.pieces(row)) for row in range(len(fit))]
    found = sorted(stretch for row in held for stretch in row)
    assert all(sum(end - begin for begin, end in row) <= capacity for row in held) and all(held)
    whole = []
    for begin, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
        cuts = [*range(begin, end, capacity), end]
        whole += list(itertools.pairwise(cuts))
    assert found == whole
    assert fit.filled == pytest.approx(sum(sizes) / (len(fit) * capacity))


@settings(max_examples=15)
@given(SIZES, st.integers(1, 30))
def test_every_token_is_a_target_once_beside_its_own_document_alone(
    sizes: list[int], length: int
) -> None:
    with stored(sizes) as made:
        text = [BYTES.end_token, *made.read(0, made.tokens).tolist()]
        pairs: Counter[tuple[int, int]] = Counter()
        rows = rows_of(made, data(length, "best_fit"))
        (batch,) = evaluation_batches(rows, data(length, "best_fit"), len(rows))
        for tokens, found, weights, segments in zip(*batch.values(), strict=True):
            assert ((weights > 0) == (segments > 0)).all() and weights[: int(weights.sum())].all()
            assert not tokens[segments == 0].any() and not found[segments == 0].any()
            for segment in range(1, segments.max() + 1):
                inputs, outputs = (array[segments == segment].tolist() for array in (tokens, found))
                assert inputs[1:] == outputs[:-1] and BYTES.end_token not in outputs[:-1]
                pairs.update(zip(inputs, outputs, strict=True))
        assert pairs == Counter(itertools.pairwise(text))


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
@settings(max_examples=15)
@given(sizes=SIZES, length=st.integers(1, 30))
def test_the_bound_of_segments_holds_for_every_row_and_one_reaches_it(
    packing: str, sizes: list[int], length: int
) -> None:
    """A kernel that is told fewer would let texts read each other; more would cost memory."""
    with stored(sizes) as made:
        rows = rows_of(made, data(length, packing))
        highest = [int(rows[index]["segment_ids"].max()) for index in range(len(rows))]
        bound = rows.most_segments()
        assert bound is not None and max(highest, default=1) <= bound <= max(highest, default=1) + 1


def test_a_row_of_masks_holds_whole_documents(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MARKS)
    texts = ["abcdefg", "hij", "klmnopqr"]
    made = open_or_build(tmp_path, lambda: [Piece(text, text, True) for text in texts], tokenizer)
    run = RunConfig(
        model=ModelConfig(family="encoder"), data=DataConfig(sequence_length=14, packing="best_fit")
    )
    rows = cut_rows(MaskedRows, made, run, tokenizer)
    assert [rows[index]["targets"].tolist() for index in range(len(rows))] == [
        [257, *b"klmnopqr", 256, 258, 0, 0, 0],
        [257, *b"abcdefg", 256, *b"hij", 256, 258],
    ]
    assert rows[1]["segment_ids"].tolist() == [1] * 9 + [2] * 5
    assert rows.filled == pytest.approx((21 / 24 * 12 + 2) / 14)
    single = cut_rows(
        MaskedRows, made, replace(run, data=replace(run.data, sequence_length=100)), tokenizer
    )
    assert len(single) == 1
    assert single[0]["segment_ids"].tolist()[:24] == [1] * 9 + [2] * 4 + [3] * 10 + [0]
