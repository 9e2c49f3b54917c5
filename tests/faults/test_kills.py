"""A run that is killed at random moments, saves included, and then continued, is bitwise the run
that nothing interrupted."""

import random
import signal
import time
from pathlib import Path

import pytest
from tiny_run import (
    EVERY,
    STEPS,
    assert_same_run,
    finish,
    fork,
    launch,
    line,
    lines_logged,
    wait_until,
)

from jaxformer.files import ConfigError, located
from jaxformer.report import read_metrics

pytestmark = pytest.mark.slow


@pytest.mark.fault(
    "SIGKILL at random moments of a run: 5, each continued",
    kept="The newest finished checkpoint is whole. Continued, the run is the uninterrupted one.",
    status="137",
)
def test_a_run_killed_at_random_moments_is_continued_bitwise(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir, rng = tmp_path / "run", random.Random(0)
    # Saving at each step, so that most moments after the start are within a save.
    arguments = line(run_dir, text, {"train.checkpoint_every": 1})
    for _ in range(3):
        before, steps = lines_logged(run_dir), rng.choice([0, 1, 2, 3, 4])

        def has_trained(lines: int = before + steps) -> bool:
            return lines_logged(run_dir) >= lines

        process = fork(arguments)
        wait_until(has_trained, process)
        time.sleep(rng.uniform(0, 0.1 if steps else 1))
        process.kill()
        finish(process, -signal.SIGKILL)
    for _ in range(2):  # in the start, too; the last may complete the run
        process = launch(arguments)
        time.sleep(rng.uniform(0.5, 6))
        process.kill()
        process.communicate()
    finish(fork(arguments))
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "SIGKILL at random moments of a run whose run.dir is in a bucket: 2",
    kept="A checkpoint without its marker does not count, and the next start removes it. Continued,"
    " the run is the uninterrupted one.",
    status="137",
)
def test_a_run_in_a_bucket_killed_at_random_moments_is_continued_bitwise(
    whole: tuple[Path, Path], s3_bucket: str
) -> None:
    expected, text = whole
    run_dir, rng = located(f"{s3_bucket}/run"), random.Random(0)
    arguments = line(run_dir, text, {"train.keep_checkpoints": 2})
    for _ in range(2):
        before, steps = steps_logged(run_dir), rng.choice([0, 3, 6, 9])

        def has_trained(logged: int = before + steps) -> bool:
            time.sleep(0.05)  # each look asks the store
            return steps_logged(run_dir) >= logged

        process = fork(arguments)
        wait_until(has_trained, process)
        time.sleep(rng.uniform(0, 0.5 if steps else 2))
        process.kill()
        finish(process, -signal.SIGKILL)
    finish(fork(arguments))
    assert_same_run(run_dir, expected)
    names = (run_dir / "checkpoints").names_below()
    assert {name.split("/")[0] for name in names} == {str(STEPS - EVERY), str(STEPS)}
    assert not (run_dir / "claim.json").exists()


def steps_logged(run_dir: Path) -> int:
    try:
        return len(read_metrics(run_dir))
    except ConfigError:  # nothing was logged yet
        return 0
