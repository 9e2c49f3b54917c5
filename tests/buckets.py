"""Servers of S3 and of Google Cloud Storage on loopback, and a new bucket of one for a test."""

import functools
import json
import logging
import os
import urllib.request
import uuid
from collections.abc import Iterator
from http import HTTPStatus

import pytest

# gcsfs reads this when it is imported: else it asks Google what kind of bucket each one is.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of moto's server of S3, where s3fs, boto3, TensorStore and the commands that a
    test starts find it by AWS_ENDPOINT_URL."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(name, value)
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: str) -> str:
    """The URL of a new bucket, such as s3://test-0123."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    boto3 = pytest.importorskip("boto3")
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """The address of a server of Google Cloud Storage, which gcsfs and the commands that a test
    starts find by STORAGE_EMULATOR_HOST. It keeps to the conditions on an object's generation and
    sends the generation with an object's bytes, which that server does not do by itself."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    from gcp_storage_emulator.handlers import objects

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_media_upload", "_multipart_upload"):
            upload = getattr(objects, name)
            patch.setattr(objects, name, functools.partial(_upload_if_unchanged, upload))
        patch.setattr(
            objects, "download", functools.partial(_download_with_generation, objects.download)
        )
        server = emulator.create_server("127.0.0.1", 0, in_memory=True)
        server.start()
        address = f"http://127.0.0.1:{server._api._httpd.socket.getsockname()[1]}"
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        yield address
        server.stop()


def _upload_if_unchanged(upload, request, response, storage) -> None:
    name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
    stored = storage.objects.get(request.params["bucket_name"], {}).get(name)
    generation = stored["generation"] if stored else "0"
    if request.query.get("ifGenerationMatch", [generation]) != [generation]:
        response.status = HTTPStatus.PRECONDITION_FAILED
    else:
        upload(request, response, storage)


def _download_with_generation(download, request, response, storage) -> None:
    names = storage.objects.get(request.params["bucket_name"], {})
    if stored := names.get(request.params["object_id"]):
        response["x-goog-generation"] = stored["generation"]
    download(request, response, storage)


@pytest.fixture
def gcs_bucket(gcs_server: str) -> str:
    """The URL of a new bucket, such as gs://test-0123."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    body = json.dumps({"name": name}).encode()
    request = urllib.request.Request(f"{gcs_server}/storage/v1/b", body)
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request).close()
    return f"gs://{name}"


@pytest.fixture
def memory_bucket() -> str:
    """A URL of fsspec's store in memory, which lasts as long as the process."""
    return f"memory://test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["s3_bucket", "gcs_bucket", "memory_bucket"])
def any_bucket(request) -> str:
    """The URL of a new bucket of each kind of store."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def gcs_bucket_of_tensorstore(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, where TensorStore finds the server too."""
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", os.environ["STORAGE_EMULATOR_HOST"])
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    return gcs_bucket
