"""`run.tracker`: every row gets the numbers of metrics.jsonl, and none can end a run."""

import importlib.util
import json
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxformer.config.run import RunSettings
from jaxformer.files import ConfigError
from jaxformer.report.metrics import MetricsLog, read_metrics
from jaxformer.report.trackers import TRACKERS, chosen_tracker

SETTINGS = {"train.steps": 4, "model.pattern": ("a", "b")}
LINES = {1: 5.0, 2: 4.0}


def logged(
    name: str, folder: Path, resume_step: int = 0, lines: Mapping[int, float] = LINES
) -> None:
    tracker = chosen_tracker(name)(folder, resume_step, SETTINGS | {"run_id": folder.name})
    with MetricsLog(folder, resume_step, tracker=tracker) as log:
        for step, loss in lines.items():
            log.log(step, {"loss": loss, "grad_norm": float("nan")})


class Service:
    """What wandb and trackio have in common, with its calls kept."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, list[tuple[str, Any]]()

    def _called(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.fails:
            raise OSError("no route")

    def init(self, **where: Any) -> "Service":
        self._called("init", where)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._called("log", (step, numbers["loss"]))

    def finish(self) -> None:
        self._called("finish", None)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Service:
    made = Service(getattr(request, "param", ""))
    module = types.ModuleType("wandb")
    module.init = made.init  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_a_run_that_resumes_is_the_same_run_of_the_service(
    tmp_path: Path, service: Service
) -> None:
    logged("wandb", tmp_path)
    logged("wandb", tmp_path, 2, {3: 3.0})
    names = [name for name, _ in service.calls]
    assert names == ["init", "log", "log", "finish", "init", "log", "finish"]
    assert [value for name, value in service.calls if name == "log"] == [(1, 5.0), (2, 4.0), (3, 3)]
    first, again = (value for name, value in service.calls if name == "init")
    assert first == again and first["resume"] == "allow" and first["project"] == "jaxformer"
    settings = {"train.steps": 4, "model.pattern": "('a', 'b')"}
    assert first["config"] == settings | {"run_id": tmp_path.name}
    logged("wandb", tmp_path / "other")
    assert service.calls[-4][1]["id"] != first["id"]


@pytest.mark.parametrize("service", ["log", "finish"], indirect=True)
def test_a_service_that_fails_is_warned_of_once_and_ends_no_run(
    tmp_path: Path, service: Service
) -> None:
    with pytest.warns(UserWarning, match=r"run.tracker='wandb' failed.*no route") as warned:
        logged("wandb", tmp_path)
    assert len(warned) == 1
    assert [line["loss"] for line in read_metrics(tmp_path)] == [5.0, 4.0]


@pytest.mark.parametrize("service", ["init"], indirect=True)
def test_a_refusal_is_an_error_where_a_run_begins_and_a_warning_where_it_resumes(
    tmp_path: Path, service: Service
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be started.*no route.*run.tracker=none"):
        logged("wandb", tmp_path)
    with pytest.warns(UserWarning, match="The run goes on without it"):
        logged("wandb", tmp_path, 1, {2: 4.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "none"])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"jaxformer\[{name}\]"):
        chosen_tracker(name)
    assert chosen_tracker("auto") is TRACKERS["none"]


def test_a_row_of_ones_own_is_a_value_of_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Printed:
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            print(step, dict(numbers))

        def close(self) -> None:
            print("closed")

    with pytest.raises(ConfigError, match=r"run.tracker='printed' is not one of"):
        RunSettings(tracker="printed")  # type: ignore[arg-type]
    monkeypatch.setitem(TRACKERS, "printed", lambda run_dir, resume_step, settings: Printed())
    assert RunSettings(tracker="printed").tracker == "printed"  # type: ignore[arg-type]
    logged("printed", tmp_path)
    assert capsys.readouterr().out == "1 {'loss': 5.0}\n2 {'loss': 4.0}\nclosed\n"


@pytest.mark.slow
def test_weights_and_biases_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged("wandb", tmp_path)
    logged("wandb", tmp_path, 2, {3: 3.0})
    written = [*tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert len(written) == 2
    # A process of wandb's own writes the files, and may do so after `finish` has returned.
    end = time.monotonic() + 60
    while not all(b"loss" in path.read_bytes() for path in written):
        assert time.monotonic() < end, "the numbers never came"
        time.sleep(0.05)
    assert len({path.name for path in written}) == 1  # one run


@pytest.mark.slow
def test_trackio_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))  # read when it is imported
    pytest.importorskip("trackio")
    logged("trackio", tmp_path / "own")
    logged("trackio", tmp_path / "own", 2, {3: 3.0})
    query = ["metric", "--project", "jaxformer", "--run", "own-own", "--metric", "loss"]
    command = [sys.executable, "-m", "trackio.cli", "get", *query, "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    metric = json.loads(output)
    assert [line["value"] for line in metric["values"]] == [5.0, 4.0, 3.0]
