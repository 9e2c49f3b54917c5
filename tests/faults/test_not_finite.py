"""A step that is not finite: nothing of it is ever saved, as train.on_bad_step says."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import (
    STEPS,
    finish,
    fork,
    line,
    lines_logged,
    logged,
    params_of,
    reference,
    saved,
    wait_until,
    write_text,
)

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.runs.loading import save_run
from jaxformer.runs.model_files import ModelFiles

pytestmark = pytest.mark.slow

BAD = "§"  # its bytes are in no other document
NAN_CONFIG = str(Path(__file__).parent / "nan_config.py")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], Path]:
    """A text with a bad document in its middle, the environment of `nan_config`, and the tokenizer
    that knows it."""
    expected, text = reference(tmp_path_factory)
    documents = text.read_text().split("\n<|endoftext|>\n")
    documents[20] += BAD
    path = tmp_path_factory.mktemp("bad") / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(documents))
    tokenizer = jf.load(expected).tokenizer
    assert tokenizer is not None
    token = tokenizer.encode(BAD)[0]
    assert token not in tokenizer.encode(text.read_text())
    return path, {"BAD_TOKEN": str(token)}, expected / "tokenizer.json"


def arguments_of(run_dir: Path, bad: tuple[Path, Any, Path], **changes: Any) -> list[str]:
    settings = {f"train.{name}": value for name, value in changes.items()}
    text, _, tokenizer = bad
    found = line(run_dir, text, {"tokenizer.path": tokenizer} | settings)
    return [NAN_CONFIG, *found[1:]]


def assert_same(found: Path, expected: Path) -> None:
    """`assert_same_run`, where a logged loss may be NaN."""
    assert list(map(str, logged(found))) == list(map(str, logged(expected)))
    for a, b in zip(params_of(found), params_of(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_finite(run_dir: Path) -> None:
    for step in saved(run_dir):
        assert all(np.isfinite(leaf).all() for leaf in params_of(run_dir, step))


def fault(what: str, kept: str, status: str) -> Any:
    return pytest.mark.fault(what, kept=kept, status=status)


@fault(
    "a loss that is not finite, train.on_bad_step=stop",
    "The step changes nothing. The message names the step and the rows of its batch; all"
    " checkpoints are from before and finite.",
    "1",
)
def test_stop_names_the_step_and_its_rows(bad: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _, error = finish(fork(arguments_of(run_dir, bad), **bad[1]), 1)
    last = logged(run_dir)[-1]["step"]
    assert f"diverged: step {last + 1}: loss nan, gradient norm nan" in error
    assert "its batch: rows " in error and "of the training data" in error
    assert "Traceback" not in error
    assert_finite(run_dir)
    assert max(saved(run_dir), default=0) <= last


@fault(
    "a loss that is not finite, train.on_bad_step=skip or rollback, and SIGKILL after it",
    "skip leaves the update out, rollback goes on after the bad batch from the newest checkpoint."
    " Continued after the kill, the run is the uninterrupted one.",
    "137",
)
@pytest.mark.parametrize("choice", ["skip", "rollback"])
def test_a_run_killed_after_a_bad_step_continues_bitwise(
    choice: str, bad: Any, tmp_path: Path
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    out, _ = finish(fork(arguments_of(whole, bad, on_bad_step=choice), **bad[1]))
    record = whole / "rollbacks.json"
    assert record.is_file() is (choice == "rollback")
    assert ("WARNING: step" in out) and (choice.replace("skip", "skipped") in out.lower())
    assert logged(whole)[-1]["step"] == STEPS
    assert_finite(whole)
    arguments = arguments_of(run_dir, bad, on_bad_step=choice)
    process = fork(arguments, **bad[1])

    def was_bad() -> bool:
        if choice == "rollback":
            return (run_dir / "rollbacks.json").exists()
        lines = logged(run_dir) if lines_logged(run_dir) else []
        skipped = [entry["step"] for entry in lines if "skipped_steps" in entry]
        return bool(skipped) and max(saved(run_dir), default=0) > skipped[0]  # the count is read

    wait_until(was_bad, process)
    process.send_signal(signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert lines_logged(run_dir) < lines_logged(whole)
    finish(fork(arguments, **bad[1]))
    assert_same(run_dir, whole)
    if choice == "rollback":
        assert (run_dir / "rollbacks.json").read_text() == record.read_text()
        assert all(one["skip"] > 0 for one in json.loads(record.read_text())["rollbacks"])


@fault("more than ten bad steps", "The run stops as with train.on_bad_step=stop.", "1")
def test_bad_steps_are_capped(bad: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = arguments_of(run_dir, bad, on_bad_step="skip")
    _, error = finish(fork(arguments, **bad[1], BAD_STEPS="1"), 1)
    assert "limit" in error and "its batch: rows" in error
    assert_finite(run_dir)


@fault("an update that makes parameters infinite", "The state is never saved.", "1")
def test_parameters_that_are_not_finite_are_never_saved(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = [NAN_CONFIG, *line(run_dir, text, {"train.checkpoint_every": 3})[1:]]
    out, error = finish(fork(arguments, BAD_UPDATE="6"), 1)
    assert "step 6: its parameters are not finite" in error
    assert "Done" not in out
    assert max(saved(run_dir)) < 6
    assert_finite(run_dir)


@fault(
    "a validation loss that is not finite at the end",
    "The run is saved, and the message says that it is of no use.",
    "1",
)
def test_a_final_loss_that_is_no_number_is_no_success(bad: Any, tmp_path: Path) -> None:
    run_dir, held = tmp_path / "run", tmp_path / "held.txt"
    held.write_text(write_text(tmp_path / "text.txt", seed=2).read_text() + BAD)
    text = tmp_path / "text.txt"
    changes = {"data.validation": held, "tokenizer.path": bad[2], "train.steps": 4}
    arguments = [NAN_CONFIG, *line(run_dir, text, changes)[1:]]
    for _ in range(2):
        out, error = finish(fork(arguments, **bad[1]), 1)
        assert "the validation loss is nan" in error and "Done" not in out
    assert saved(run_dir) == [4]


@fault("`jaxformer evaluate` of a model that is not finite", "The message says it.", "1")
def test_evaluate_of_a_model_that_is_no_number(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = reference(tmp_path_factory)
    model = jf.load(expected)
    model = dataclasses.replace(
        model, params=jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    )
    save_run(tmp_path / "bad", model, ModelFiles(expected))
    assert main(["evaluate", str(tmp_path / "bad"), "--data.validation", str(text)]) == 1
    assert "not finite: the loss of" in capsys.readouterr().err
