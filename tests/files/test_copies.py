"""Copies of objects on the disk of a machine: made once, and again when their object changes."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_server import Faults

from jaxformer.files import ConfigError, bucket, located
from jaxformer.files.stores import local_copies, matching


@pytest.fixture(autouse=True)
def copies_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of copies, new for each test."""
    monkeypatch.setenv(bucket.VARIABLE, str(tmp_path / "copies"))
    return tmp_path / "copies"


def put(url: str, content: bytes) -> Path:
    path = located(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def test_a_copy_is_made_again_when_its_object_changes(any_bucket: str) -> None:
    path = put(f"{any_bucket}/a/b.txt", b"first")
    copy = path.local_copy()
    assert copy.read_bytes() == b"first" and copy.name == "b.txt"
    changed = copy.stat().st_mtime_ns
    assert path.local_copy() == copy and copy.stat().st_mtime_ns == changed
    put(str(path), b"other")
    assert path.local_copy().read_bytes() == b"other" and copy.read_bytes() == b"first"
    assert local_copies([copy, path]) == [copy, path.local_copy()]


def test_a_copy_with_its_digest_needs_no_store(s3_bucket: str, s3_faults: Faults) -> None:
    path = put(f"{s3_bucket}/b.txt", b"content")
    with pytest.raises(ConfigError, match=f"{path} was altered since it was written"):
        path.local_copy(digest_of(b"other"))
    copy = path.local_copy(digest_of(b"content"))
    s3_faults.requests.clear()
    assert path.local_copy(digest_of(b"content")) == copy and not s3_faults.requests


def test_objects_of_one_name_in_two_folders_have_copies_of_their_own(memory_bucket: str) -> None:
    paths = [put(f"{memory_bucket}/{name}/c/x.txt", name.encode()) for name in ("a", "b")]
    assert [copy.read_bytes() for copy in local_copies(paths)] == [b"a", b"b"]


def test_those_who_ask_at_once_share_one_copy(s3_bucket: str, s3_faults: Faults) -> None:
    path = put(f"{s3_bucket}/big.bin", b"0" * 300_000)
    with ThreadPoolExecutor(4) as threads:
        assert len({*threads.map(lambda number: path.local_copy(), range(4))}) == 1
    gets = [request for request in s3_faults.requests if request == ("GET", f"/{path.path}")]
    assert len(gets) == 1


def test_what_is_no_longer_in_a_folder_has_no_copy(memory_bucket: str) -> None:
    folder = put(f"{memory_bucket}/model/a.json", b"{}").parent
    put(f"{folder}/b.json", b"{}")
    put(f"{folder}/c.bin", b"")
    copy = folder.local_folder(matching("*.json"))
    assert sorted(path.name for path in copy.glob("[a-z]*")) == ["a.json", "b.json"]
    assert folder.local_folder(matching("*.bin")) == copy and (copy / "c.bin").is_file()
    (folder / "b.json").unlink()
    assert not (folder.local_folder(matching("*.json")) / "b.json").exists()


def test_a_folder_of_copies_that_cannot_be_made_is_named(
    memory_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(bucket.VARIABLE, str(tmp_path / "file" / "copies"))
    with pytest.raises(ConfigError, match=f"make room, or set {bucket.VARIABLE} to"):
        put(f"{memory_bucket}/a.txt", b"").local_copy()
