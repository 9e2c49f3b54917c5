"""The certificate of a run in a bucket, and its verification there."""

import json
from pathlib import Path

import boto3
import pytest
from test_certificate import CHANGES
from tiny_run import line, train_here, write_text

from jaxformer.cli import main

pytestmark = pytest.mark.slow


def test_a_run_in_a_bucket_is_certified_and_verified(
    s3_bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{s3_bucket}/run"
    arguments = line(url, write_text(tmp_path / "text.txt"), CHANGES)
    assert train_here(arguments) == 0
    store = boto3.client("s3")
    bucket = s3_bucket.removeprefix("s3://")

    def read(name: str) -> bytes:
        content: bytes = store.get_object(Bucket=bucket, Key=f"run/{name}")["Body"].read()
        return content

    certificate = json.loads(read("certificate.json"))
    results = {entry["name"]: entry["result"] for entry in certificate["checks"]}
    assert "failed" not in results.values()
    assert results["resumed step"] == results["checkpoint files"] == "proven"
    assert b"No check failed" in read("certificate.html")
    keys = [entry["Key"] for entry in store.list_objects_v2(Bucket=bucket)["Contents"]]
    assert not [key for key in keys if ".certify-" in key]

    assert main(["verify", url, "--steps", "1"]) == 0
    lines = read("metrics.jsonl").splitlines()
    lines[1] = lines[1].replace(b'"loss": ', b'"loss": 1', 1)
    store.put_object(Bucket=bucket, Key="run/metrics.jsonl", Body=b"\n".join(lines) + b"\n")
    capsys.readouterr()
    assert main(["verify", url, "--steps", "0"]) == 1
    assert "metrics.jsonl" in capsys.readouterr().out
