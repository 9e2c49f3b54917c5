"""The same command continues a run exactly, whatever ended it: what is compared is every logged
number and every bit."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_run import (
    EVERY,
    STEPS,
    assert_same_run,
    contents,
    copy,
    copy_until,
    figures,
    finish,
    fork,
    line,
    lines_logged,
    logged,
    params_of,
    saved,
    train_here,
    wait_until,
)


def test_a_run_killed_at_any_moment_and_run_again_is_bitwise_the_run_never_interrupted(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    process = fork(line(run_dir, text))
    wait_until(lambda: bool(saved(run_dir)) and lines_logged(run_dir) >= 2 * EVERY + 2, process)
    process.send_signal(signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert max(saved(run_dir)) < STEPS and lines_logged(run_dir) < len(logged(expected))
    out, _ = finish(fork(line(run_dir, text)))
    assert f"Continuing {run_dir} from step" in out
    assert_same_run(run_dir, expected)


@pytest.mark.slow
def test_a_run_killed_while_a_checkpoint_is_being_written_continues_from_the_one_before(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"train.checkpoint_every": 1})
    unfinished: list[Path] = []
    for attempt in range(1, 6):
        process = fork(arguments)

        def is_saving(lines: int = 4 * attempt) -> bool:
            return lines_logged(run_dir) > lines and any(run_dir.glob("checkpoints/*tmp*"))

        wait_until(is_saving, process)
        process.kill()
        finish(process, -signal.SIGKILL)
        unfinished = [*run_dir.glob("checkpoints/*tmp*")]
        if unfinished:
            break
    assert unfinished, "no kill ever met a save"
    assert train_here(arguments) == 0
    assert_same_run(run_dir, expected)
    for step in range(
        EVERY, STEPS + 1, EVERY
    ):  # what a step that runs on while it is saved leaves of a checkpoint: all
        for a, b in zip(params_of(run_dir, step), params_of(expected, step), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_run_asked_to_stop_saves_at_once_and_continues_bitwise(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"train.checkpoint_every": 1000})
    process = fork(arguments)
    wait_until(lambda: lines_logged(run_dir) >= 3, process)
    process.terminate()
    _, error = finish(process, 143)
    assert "saved; the same command continues" in error and "Traceback" not in error
    (step,) = saved(run_dir)
    assert 3 <= step < STEPS and logged(run_dir)[-1]["step"] == step
    assert train_here(arguments) == 0
    assert_same_run(run_dir, expected)


def test_a_finished_run_run_again_changes_nothing(whole: tuple[Path, Path], tmp_path: Path) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    copy(expected, run_dir)
    before = contents(run_dir)
    assert train_here(line(run_dir, text)) == 0
    assert contents(run_dir) == before


@pytest.mark.slow
def test_raising_the_number_of_steps_trains_on(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    assert train_here(line(run_dir, text, {"train.steps": STEPS // 2})) == 0
    assert train_here(line(run_dir, text)) == 0
    assert f"from step {STEPS // 2}" in capsys.readouterr().out
    assert_same_run(run_dir, expected)


@pytest.mark.slow
def test_a_run_continues_on_another_mesh_and_what_eight_devices_saved_loads_on_one(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = copy_until(STEPS - 2 * EVERY, expected, tmp_path / "run")
    mesh = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}
    arguments = line(run_dir, text, mesh)
    out, _ = finish(
        fork(
            arguments,
            XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        )
    )
    assert "data 1, fsdp 2, expert 1, context 2, tensor 2" in out
    assert f"from step {STEPS - 2 * EVERY}" in out
    for found, wanted in zip(figures(run_dir), figures(expected), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for a, b in zip(params_of(run_dir), params_of(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_where_no_checkpoint_can_be_read_nothing_is_overwritten(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    run_dir = copy_until(2 * EVERY, expected, tmp_path / "run")
    for step in saved(run_dir):
        tear(run_dir / "checkpoints" / str(step))
    before = contents(run_dir)
    assert train_here(line(run_dir, text)) == 2
    error = capsys.readouterr().err
    assert "no checkpoint of this run can be read" in error and all(
        f"checkpoints/{step}:" in error for step in saved(run_dir)
    )
    assert contents(run_dir) == before


def tear(checkpoint: Path) -> None:
    """Cuts the largest file in half, as a full disk or a lost block does."""
    largest = max(
        (path for path in checkpoint.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
