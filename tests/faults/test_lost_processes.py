"""Runs of several processes of which one does not come, dies or is told to stop."""

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from several import SMALL, ends, finished, free_port, launch_all, uninterrupted
from tiny_run import (
    ROOT,
    assert_same_run,
    figures,
    finish,
    fork,
    launch,
    line,
    lines_logged,
    logged,
    saved,
    wait_until,
)
from tiny_run import write_text as write_documents

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

STEPS = 24
LONGER = SMALL | {
    "train.steps": STEPS,
    "optimizer.decay_steps": STEPS,
    "train.eval_every": 12,
    "train.checkpoint_every": 6,
}
MINUTE = 60.0
IMPATIENT = """
from jaxformer.cluster import processes
processes.LONG_SECONDS = 6.0
"""
IN_DATA = """
import time
from jaxformer.runs import states
read, batches = states.ShiftedBatches._from, []
def hang(self, first):
    for batch in read(self, first):
        batches.append(batch)
        if len(batches) == 12:
            time.sleep(1000)
        yield batch
states.ShiftedBatches._from = hang
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return uninterrupted(tmp_path_factory.mktemp("whole"), LONGER)


@pytest.mark.fault(
    "SIGKILL to one process of several",
    kept="The others end within a minute and name it. Continued, the run is the uninterrupted one.",
    status="3; 137 for the process itself",
)
@pytest.mark.parametrize("victim, lines", [(1, 14), (0, 9)])
def test_where_one_process_is_killed_the_others_name_it_and_end(
    victim: int, lines: int, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    processes = launch_all(2, run_dir, text, LONGER)
    wait_until(lambda: bool(saved(run_dir)) and lines_logged(run_dir) >= lines, processes[0])
    processes[victim].kill()
    began = time.monotonic()
    found = ends(processes)
    assert time.monotonic() - began < MINUTE
    assert found[victim][0] == -signal.SIGKILL
    status, _, error = found[1 - victim]
    assert status == 3 and f"lost process: process {victim} (" in error, error
    assert "has died" in error and "Start the same command in all processes again" in error
    assert "Traceback" not in error
    assert saved(run_dir) and max(saved(run_dir)) < STEPS
    finished(launch_all(2, run_dir, text, LONGER))
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "A process of several hangs within a step, stopped or in its data",
    kept="After two minutes its name and its last step are on standard error, and a signal to any"
    " other process ends the run. Continued, the run is the uninterrupted one.",
    status="143, of the SIGTERM",
)
@pytest.mark.parametrize("kind, victim", [("stopped", 0), ("in its data", 1)])
def test_a_process_that_hangs_within_a_step_is_named_and_a_signal_ends_the_run(
    kind: str, victim: int, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    patched = {0: IMPATIENT, 1: IMPATIENT}
    if kind == "in its data":
        patched[victim] += IN_DATA
    processes = launch_all(2, run_dir, text, LONGER, patched=patched)
    hung, other = processes[victim], processes[1 - victim]
    wait_until(lambda: bool(saved(run_dir)) and lines_logged(run_dir) >= 11, processes[0])
    if kind == "stopped":
        hung.send_signal(signal.SIGSTOP)
    time.sleep(2)
    other.terminate()
    status, _, error = ends({0: other})[0]
    if kind == "stopped":
        hung.kill()
    named = f"process {victim} ("
    assert status == 143 and f"waiting: {named}" in error, error
    # One that is stopped may be in an evaluation.
    place = r"(batch \d+ of an evaluation after )?step \d+"
    assert re.search(rf"has come to {place} and no further for [6-9] s", error), error
    assert ("does not answer" in error) == (kind == "stopped")
    assert "stopped by SIGTERM" in error.splitlines()[-1] and named in error.splitlines()[-1]
    assert "Traceback" not in error
    assert ends({0: hung})[0][0] == (-signal.SIGKILL if kind == "stopped" else 143)
    finished(launch_all(2, run_dir, text, LONGER))
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "SIGTERM to one process of several",
    kept="All stop after the same step, which is saved. Continued, the run is the uninterrupted"
    " one; another number of processes continues it too.",
    status="143",
)
@pytest.mark.parametrize("told", [1, 0])
def test_where_one_process_is_told_to_stop_all_stop_after_the_same_step(
    told: int, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    processes = launch_all(2, run_dir, text, LONGER | {"train.checkpoint_every": 1000})
    wait_until(lambda: lines_logged(run_dir) >= 8, processes[0])
    processes[told].terminate()
    found = ends(processes)
    (step,) = saved(run_dir)
    for status, _, error in found.values():
        assert status == 143 and f"stopped by SIGTERM after step {step} and saved" in error, error
    assert step < STEPS and logged(run_dir)[-1]["step"] == step
    if told:
        finished(launch_all(2, run_dir, text, LONGER))
        assert_same_run(run_dir, expected)
        return
    finish(fork(line(run_dir, text, LONGER)))
    for here, there in zip(figures(run_dir), figures(expected), strict=True):
        assert here == pytest.approx(there, rel=1e-4)


@pytest.mark.fault(
    "A process of several never comes",
    kept="Those that came name the missing ones once launch.timeout has passed.",
    status="3",
)
@pytest.mark.parametrize("absent", [1, 0])
def test_a_process_that_does_not_come_is_named(absent: int, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text.txt")
    began = time.monotonic()
    changes = SMALL | {"launch.timeout": 6}
    found = ends(launch_all(3, tmp_path / "run", text, changes, absent=(absent,)))
    assert time.monotonic() - began < MINUTE
    assert len(found) == 2
    for status, _, error in found.values():
        assert status == 3 and f"lost process: process {absent} of 3 did not come" in error, error
        assert "launch.timeout=6" in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(
    "A mistake that only one process of several sees",
    kept="All stop with its message before the first step.",
    status="2",
)
def test_a_mistake_in_one_process_ends_all_with_its_message(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text.txt")
    apart = {1: {"data.train": tmp_path / "missing.txt"}}
    found = ends(launch_all(2, tmp_path / "run", text, SMALL, apart=apart))
    for status, _, error in found.values():
        assert status == 2 and "missing.txt" in error and "Traceback" not in error, error
    assert "process 1: data.train" in found[0][2]
    assert not saved(tmp_path / "run")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler of C")
@pytest.mark.fault(
    "the clock of process 0 of several is set back by two hours",
    kept="The run goes on, for nothing depends on the time of day; a later SIGTERM stops all after"
    " the same step.",
    status="143, of the SIGTERM",
)
def test_a_clock_that_is_set_back_ends_no_process(tmp_path: Path) -> None:
    text, run_dir = write_documents(tmp_path / "text.txt"), tmp_path / "run"
    library, is_back = tmp_path / "clock.so", tmp_path / "is_back"
    source = str(ROOT / "tests/clock_set_back.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    joined = {"launch.coordinator": f"localhost:{free_port()}", "launch.processes": 2}
    endless = LONGER | {"train.steps": 100_000, "train.eval_every": 0} | joined
    first, second = (
        launch(line(run_dir, text, endless | {"launch.process": index}), **environment)
        for index, environment in enumerate(
            ({"LD_PRELOAD": str(library), "CLOCK_IS_BACK": str(is_back)}, {})
        )
    )
    try:
        wait_until(lambda: lines_logged(run_dir) >= 5, first)
        is_back.touch()
        time.sleep(6)  # JAX's service looked for silent processes every few seconds
        assert first.poll() is None and second.poll() is None
        second.terminate()
        errors = [finish(process, 143)[1] for process in (first, second)]
    finally:
        first.kill()
        second.kill()
    (step,) = saved(run_dir)[-1:]
    for error in errors:
        assert f"stopped by SIGTERM after step {step} and saved" in error, error
        assert "lost process" not in error and "recoverable" not in error
