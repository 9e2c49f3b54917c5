"""Damage that one process of several sees, and steps that are not finite: all do the same."""

import json
import time
from pathlib import Path

import pytest
from several import SMALL, ends, finished, launch_all, uninterrupted
from tiny_run import assert_same_run, copy, figures, saved, wait_until

import jaxformer as jf
from jaxformer.checkpoints.reading import saved_steps
from jaxformer.files import located

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

BAD = "§"  # its bytes are in no other document
DAMAGED = """
from jaxformer.checkpoints import reading
read = reading._read_files
def damaged(place, *arguments):
    if place.name == "8":
        raise reading.Altered("an array is not what was saved")
    return read(place, *arguments)
reading._read_files = damaged
"""
NOT_FINITE = """
import os, runpy
os.environ["BAD_TOKEN"] = "{token}"
runpy.run_path("{path}")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return uninterrupted(tmp_path_factory.mktemp("whole"), SMALL)


@pytest.mark.fault(
    "damage of the newest checkpoint that one process of several sees",
    kept="All set it aside and continue from the one before. The run is the uninterrupted one.",
    status="0",
)
def test_damage_that_one_process_sees_makes_all_fall_back(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = copy(expected, tmp_path / "run")
    found = finished(launch_all(2, run_dir, text, SMALL, patched={1: DAMAGED}))
    assert "process 1: an array is not what was saved" in found[0][1]
    assert f"Continuing {run_dir} from step 4" in found[0][1]
    assert (run_dir / "checkpoints/damaged-8/damage.txt").is_file()
    assert saved(run_dir) == saved(expected)
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "SIGKILL of two processes of a run whose run.dir is in a bucket, and each saved its shards",
    kept="Continued, the run is the uninterrupted one.",
    status="137",
)
def test_two_processes_of_a_run_in_a_bucket_are_continued_bitwise(
    tmp_path: Path, s3_bucket: str
) -> None:
    changes = SMALL | {"mesh.fsdp": 2, "train.checkpoint_every": 2}
    expected, text = uninterrupted(tmp_path, changes)
    run_dir = located(f"{s3_bucket}/run")

    def has_saved() -> bool:
        time.sleep(0.05)  # each look asks the store
        return bool(saved_steps(run_dir))

    processes = launch_all(2, run_dir, text, changes)
    wait_until(has_saved, processes[0])
    for process in processes.values():
        process.kill()
    ends(processes)
    finished(launch_all(2, run_dir, text, changes))
    assert_same_run(run_dir, expected)
    assert saved_steps(run_dir) == saved(expected)


@pytest.mark.fault(
    "checkpoints that only some processes of several see",
    kept="All stop and say which of them sees which. Nothing was changed.",
    status="2",
)
def test_a_run_directory_that_is_not_the_same_for_all_is_told(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = copy(expected, tmp_path / "run")
    hidden = "from jaxformer.checkpoints import saving\n"
    hidden += "saving.saved_steps = lambda run_dir: [4]"
    found = ends(launch_all(2, run_dir, text, SMALL, patched={1: hidden}))
    for status, _, error in found.values():
        assert status == 2 and "checkpoints: [4, 8] in process 0, [4] in process 1" in error, error
    assert saved(run_dir) == saved(expected)


@pytest.mark.fault(
    "a loss that is not finite in a run of several processes, train.on_bad_step=rollback",
    kept="All roll back to the same checkpoint. The run has the numbers of one process.",
    status="0",
)
def test_processes_roll_back_together(whole: tuple[Path, Path], tmp_path: Path) -> None:
    expected, good = whole
    documents = good.read_text().split("\n<|endoftext|>\n")
    documents[40] += BAD  # which is in the batch of step 6
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(documents))
    tokenizer = jf.load(expected).tokenizer
    assert tokenizer is not None
    path = Path(__file__).parent / "nan_config.py"
    patch = NOT_FINITE.format(token=tokenizer.encode(BAD)[0], path=path)
    changes = SMALL | {
        "tokenizer.path": expected / "tokenizer.json",
        "train.on_bad_step": "rollback",
    }
    runs = tmp_path / "one", tmp_path / "two"
    for count, run_dir in enumerate(runs, start=1):
        patched = dict.fromkeys(range(count), patch)
        found = finished(launch_all(count, run_dir, text, changes, patched=patched))
        assert "Rolled back to step" in found[0][1] and "WARNING: step" in found[0][1]
    one, two = runs
    for here, there in zip(figures(two), figures(one), strict=True):
        assert here == pytest.approx(there, rel=1e-5, nan_ok=True), here["step"]
    assert saved(two) == saved(one)
    record = json.loads((two / "rollbacks.json").read_text())
    assert record == json.loads((one / "rollbacks.json").read_text()) and record["rollbacks"]
