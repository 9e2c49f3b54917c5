"""Files of a bucket to which lines are appended."""

from pathlib import Path

import pytest

from jaxformer.files import ConfigError, appended, located, read_file, write_text
from jaxformer.files.appended import (
    flush_appended,
    modified,
    open_appended,
    read_appended,
    remove_tails,
)


def tails(path: Path) -> list[str]:
    folder = path.with_name(f"{path.name}.parts")
    return sorted(tail.name for tail in folder.iterdir()) if folder.exists() else []


def test_lines_are_in_the_store_when_they_are_flushed_and_in_one_object_at_the_end(
    any_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended, "TAIL_BYTES", 8)
    path, lines = located(f"{any_bucket}/run/metrics.jsonl"), []
    file = open_appended(path)
    assert read_file(path) == b""
    for number in range(6):
        lines.append(f"line {number}\n".encode())
        assert file.write(lines[-1]) == len(lines[-1])
        flush_appended()
        assert read_appended(path) == b"".join(lines)
    assert tails(path) == ["000000000000", "000000000014", "000000000028"]
    assert modified(path) > 0 or any_bucket.startswith("memory")  # which notes no times
    file.write(b"last\n")
    file.close()
    assert read_file(path) == b"".join(lines) + b"last\n" and not tails(path)


def test_what_a_killed_process_left_is_joined_and_later_lines_can_be_removed(
    s3_bucket: str,
) -> None:
    path = located(f"{s3_bucket}/metrics.jsonl")
    write_text(path, "one\n")
    write_text(path.parent / "metrics.jsonl.parts/000000000004", "two\n")
    write_text(path.parent / "metrics.jsonl.parts/000000000099", "stale\n")
    assert read_appended(path) == b"one\ntwo\n"
    file = open_appended(path)
    assert read_file(path) == b"one\ntwo\n" and not tails(path)
    file.write(b"three\n")
    file.flush()
    file.close()
    write_text(path, "one\n")
    remove_tails(path)
    assert read_appended(path) == b"one\n"


def test_a_store_that_refuses_lines_is_told_of_and_gets_them_later(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = located(f"{s3_bucket}/metrics.jsonl")
    file, put = open_appended(path), appended.replacing

    def refuse(target: Path) -> None:
        raise ConfigError("the store is full")

    monkeypatch.setattr(appended, "replacing", refuse)
    file.write(b"one\n")
    flush_appended()
    with pytest.raises(OSError, match="the store is full"):
        file.write(b"two\n")
    monkeypatch.setattr(appended, "replacing", put)
    file.write(b"two\n")
    file.close()
    assert read_file(path) == b"one\ntwo\n"


def test_local_files_are_appended_to_as_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open_appended(path) as file:
        file.write(b"one\n")
    assert read_appended(path) == b"one\n" and [*tmp_path.iterdir()] == [path]
