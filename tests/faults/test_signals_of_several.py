"""A signal to one of several processes stops all of them, in each phase of a run, with the status
that one process would have."""

import signal
from pathlib import Path
from typing import Any

import pytest
from several import SMALL, ends, finished, launch_all, uninterrupted
from tiny_run import assert_same_run, lines_logged, logged, saved, wait_until, write_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

SLOW = """
import time
from jaxformer.training import loop
mesh_of, place, evaluations = loop.mesh_of, loop.place_batch, []
def begin(params):
    if not isinstance(params, loop.TrainState):
        evaluations.append(params)
    return mesh_of(params)
def slowly(batch, mesh):
    if len(evaluations) == {number}:
        time.sleep(0.5)
        print("evaluated a batch", file=open("{path}", "a"))
    return place(batch, mesh)
loop.mesh_of, loop.place_batch = begin, slowly
"""  # an evaluation of 20 seconds or more
BATCHES = 10  # that it may go on, which are 5 seconds
STOP = """
import os, signal
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.runs import train_run as run
from jaxformer.cluster import launch
def replace(module, name, is_due=lambda *_: True, before=False):
    found = getattr(module, name)
    def stop(*arguments, **options):
        if before:
            os.kill(os.getpid(), signal.SIGTERM)
        result = found(*arguments, **options)
        if not before and is_due(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
        return result
    setattr(module, name, stop)
"""
IN_LAST_SAVE = "replace(Checkpoints, 'save', lambda _, state, step, *__: step == 8)"
PHASES = {  # where the signal comes, the exit status, and the steps that are saved
    "compiling": ("replace(run, 'compile_step', before=True)", 143, []),
    "the last save": (IN_LAST_SAVE, 143, [8]),
    "the end, once all is done": ("replace(launch.RollCall, 'close', before=True)", 0, [8]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """(run directory, text, changes) of a run of two processes that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    held = write_text(folder / "held.txt", documents=200, seed=1)
    changes = SMALL | {"data.validation": held, "train.checkpoint_every": 1000}
    return *uninterrupted(folder, changes), changes


def assert_continued(run_dir: Path, whole: tuple[Path, Path, dict[str, Any]]) -> None:
    expected, text, changes = whole
    again = finished(launch_all(2, run_dir, text, changes))
    assert "Done in" in again[0][1]
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "SIGTERM to one process of several in an evaluation",
    kept="All leave the evaluation before the same batch and save the same step, within 10 s."
    " Continued, the run makes that evaluation and is the uninterrupted one.",
    status="143",
)
def test_a_signal_in_an_evaluation_stops_all(
    whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, text, changes = whole
    run_dir, at = tmp_path / "run", 4
    paths = [tmp_path / "evaluated-0", tmp_path / "evaluated-1"]
    slow = {index: SLOW.format(number=1, path=path) for index, path in enumerate(paths)}
    processes = launch_all(2, run_dir, text, changes, patched=slow)

    def is_evaluating() -> bool:
        lines = logged(run_dir) if lines_logged(run_dir) else []
        return bool(lines) and lines[-1]["step"] == at and "val_loss" not in lines[-1]

    def done() -> list[int]:
        return [path.read_text().count("\n") for path in paths]

    wait_until(lambda: is_evaluating() and all(path.exists() for path in paths), processes[0])
    processes[1].terminate()
    before = done()
    found = ends(processes)
    assert max(done()) < min(before) + BATCHES and len({*done()}) == 1
    for status, _, error in found.values():
        assert status == 143 and f"stopped by SIGTERM after step {at} and saved" in error, error
    assert saved(run_dir) == [at] and is_evaluating()
    assert_continued(run_dir, whole)


@pytest.mark.fault(
    "SIGTERM to one process of several before the first step or after the last one",
    kept="All end alike. Once all steps are done they are saved, and once everything is done a"
    " signal changes nothing.",
    status="143; 0 once everything is done",
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_outside_of_the_steps_ends_all_alike(
    phase: str, whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, text, changes = whole
    run_dir = tmp_path / "run"
    patch, expected, steps = PHASES[phase]
    found = ends(launch_all(2, run_dir, text, changes, patched={1: STOP + patch}))
    for status, _, error in found.values():
        assert status == expected and "Traceback" not in error, error
        assert (f"stopped by {signal.SIGTERM.name}" in error) is (expected != 0), error
    assert saved(run_dir) == steps
    if expected:
        assert_continued(run_dir, whole)
