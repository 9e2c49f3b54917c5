"""`jaxformer doctor` finds what would keep a run from starting, and leaves nothing behind."""

import collections
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tiny_run import ROOT, SETTINGS, line, logged, train_here, write_text

from jaxformer.cli import main
from jaxformer.config.run import to_json
from jaxformer.files import located
from jaxformer.layers import kernels
from jaxformer.runs.config import load_config

pytestmark = pytest.mark.slow

KERNEL = "model.attention.kernel"
Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture) -> str:
    """What the command printed, whatever its line breaks."""
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_a_run_that_can_start_has_no_problem_and_nothing_is_written(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = tmp_path / "runs/mine"
    assert main(["doctor", *line(run_dir, text)]) == 0
    out = printed(capsys)
    for check in ("versions", "devices", "run.dir", "settings and data", "disk space", "attention"):
        assert f"ok {check}: " in out
    assert "Compiled the step in" in out and "a step takes about" in out
    assert "No problem was found." in out and not run_dir.parent.exists()


def test_tasks_that_a_run_names_are_not_read(text: Path, tmp_path: Path, capsys: Capture) -> None:
    """Files of tasks are code, and a run directory may be somebody else's."""
    settings = SETTINGS | {"run.dir": tmp_path / "run", "data.train": text}
    config = load_config(
        ROOT / "configs/quickstart.py", [f"{name}={value}" for name, value in settings.items()]
    )
    train = dataclasses.replace(config.train, eval_tasks=str(tmp_path / "nowhere.yaml"))
    path = tmp_path / "config.json"
    path.write_text(to_json(dataclasses.replace(config, train=train)))
    assert main(["doctor", str(path)]) == 0
    assert "note train.eval_tasks: not read" in printed(capsys)


def test_each_problem_is_named_and_the_status_is_one(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    changes = {"data.cache_dir": tmp_path / "file/cache", "train.batch_size": 2**24}
    assert main(["doctor", *line(tmp_path / "file/run", text, changes)]) == 1
    out = printed(capsys)
    assert "problem run.dir: " in out and "problem data.cache_dir: " in out
    assert "problem settings and data: " in out and "3 problems." in out
    changes = {"optimizer.groups": "nowhere: lr 0"}
    assert main(["doctor", *line(tmp_path / "run", text, changes)]) == 1
    assert "problem settings and data: optimizer.groups" in printed(capsys)


def test_what_a_url_names_is_read(
    text: Path, tmp_path: Path, capsys: Capture, memory_bucket: str
) -> None:
    located(f"{memory_bucket}/a").mkdir()
    located(f"{memory_bucket}/a/text.txt").write_bytes(text.read_bytes())
    changes = {
        "data.train": f"{memory_bucket}/a/*.txt",
        "data.cache_dir": f"{memory_bucket}/cache",
        "tokenizer.path": f"{memory_bucket}/none/tokenizer.json",
    }
    assert main(["doctor", *line(tmp_path / "run", text, changes)]) == 1
    out = printed(capsys)
    assert f"ok data.cache_dir: {memory_bucket}/cache can be written" in out
    assert "problem settings and data: " in out and changes["tokenizer.path"] in out


def test_a_kernel_that_fails_its_check_is_noted_and_a_run_takes_the_next(
    text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model.dropout": 0.0, "train.steps": 3}
    assert train_here(line(tmp_path / "plain", text, changes | {KERNEL: "xla"})) == 0
    wrong = dataclasses.replace(kernels.KERNELS["blocked"], run=lambda q, k, v, mask: 0 * q)
    monkeypatch.setitem(kernels.KERNELS, "blocked", wrong)
    capsys.readouterr()
    chosen = line(tmp_path / "chosen", text, changes)
    assert main(["doctor", *chosen]) == 0
    why = "xla (plain XLA attention); not blocked: its check on this device failed: attention"
    assert f"note attention: Attention: {why}" in printed(capsys)
    # A start on a CPU leaves the check out.
    monkeypatch.setattr("jaxformer.runs.train_run.platform", lambda mesh: "gpu")
    assert train_here(chosen) == 0
    out = printed(capsys)
    assert "blocked (blocked attention with a saved log-sum-exp)" in out and why in out
    plain, chosen_losses = (
        [entry["loss"] for entry in logged(tmp_path / name) if "loss" in entry]
        for name in ("plain", "chosen")
    )
    assert plain == chosen_losses and len(plain) == 3
    settings = json.loads((tmp_path / "chosen/config.json").read_text())
    assert settings["model"]["attention"]["kernel"] == "auto"


def test_a_full_disk_a_wrong_kernel_and_a_path_that_cannot_be_read_again_are_problems(
    text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 0, 10))
    right = kernels.KERNELS["blocked"]
    wrong = dataclasses.replace(right, run=lambda *given: 1.1 * right.run(*given))
    monkeypatch.setitem(kernels.KERNELS, "blocked", wrong)
    assert main(["doctor", *line(tmp_path / "a[1]/run", text, {KERNEL: "blocked"})]) == 1
    out = printed(capsys)
    assert "problem run.dir: " in out and "problem disk space: 101 checkpoints of" in out
    assert "problem attention: attention kernel 'blocked' is wrong on this device" in out


def test_a_step_that_is_not_finite_is_a_problem(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    changes = {"train.z_loss": 9e29}  # the squares of such a gradient are beyond float32
    assert main(["doctor", *line(tmp_path / "run", text, changes)]) == 1
    out = printed(capsys)
    assert "problem one step: loss " in out and "gradient norm inf" in out
