"""What a run says of its stability: spikes that it skips, losses of sources."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import PLAIN, copy_until, line, logged, params_of, train_here, write_text

from jaxformer.runs import resolve
from jaxformer.training.spikes import skip_spikes

SETTINGS = PLAIN | {
    "train.checkpoint_every": 8,
    "train.eval_every": 8,
    "train.steps": 24,
    "train.on_bad_step": "skip",
    # So low that steps are above it whose loss does not fall.
    "train.spike_factor": 0.5,
    "optimizer.learning_rate": 1e-6,
}


@pytest.fixture(scope="module", autouse=True)
def short_window() -> Iterator[None]:
    """Spikes are told from 8 steps, not 128."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "skip_spikes", functools.partial(skip_spikes, window=8))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run directory, and its command line."""
    folder = tmp_path_factory.mktemp("stability")
    texts = [write_text(folder / f"{name}.txt", seed=seed) for seed, name in enumerate("ab")]
    changes = {"data.train": f"{texts[0]}; {texts[1]}", "data.weights": "0.9 0.1"}
    arguments = line(folder / "run", texts[0], SETTINGS | changes)
    assert train_here(arguments) == 0
    return folder / "run", arguments


def test_spikes_are_logged_with_their_limits_and_counted(run: tuple[Path, list[str]]) -> None:
    lines = [entry for entry in logged(run[0]) if "loss" in entry]
    assert not any("loss_limit" in entry for entry in lines if entry["step"] <= 4)
    spikes = [entry for entry in lines if entry["spikes_in_a_row"]]
    assert spikes and spikes[-1]["skipped_spikes"] == len(spikes)
    for entry in lines[4:]:
        above = entry["loss"] > entry["loss_limit"] or entry["grad_norm"] > entry["grad_norm_limit"]
        assert above == (entry["spikes_in_a_row"] > 0)


def test_the_losses_of_the_sources_add_up_to_the_loss(run: tuple[Path, list[str]]) -> None:
    sources, lacking = [f"{run[0].parent}/{name}.txt" for name in "ab"], 0
    for entry in logged(run[0]):
        prefix = "val_" if "val_loss" in entry else ""
        shares = [entry[f"{prefix}share/{name}"] for name in sources]
        assert math.isclose(sum(shares), 1, rel_tol=1e-6)
        # A batch may have no row of the source with a tenth of the rows.
        losses = [entry.get(f"{prefix}loss/{name}", math.nan) for name in sources]
        parts = [share * loss for share, loss in zip(shares, losses, strict=True) if share]
        assert math.isclose(sum(parts), entry[f"{prefix}loss"], rel_tol=1e-5)
        assert [math.isnan(loss) for loss in losses] == [not share for share in shares]
        lacking += not shares[1]
    assert lacking


def test_a_run_that_skips_spikes_is_resumed_bitwise(
    run: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = copy_until(16, run[0], tmp_path / "again")
    arguments = [str(again) if text == str(run[0]) else text for text in run[1]]
    assert train_here(arguments) == 0
    assert logged(again) == logged(run[0])
    for resumed, whole in zip(params_of(again), params_of(run[0]), strict=True):
        assert (resumed == whole).all()
    assert "is a spike and was skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_spike_ends_a_run_that_does_not_skip_it_and_a_higher_factor_continues_it(
    run: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = copy_until(8, run[0], tmp_path / "again")
    arguments = [str(again) if text == str(run[0]) else text for text in run[1]]
    stopped = [*arguments, "--train.spike_factor", "1e-6", "--train.on_bad_step", "stop"]
    assert train_here(stopped) == 1
    message = capsys.readouterr().err
    assert "it is a spike" in message and "its batch: rows" in message
    assert train_here([*arguments, "--train.spike_factor", "1e6"]) == 0
    assert train_here([*arguments, "--train.spike_factor", "0", "--train.steps", "25"]) == 2
    assert "train.spike_factor: 1000000.0 in the directory, 0.0 now" in capsys.readouterr().err
