"""Length warm-up: shorter rows at first, as many tokens a step, the same run whatever interrupts
it."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import PACKINGS, assert_shared, data, rows_of, same, stored, targets
from tiny_run import assert_same_run, copy_until, line, logged, train_here, write_text

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig
from jaxformer.data import Batches
from jaxformer.data.phases import length_at, row_lengths
from jaxformer.files import ConfigError
from jaxformer.models.cost import flops_per_token
from jaxformer.runs.config import load_config
from jaxformer.runs.objectives import objective_of
from jaxformer.runs.setup import make_setup

pytestmark = pytest.mark.slow

WARMUP = "3; 2: 6; 5: 12"
SIZES = st.lists(st.integers(1, 80), min_size=8, max_size=12)


@settings(max_examples=25)
@given(SIZES, st.sampled_from(PACKINGS), st.integers(0, 2**40))
def test_shorter_rows_are_the_whole_ones_cut_and_lose_no_token(
    sizes: list[int], packing: str, seed: int
) -> None:
    with stored(sizes) as made:
        config, plain = data(12, packing, length_warmup=WARMUP), data(12, packing)
        short, whole = (Batches(rows_of(made, each), each, 4, seed) for each in (config, plain))
        for step, length in enumerate([3, 3, 6, 6, 6, 12, 12]):
            assert length_at(short.lengths, step) == length
            cut, full = short[step], whole[step]
            assert {array.shape for array in cut.values()} == {(48 // length, length)}
            for name, array in cut.items():
                parts = array.reshape(12 // length, 4, length)  # part c of row b is row c B + b
                assert (
                    np.concatenate(parts, axis=1) == full[name]
                ).all() and array.flags.c_contiguous
            assert sorted(targets([cut])) == sorted(targets([full]))


@settings(max_examples=6)
@given(SIZES, st.sampled_from(PACKINGS), st.integers(0, 2**40))
def test_any_number_of_processes_reads_the_same_and_any_batch_alone(
    sizes: list[int], packing: str, seed: int
) -> None:
    with stored(sizes) as made:
        config = data(12, packing, length_warmup=WARMUP)
        assert_shared(
            lambda *place: Batches(rows_of(made, config), config, 4, seed, *place), [0, 2, 5]
        )
        batches = Batches(rows_of(made, config), config, 4, seed)
        for start in (0, 1, 4):
            found = islice(batches.iterate(start), 4)
            assert all(same(batch, batches[start + offset]) for offset, batch in enumerate(found))


REFUSED = {
    "5; 10: 32": (
        r"data\.length_warmup='5; 10: 32': .* must divide data\.sequence_length=32: .* 1, 2, 4, 8,"
        r" 16, 32"
    ),
    "64": r"must divide data\.sequence_length=32",
    "8; 10: x": r"must divide",
    "0; 10: 32": r"must divide",
    "8; 10: 16": (
        r"ends with rows of 16 tokens, and data\.sequence_length is 32: .* '8; 10: 16; 1010: 32',"
        r" or set .*=16"
    ),
    "8": r"ends with rows of 8 tokens",
    "8; 20: 16; 10: 32": r"'10: 32' is not allowed there",
    "8; 0: 32": r"steps ascending from 1",
    "8; 32": r"'32' is not allowed there",
}


@pytest.mark.parametrize("text", REFUSED)
def test_lengths_that_cannot_be_are_one_message(text: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]):
        row_lengths(DataConfig(sequence_length=32, length_warmup=text))


def test_lengths_are_read_as_they_stand_and_only_causal_rows_are_cut() -> None:
    assert row_lengths(DataConfig(sequence_length=32)) == row_lengths(
        DataConfig(sequence_length=32, length_warmup="32")
    )
    assert row_lengths(DataConfig(sequence_length=32, length_warmup=" 8;10 :32")) == [
        (0, 8),
        (10, 32),
    ]
    settings = DataConfig(length_warmup="64; 10: 256")
    assert objective_of(ModelConfig(), settings) == "causal"
    with pytest.raises(
        ConfigError, match=r"length_warmup='64; 10: 256' cannot be had with data\.objective=mlm"
    ):
        objective_of(ModelConfig(family="encoder"), settings)


def test_the_loss_of_shorter_rows_is_that_of_segments() -> None:
    import jax

    import jaxformer as jf
    from jaxformer.losses.heads import head_loss

    model = ModelConfig(vocab_size=257, d_model=16, n_layers=1, n_heads=2, max_length=12)
    params = jf.init(model, jax.random.key(0))
    with stored([90, 7, 50]) as made:
        config, plain = (data(12, "best_fit", length_warmup=text) for text in (WARMUP, ""))
        short, whole = (Batches(rows_of(made, each), each, 4, 0)[0] for each in (config, plain))
        segments = whole["segment_ids"] * 4 + np.arange(12, dtype=np.int32) // 3
        whole["segment_ids"] = np.where(whole["weights"] > 0, segments, 0)
        loss = jax.jit(lambda batch: head_loss(params, model, batch)["loss"][0])
        found, expected = (float(loss(batch)) for batch in (short, whole))
        assert (
            found == pytest.approx(expected, rel=1e-6)
            and whole["weights"].sum() == short["weights"].sum()
        )


CHANGES = {
    "data.length_warmup": "16; 4: 32",
    "data.packing": "best_fit",
    "train.steps": 9,
    "train.checkpoint_every": 2,
    "train.eval_every": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that lengthens its rows, and its text."""
    folder = tmp_path_factory.mktemp("warmup")
    text = write_text(folder / "text.txt")
    assert train_here(line(folder / "run", text, CHANGES)) == 0
    return folder / "run", text


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_run_killed_before_at_or_after_the_change_of_length_continues_bitwise(
    step: int, whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    run_dir = copy_until(step, expected, tmp_path / "run")
    assert train_here(line(run_dir, text, CHANGES)) == 0
    assert_same_run(run_dir, expected)
    out = capsys.readouterr().out
    assert f"from step {step}" in out and "Compiled the step for rows of 32 " in out
    assert ("From step 5 on, rows have 32 tokens instead of 16." in out) == (step <= 4)


def test_a_step_has_as_many_tokens_at_every_length_and_evaluation_is_of_whole_rows(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, text = whole
    assert [entry["tokens"] for entry in logged(run_dir) if "tokens" in entry] == [
        8 * 32 * step for step in range(1, 10)
    ]
    losses = [entry["loss"] for entry in logged(run_dir) if "loss" in entry]
    assert len(losses) == 9 and all(map(math.isfinite, losses))
    found = [entry["val_loss"] for entry in logged(run_dir) if "val_loss" in entry]
    assert train_here(line(run_dir, text, CHANGES)) == 0  # nothing is left to do
    out = capsys.readouterr().out
    assert "16 of 16 tokens at first; 8 of 32 tokens after step 4" in out
    assert len(found) == 3


def test_flops_are_those_of_each_steps_length(whole: tuple[Path, Path]) -> None:
    run_dir, text = whole
    config, *rest = line(run_dir, text, CHANGES)
    overrides = [f"{name[2:]}={value}" for name, value in zip(rest[::2], rest[1::2], strict=True)]
    setup = make_setup(load_config(config, overrides), lambda text: None)
    short, long = (flops_per_token(setup.run.model, length) for length in (16, 32))
    assert short < long and setup.flops(3, 6) == 8 * 32 * (short + 2 * long)
    assert (setup.lengths(0), setup.lengths(3), setup.lengths(4)) == ([16, 32], [16, 32], [32])
