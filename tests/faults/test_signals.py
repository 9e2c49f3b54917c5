"""A signal stops a run within seconds wherever it comes, with what there is to save saved, and the
same command continues it bitwise."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import (
    ROOT,
    STEPS,
    assert_same_run,
    finish,
    launch,
    line,
    lines_logged,
    logged,
    reference,
    saved,
    wait_until,
    write_text,
)

SECONDS = 10  # in which a run stops, of which the machine's other work takes a part
STATUS = {
    number: 128 + number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
}


def stopped(
    process: subprocess.Popen[str], number: signal.Signals, ready: Callable[[], bool]
) -> str:
    """What a process says on standard error that a signal stopped once `ready`."""
    wait_until(ready, process)
    process.send_signal(number)
    begin = time.monotonic()
    _, error = finish(process, STATUS[number])
    assert time.monotonic() - begin < SECONDS
    assert "Traceback" not in error and number.name in error
    return error


def fault(phase: str, kept: str) -> Any:
    return pytest.mark.fault(f"a signal {phase}", kept=kept, status="128 + signal")


@fault(
    "between steps (SIGTERM 143, SIGINT 130, SIGUSR1 138, SIGHUP 129)",
    "The step in flight is finished and saved. Continued, the run is the uninterrupted one.",
)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(
            pytest.param(n, marks=pytest.mark.faults)
            for n in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
        ),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_between_steps(
    number: signal.Signals, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"train.checkpoint_every": 1000})
    error = stopped(launch(arguments), number, lambda: lines_logged(run_dir) >= 3)
    assert "and saved; the same command continues" in error
    (step,) = saved(run_dir)
    assert 3 <= step < STEPS and logged(run_dir)[-1]["step"] == step
    finish(launch(arguments))
    assert_same_run(run_dir, expected)


@fault(
    "in an evaluation",
    "The evaluation is abandoned between two batches and the state is saved. Continued, the run"
    " makes that evaluation and is the uninterrupted one.",
)
@pytest.mark.parametrize("at", [20, pytest.param(STEPS, marks=pytest.mark.faults)])
def test_a_signal_in_an_evaluation(
    at: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, text = reference(tmp_path_factory)
    held = write_text(tmp_path / "held.txt", documents=3000, seed=1)
    changes = {"data.validation": held, "train.eval_every": 20, "train.checkpoint_every": 1000}
    expected, run_dir = tmp_path / "whole", tmp_path / "run"
    finish(launch(line(expected, text, changes)))
    arguments = line(run_dir, text, changes)

    def is_evaluating() -> bool:
        lines = logged(run_dir) if lines_logged(run_dir) else []
        return bool(lines) and lines[-1]["step"] == at and "val_loss" not in lines[-1]

    stopped(launch(arguments), signal.SIGTERM, is_evaluating)
    assert is_evaluating() and saved(run_dir) == [at]
    finish(launch(arguments))
    assert_same_run(run_dir, expected)


@fault(
    "while the step is compiled or the first state is made",
    "There is nothing to save. The same command starts again.",
)
def test_a_signal_while_compiling(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"run.compilation_cache": ""})
    process = launch(arguments, JAX_ENABLE_COMPILATION_CACHE="false")
    assert process.stdout is not None
    for printed in process.stdout:
        if "run directory" in printed:  # ends the banner; compiling follows
            break
    error = stopped(process, signal.SIGTERM, lambda: True)
    assert "nothing was to be saved; the same command starts again" in error
    assert not saved(run_dir) and not lines_logged(run_dir)
    finish(launch(line(run_dir, text)))
    assert_same_run(run_dir, expected)


@fault("while libraries are imported", "Nothing was begun. The same command starts again.")
@pytest.mark.parametrize("program", [["train.py"], ["-m", "jaxformer", "train"]], ids=" ".join)
def test_a_signal_while_importing(program: list[str], tmp_path: Path) -> None:
    arguments = line(tmp_path / "run", write_text(tmp_path / "text.txt"))
    process = subprocess.Popen(
        [sys.executable, *program, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    maps = Path(f"/proc/{process.pid}/maps")
    error = stopped(process, signal.SIGINT, lambda: "libjax_common" in maps.read_text())
    assert "interrupted: stopped by SIGINT" in error
    assert not (tmp_path / "run/config.json").exists()
