"""`jaxformer runs`: what the files of runs say, without a change to them."""

import fcntl
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxformer.cli import main
from jaxformer.cli.runs import ListedRun, runs_below
from jaxformer.config.run import RunConfig, RunSettings, to_json
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.report.metrics import MetricsLog


def made(folder: Path, steps: int, lines: list[dict[str, Any]]) -> Path:
    """A run directory with these lines logged."""
    folder.mkdir(parents=True)
    config = RunConfig(run=RunSettings(dir=str(folder)), train=TrainConfig(steps=steps))
    (folder / "config.json").write_text(to_json(config))
    (folder / "data.json").write_text("{}")
    with MetricsLog(folder) as log:
        for line in lines:
            log.log(**line)
    return folder


def step(number: int, **values: float) -> dict[str, Any]:
    return {"step": number, "values": values}


LINES = [
    step(1, loss=5.0, tokens_per_second=900.0),
    step(2, val_loss=4.5),
    step(3, val_loss=4.0),
    step(4, loss=3.5, tokens_per_second=1100.0),
    step(4, val_loss=4.2),
    step(4, val_loss=math.nan),
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made(tmp_path / "a", 4, LINES)
    made(tmp_path / "deep" / "b", 10, LINES)
    made(tmp_path / "c", 10, [])
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")  # a model directory, which is no run
    return tmp_path


def listed(folder: Path) -> dict[str, ListedRun]:
    found = {}
    for run in runs_below(folder):
        assert isinstance(run, ListedRun), run
        found[run.path.name] = run
    return found


def test_a_run_is_told_by_its_files(runs: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    found = listed(runs)
    assert list(found) == ["a", "c", "b"]
    done = found["a"]
    assert (done.state, done.step, done.steps) == ("done", 4, 4)
    assert (done.loss, done.best, done.best_step) == (3.5, 4.0, 3)
    assert done.tokens_per_second == 1100 and done.idle is not None and 0 <= done.idle < 3600
    assert found["b"]._replace(path=done.path, idle=done.idle) == done._replace(
        state="stopped", steps=10
    )
    assert found["c"][1:] == ("stopped", 0, 10, None, None, None, None, None)
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before
    assert listed(runs / "a").keys() == {"a"}


def test_a_run_that_a_process_holds_is_running(runs: Path) -> None:
    with (runs / "a" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert listed(runs)["a"].state == "running"
    assert listed(runs)["a"].state == "done"


def test_a_run_that_cannot_be_read_hides_no_other(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "c" / "config.json").write_text("{")
    problems = [run for run in runs_below(runs) if isinstance(run, ConfigError)]
    assert len(problems) == 1 and str(runs / "c" / "config.json") in str(problems[0])
    assert main(["runs", str(runs)]) == 0
    told = capsys.readouterr()
    assert "deep/b" in told.out and "note: " in told.err


def test_the_command_prints_a_table_or_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "state", "step", "loss"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert cells["a"][:7] == ["done", "4/4", "3.5000", "4.0000", "at", "3", "1,100"]
    assert cells["c"] == ["stopped", "0/10"]
    made(runs / "odd", 4, [step(1, loss=math.inf)])
    assert main(["runs", str(runs), "--json"]) == 0
    numbers = {Path(run["path"]).name: run for run in json.loads(capsys.readouterr().out)}
    assert numbers["b"]["best"] == 4.0 and numbers["odd"]["loss"] is None


def test_a_directory_without_runs_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"There is no run in {tmp_path}.\n"
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err
