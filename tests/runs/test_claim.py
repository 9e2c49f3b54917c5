"""The claim on a run directory in a bucket."""

import contextlib
import json
import subprocess
import sys
import time

import pytest

from jaxformer.files import ConfigError, bucket, located, read_object, write_text
from jaxformer.files.bucket import StorePath
from jaxformer.runs.directory import FILES_OF_A_RUN, RunDirectory

# Claims a run directory as another process, says so, and lives until its input ends.
HOLDER = """
import sys
from jaxformer.files import located
from jaxformer.files import bucket
bucket.RENEWAL = 0.2
with located(sys.argv[1]).locked("run.dir"):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def holder_of(url: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "claimed\n"
    return process


@pytest.mark.parametrize("kind", ["s3_bucket", pytest.param("gcs_bucket", marks=pytest.mark.slow)])
def test_a_directory_belongs_to_one_process_and_a_killed_one_leaves_it(kind: str, request) -> None:
    url = f"{request.getfixturevalue(kind)}/run"
    folder, process = located(url), holder_of(url)
    try:
        assert folder.is_locked()
        refused = rf"in use by another process: process {process.pid} on .* holds {url}/claim.json"
        with pytest.warns(UserWarning, match="waiting"), pytest.raises(ConfigError, match=refused):
            RunDirectory(url).lock(restart=False).__enter__()
    finally:
        process.kill()
        process.wait()
    assert (folder / "claim.json").exists() and not folder.is_locked()
    with RunDirectory(url).lock(restart=False):
        assert folder.is_locked()
    assert not (folder / "claim.json").exists()


def test_a_claim_of_another_machine_counts_while_it_is_renewed(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "LEFT_AFTER", 2.0)
    monkeypatch.setattr(bucket, "SETTLING", 0.0)
    folder = located(f"{s3_bucket}/run")
    record = {"host": "far", "pid": 7, "machine": "far", "id": "a"}
    write_text(folder / "claim.json", json.dumps(record | {"renewed": time.time()}))
    waiting = pytest.warns(UserWarning, match="process 7 on far claims run.dir: waiting up to 2 s")
    with waiting, folder.locked("run.dir"):
        assert read_object(folder / "claim.json")["id"] != "a"

    def renewed_meanwhile(seconds: float) -> None:
        write_text(folder / "claim.json", json.dumps(record | {"renewed": time.time()}))

    monkeypatch.setattr(bucket.time, "sleep", renewed_meanwhile)
    write_text(folder / "claim.json", json.dumps(record | {"renewed": time.time()}))
    refusal = pytest.raises(ConfigError, match="process 7 on far holds")
    with waiting, refusal, folder.locked("run.dir"):
        pass
    assert read_object(folder / "claim.json")["id"] == "a"


def test_a_put_that_was_stored_and_answered_by_an_error_is_a_claim(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = StorePath.put_new

    def answered_late(path, content):
        put(path, content)
        return put(path, content)  # as the second attempt of a client

    monkeypatch.setattr(StorePath, "put_new", answered_late)
    folder = located(f"{s3_bucket}/run")
    with folder.locked("run.dir"):
        assert folder.is_locked()
    assert not (folder / "claim.json").exists()


def test_a_process_whose_claim_was_taken_over_ends(s3_bucket: str) -> None:
    path = located(f"{s3_bucket}/run/claim.json")
    process = holder_of(str(path.parent))
    try:
        for _ in range(60):  # its own renewal may come between
            write_text(path, json.dumps({"host": "far", "pid": 7, "id": "a"}))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
                break
        assert process.returncode == 1
        assert process.stderr is not None
        assert f"error: process 7 on far has taken over {path}" in process.stderr.read()
    finally:
        process.kill()
    assert read_object(path)["id"] == "a"


def test_a_claim_is_renewed(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "RENEWAL", 0.1)
    path = located(f"{s3_bucket}/run/claim.json")
    with path.parent.locked("run.dir"):
        first = read_object(path)
        time.sleep(0.5)
        assert read_object(path)["renewed"] > first["renewed"]


def test_beginning_anew_moves_the_objects_of_a_run(any_bucket: str) -> None:
    folder = located(f"{any_bucket}/run")
    names = ["config.json", "metrics.jsonl", "checkpoints/5/state/a", "checkpoints/5/done"]
    for number in (1, 2):
        for name in (*names, "notes.txt"):
            write_text(folder / name, f"{name} {number}")
        RunDirectory(folder).move_away()
        for name in names:
            assert not (folder / name).exists()
            assert (folder / f"before-{number}" / name).read_text() == f"{name} {number}"
    assert (folder / "notes.txt").exists() and "notes.txt" not in FILES_OF_A_RUN
