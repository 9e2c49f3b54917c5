"""Random windows (data.order=random): uniform, a function of seed and step, the same for any number
of processes and whatever interrupts a run."""

import functools
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from corpora import prepare
from stored import assert_shared, data, rows_of, same, stored
from tiny_run import assert_same_run, copy_until, line, train_here, write_text

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Batches, RowBlocks, TokenStore
from jaxformer.data.mixture import Mixture
from jaxformer.data.rows import WindowRows, window_start
from jaxformer.files import ConfigError
from jaxformer.runs.objectives import task_of

PLACES = 40


def random_batches(made: TokenStore, size: int, seed: int, *blocks: RowBlocks) -> Batches:
    config = data(8, order="random")
    return Batches(rows_of(made, config), config, size, seed, *blocks)


@pytest.mark.parametrize("first", [0, 2**32 - 2000, 2**40])
def test_windows_begin_at_every_place_alike_whatever_came_before(first: int) -> None:
    draws = 8000
    starts = np.array([window_start(3, first + number, PLACES) for number in range(draws)])
    assert (starts >= 0).all() and (starts < PLACES).all()
    expected = draws / PLACES
    squares = (np.bincount(starts, minlength=PLACES) - expected) ** 2 / expected
    assert squares.sum() < 81  # chi-square with 39 degrees of freedom: 0.9999 of all are below
    # Neighbors are independent: pairs of quarters of the text are alike too.
    quarters = starts * 4 // PLACES
    pairs = np.bincount(quarters[:-1] * 4 + quarters[1:], minlength=16)
    expected = (draws - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom: 0.9999


def test_seeds_and_numbers_give_windows_of_their_own() -> None:
    def of(seed: int) -> list[int]:
        return [window_start(seed, number, 10**9) for number in range(200)]

    assert of(5) == of(5)
    assert len({*of(5), *of(6), *of(2**32 - 1)}) == 600


def test_a_row_is_the_text_from_its_place_on_and_every_place_is_drawn() -> None:
    with stored([20] * 3) as made:  # 63 tokens with the end tokens
        text, batches = made.read(0, made.tokens), random_batches(made, 4, 7)
        drawn = set()
        for step in range(150):
            batch = batches[step]
            for row, place in enumerate(batches.row_numbers(step)):
                drawn.add(place)
                assert (batch["tokens"][row] == text[place : place + 8]).all()
                assert (batch["targets"][row] == text[place + 1 : place + 9]).all()
            assert (batch["weights"] == 1).all() and "segment_ids" not in batch
        assert drawn == set(range(made.tokens - 8))
        # An epoch has as many windows as there are rows of the text.
        assert batches.examples == -(-(made.tokens - 1) // 8)


def test_a_batch_of_windows_is_a_function_of_seed_and_step_for_any_number_of_processes() -> None:
    with stored([40] * 5) as made:
        first, again = (random_batches(made, 4, 7) for _ in range(2))
        assert all(same(first[step], again[step]) for step in (30, 0, 10**9))
        assert not same(first[0], first[1]) and not same(first[0], random_batches(made, 4, 8)[0])
        for start in (0, 5, 1_000_003):
            found = islice(first.iterate(start), 3)
            assert all(same(batch, first[start + place]) for place, batch in enumerate(found))
        assert_shared(functools.partial(random_batches, made, 4, 7), [0, 3])


def test_a_text_of_one_window_is_drawn_again_and_again_and_a_shorter_one_is_refused() -> None:
    with stored([8]) as made:
        batches = random_batches(made, 2, 0)
        assert same(batches[0], batches[1]) and batches.row_numbers(3) == [0, 0]
    with stored([7]) as made, pytest.raises(ConfigError, match=r"has 8 tokens.* takes 9: give"):
        random_batches(made, 2, 0)


def test_several_texts_are_drawn_in_their_shares_each_from_all_its_places() -> None:
    with stored([30]) as left, stored([60], first=5) as right:
        config = data(8, order="random", weights="1 3")
        named = [("left", rows_of(left, config)), ("right", rows_of(right, config))]
        rows = Mixture(named, config)
        numbers = Batches(rows, config, 4, 7).row_numbers
        found = np.array([number for step in range(300) for number in numbers(step)])
        places = left.tokens - 8
        assert (found < places).sum() == 300 and set(found) == set(range(rows.numbers))
        assert rows.numbers == places + right.tokens - 8


def test_what_is_held_out_is_read_once_in_order(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    settings = {"train": str(text), "sequence_length": 16, "cache_dir": str(tmp_path / "cache")}
    whole, windows = (
        prepare(
            RunConfig(
                data=DataConfig(**settings, order=order),  # type: ignore[arg-type]
                tokenizer=TokenizerConfig(kind="bytes"),
            )
        )
        for order in ("epochs", "random")
    )
    assert isinstance(windows.train, WindowRows) and windows.validation and whole.validation
    assert len(windows.validation) == len(whole.validation)
    for row in range(len(whole.validation)):
        assert same(windows.validation[row], whole.validation[row])


ENCODER = ModelConfig(family="encoder")
BOTH = ModelConfig(family="encoder_decoder")
REFUSED = {
    "segments": (ModelConfig(), {"packing": "documents"}, "causal", "documents"),
    "whole documents": (ModelConfig(), {"packing": "best_fit"}, "causal", "best_fit"),
    "records": (ModelConfig(), {"objective": "sft"}, "sft", "stream"),
    "preferences": (ModelConfig(), {"objective": "dpo"}, "dpo", "stream"),
    "pairs": (BOTH, {"objective": "seq2seq"}, "seq2seq", "stream"),
    "hidden spans": (BOTH, {"objective": "span_corruption"}, "span_corruption", "stream"),
    "hidden tokens": (ENCODER, {}, "mlm", "stream"),
}


@pytest.mark.parametrize("order", ["random", "text"])
@pytest.mark.parametrize("case", REFUSED)
def test_an_order_of_anything_but_a_stream_of_text_is_refused(case: str, order: str) -> None:
    model, settings, objective, packing = REFUSED[case]
    wanted = (
        rf"data\.order={order} reads one stream of text, .* data\.objective={objective} and"
        rf" data\.packing={packing}: set data\.order=epochs"
    )
    with pytest.raises(ConfigError, match=wanted):
        task_of(model, DataConfig(order=order, **settings))  # type: ignore[arg-type]
    task_of(model, DataConfig(**settings))  # type: ignore[arg-type]


CHANGES = {
    "data.packing": "stream",
    "train.steps": 6,
    "train.checkpoint_every": 2,
    "train.eval_every": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "text"])
def test_a_killed_run_of_an_order_continues_bitwise(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, changes = write_text(tmp_path / "text.txt"), CHANGES | {"data.order": order}
    assert train_here(line(tmp_path / "whole", text, changes)) == 0
    run_dir = copy_until(4, tmp_path / "whole", tmp_path / "run")
    assert train_here(line(run_dir, text, changes)) == 0
    assert "from step 4" in capsys.readouterr().out
    assert_same_run(run_dir, tmp_path / "whole")
    assert train_here(line(run_dir, text, changes | {"data.order": "epochs"})) == 2
    assert "data.order" in capsys.readouterr().err
