"""A run that is killed at a random moment, saves included, and then continued, is bitwise the run
that nothing interrupted."""

import random
import signal
import time
from pathlib import Path

import pytest
from tiny_run import assert_same_run, finish, launch, line, reference

KILL = pytest.mark.fault(
    "SIGKILL at a random moment of a run",
    kept="The newest finished checkpoint is whole. Continued, the run is the uninterrupted one.",
    status="137",
)


@KILL
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in range(1, 20))]
)
def test_a_run_killed_at_a_random_moment_is_continued_bitwise(
    seed: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir, rng = tmp_path / "run", random.Random(seed)
    # Saving at each step, so that most moments after the start are within a save.
    arguments = line(run_dir, text, {"train.checkpoint_every": rng.choice([1, 2, 4])})
    for _ in range(2):
        process = launch(arguments)
        time.sleep(rng.uniform(0.5, 8))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(launch(arguments))
    assert_same_run(run_dir, expected)
