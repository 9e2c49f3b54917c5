"""Training goes on without whoever reads what it prints, and without space for its log."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tiny_run import (
    ROOT,
    assert_same_run,
    finish,
    fork,
    launch,
    line,
    lines_logged,
    logged,
    reference,
    saved,
    wait_until,
)

from jaxformer.report import read_metrics

pytestmark = pytest.mark.slow

KEPT = "Training goes on, with one warning. The run is the uninterrupted one."


@pytest.mark.fault(
    "the reader of standard output goes away (as with `head -1`)", kept=KEPT, status="0"
)
def test_a_reader_that_goes_away(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    process = launch(line(run_dir, text))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=300) == 0 and "Traceback" not in error
    assert error.count("WARNING: standard output cannot be written (Broken pipe)") == 1
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "the disk of a redirected standard output is full, and nobody reads standard error",
    kept="Training goes on. The run is the uninterrupted one.",
    status="0",
)
def test_a_full_disk_of_the_log(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT / "train.py"), *line(run_dir, text)]
        status = subprocess.call(command, stdout=full, stderr=write, timeout=300)
    os.close(write)
    assert status == 0
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "the terminal of a run with a progress bar is closed (SIGHUP)",
    kept="The state is saved. Continued, the run is the uninterrupted one.",
    status="129",
)
def test_a_terminal_that_is_closed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"run.progress": "bar", "train.checkpoint_every": 1000})
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    os.set_blocking(terminal, False)

    def has_logged() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65_536)  # else the terminal's buffer is full, and the run waits
        return lines_logged(run_dir) >= 3

    wait_until(has_logged, process)
    os.close(terminal)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert saved(run_dir) == [logged(run_dir)[-1]["step"]]
    finish(fork(line(run_dir, text)))
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "the disk of metrics.jsonl is full for a while",
    kept="Training goes on with a warning; the lines are written once there is space, and those"
    " that never are are named.",
    status="0",
)
def test_a_full_disk_of_metrics(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from jaxformer.report import MetricsLog
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with MetricsLog(Path(sys.argv[1])) as log:
    for step in range(1, 31):
        if step in (5, 10):
            resource.setrlimit(resource.RLIMIT_FSIZE, (150 if step == 5 else hard, hard))
        if step == 21:
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 7, hard))
        log.log(step, {"loss": step / 3})
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("cannot be written from step") == 2
    assert "lacks 10 lines, of steps 21 to 30 (File too large)" in process.stderr
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [*range(1, 21)]


@pytest.mark.fault(
    "all standard streams are closed (`>&-`)",
    kept="Every command does its work. The run is the uninterrupted one.",
    status="0",
)
def test_closed_streams(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"

    def close() -> None:
        for number in range(3):
            os.close(number)

    commands = [
        ["train", *line(run_dir, text)],
        ["sample", str(run_dir), "--prompt", "a", "--max_new_tokens", "2"],
    ]
    for command in commands:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxformer", *command],
            preexec_fn=close,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.wait(timeout=300) == 0, command
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "a process that may open only 20 files (`ulimit -n 20`)",
    kept="Nothing is begun; the message says how to allow more.",
    status="2",
)
def test_few_files(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, text = reference(tmp_path_factory)
    command = [sys.executable, str(ROOT / "train.py"), *line(tmp_path / "run", text)]
    found = subprocess.run(
        ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert "may open only 20 files at once" in found.stderr and "ulimit -n 1024" in found.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(
    "the disk of TensorBoard's events is full",
    kept="Training goes on with one warning, after the traceback of tensorboardX's own thread.",
    status="0",
)
def test_a_full_disk_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    code = """
import resource, sys, time
from pathlib import Path
from jaxformer.report import MetricsLog
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with MetricsLog(Path(sys.argv[1])) as log:
    for step in range(1, 200):
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        log.log(step, {f"value_{number}": step / 3 for number in range(9)})
        time.sleep(0.01)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count(f"{tmp_path / 'tensorboard'} cannot be written") == 1
