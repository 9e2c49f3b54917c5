"""What keeps a run from a bucket is one message, and nothing is begun."""

import boto3
import pytest
from faulty_server import Faults

from jaxformer.cli import main
from jaxformer.files import ConfigError, located
from jaxformer.runs.directory import RunDirectory


def objects(url: str) -> list[str]:
    answer = boto3.client("s3").list_objects_v2(Bucket=url.removeprefix("s3://"))
    return [entry["Key"] for entry in answer.get("Contents", [])]


@pytest.mark.parametrize(
    "kind, method, message",
    [
        ("denied", "", r" cannot be read \(.*\): look whether the bucket exists"),
        ("throttled", "PUT", r"/claim.json cannot be written \(.*\): look whether"),
    ],
)
def test_a_store_that_refuses(
    kind: str, method: str, message: str, s3_bucket: str, s3_faults: Faults
) -> None:
    key = f"{s3_bucket.removeprefix('s3://')}/run"
    refusal = pytest.raises(ConfigError, match=f"{s3_bucket}/run{message}")
    fault = s3_faults.fault(kind, key, method=method)
    with fault, refusal, RunDirectory(f"{s3_bucket}/run").lock(restart=False):
        pass
    assert not objects(s3_bucket)


def test_a_fault_that_passes_is_not_seen(s3_bucket: str, s3_faults: Faults) -> None:
    with (
        s3_faults.fault("throttled", s3_bucket.removeprefix("s3://"), times=1),
        RunDirectory(f"{s3_bucket}/run").lock(restart=False),
    ):
        assert objects(s3_bucket) == ["run/claim.json"]
    assert not objects(s3_bucket)


def test_credentials_that_are_missing(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"cannot be read .*redentials"):
        located(f"{s3_bucket}/run")
    monkeypatch.undo()
    S3FileSystem.clear_instance_cache()


def test_a_command_prints_one_message(s3_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/quickstart.py", "--run.dir", "s3://not-made/run"]) == 2
    output = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "s3://not-made/run cannot be read (The specified bucket does not exist):" in output
    assert "look whether the bucket exists (jaxformer makes none)" in output


def test_an_error_in_between_is_explained(
    s3_bucket: str, s3_faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    located(s3_bucket)
    with s3_faults.fault("failing", s3_bucket.removeprefix("s3://")):
        assert main(["sample", f"{s3_bucket}/run", "--prompt", "a"]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {s3_bucket}/run cannot be read (")
