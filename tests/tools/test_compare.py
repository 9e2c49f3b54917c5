"""`jaxformer compare`: runs of one config are one row, and what was logged is in the table."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jaxformer.cli import main
from jaxformer.cli.compare import ComparedRun, configurations, read_runs
from jaxformer.config.run import RunConfig, RunSettings, to_json
from jaxformer.config.train import OptimizerConfig, TrainConfig
from jaxformer.files import ConfigError
from jaxformer.report.metrics import MetricsLog

TOKENS = 32  # of a step


def made(folder: Path, seed: int, rate: float, losses: list[float], data: str = "same") -> Path:
    """A run directory that logged these training losses, and at every second step the same plus
    one as validation loss."""
    folder.mkdir(parents=True)
    config = RunConfig(
        run=RunSettings(dir=str(folder), seed=seed),
        train=TrainConfig(steps=4),
        optimizer=replace(OptimizerConfig(), learning_rate=rate),
    )
    (folder / "config.json").write_text(to_json(config))
    (folder / "data.json").write_text(json.dumps({"train": data, "run_id": folder.name}))
    with MetricsLog(folder) as log:
        for step, loss in enumerate(losses, start=1):
            log.log(step, {"loss": loss, "tokens": step * TOKENS, "tokens_per_second": 100.0})
            if step % 2 == 0:
                log.log(step, {"val_loss": loss + 1})
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made(tmp_path / "a-1", 1, 1e-3, [5.0, 4.0, 3.0, 2.0])
    made(tmp_path / "a-2", 2, 1e-3, [6.0, 5.0, 4.0, 3.0])
    made(tmp_path / "b", 1, 3e-3, [5.0, 4.5, 4.0, 3.5])
    return tmp_path


def test_runs_that_differ_in_their_seed_alone_are_one_configuration(runs: Path) -> None:
    found, notes = read_runs([runs])
    groups = configurations(found)
    assert notes == []
    assert [group.name for group in groups] == [f"{runs / 'a-1'} (2 runs)", str(runs / "b")]
    assert [group.differing for group in groups] == [
        {"optimizer.learning_rate": 1e-3},
        {"optimizer.learning_rate": 3e-3},
    ]


def test_runs_of_other_data_are_not_seeds_of_one(runs: Path) -> None:
    made(runs / "c", 3, 1e-3, [5.0], data="other")
    groups = configurations(read_runs([runs])[0])
    assert [len(group.runs) for group in groups] == [2, 1, 1]
    assert groups[2].differing["data.json: train"] == "other"


def test_what_a_run_starts_from_is_compared_and_how_it_is_started_is_not(runs: Path) -> None:
    written = json.loads((runs / "a-2" / "config.json").read_text())
    written["run"]["progress"], written["launch"]["timeout"] = "none", 7.0
    (runs / "a-2" / "config.json").write_text(json.dumps(written))
    assert len(configurations(read_runs([runs / "a-1", runs / "a-2"])[0])) == 1
    written["run"]["init_from"] = "runs/base"
    (runs / "a-2" / "config.json").write_text(json.dumps(written))
    groups = configurations(read_runs([runs / "a-1", runs / "a-2"])[0])
    assert [group.differing for group in groups] == [
        {"run.init_from": ""},
        {"run.init_from": "runs/base"},
    ]


def test_a_run_is_read_once_and_one_without_losses_is_noted(runs: Path) -> None:
    made(runs / "empty", 1, 1e-3, [])
    (runs / "b" / "config.json").write_text("{")
    found, notes = read_runs([runs / "a-1", runs / "empty", runs])
    assert [run.path.name for run in found] == ["a-1", "a-2"]
    assert len(notes) == 2 and "no loss yet" in notes[0] and "config.json" in notes[1]
    with pytest.raises(ConfigError, match="no run with a logged loss"):
        read_runs([runs / "empty"])


def test_the_table_and_the_picture_have_every_configuration(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "curves.png"
    assert main(["compare", str(runs), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "3 runs of 2 configurations" in printed.out and printed.err == ""
    header, first, second = printed.out.splitlines()[:3]
    assert "optimizer.learning_rate" in header
    assert "2.5000 (2.0000 to 3.0000)" in first and "3.5000" in second
    assert output.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_told_first(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs), "--output", str(tmp_path / "none" / "curves.png")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_is_not_the_best_one() -> None:
    lines = [{"step": 2, "val_loss": 4.0}, {"step": 4, "val_loss": 4.5}]
    lines += [{"step": 6, "val_loss": math.nan}, {"step": 6, "loss": 3.0}]
    assert ComparedRun(Path(), {}, lines).figures == [6, 3.0, 4.0, None]
    assert ComparedRun(Path(), {}, lines[2:]).figures == [6, 3.0, None, None]
