"""Files of a bucket to which lines are appended."""

from pathlib import Path

import pytest

from jaxformer.files import ConfigError, located, read_file, store_of, write_text
from jaxformer.files.bucket import StorePath


def test_lines_are_in_the_store_when_they_are_flushed_and_at_the_end(any_bucket: str) -> None:
    path = located(f"{any_bucket}/run/metrics.jsonl")
    file = store_of(path).append()
    assert read_file(path) == b""
    assert file.write(b"one\n") == 4
    store_of(path).flush_appended()
    assert read_file(path) == b"one\n"
    file.close()
    again = store_of(path).append()
    again.write(b"two\n")
    again.close()
    assert read_file(path) == b"one\ntwo\n" and [*path.parent.iterdir()] == [path]


def test_a_store_that_refuses_lines_is_told_of_and_gets_them_later(
    memory_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = located(f"{memory_bucket}/metrics.jsonl")
    write_text(path, "")
    file = store_of(path).append()
    put = StorePath.put

    def refuse(target: Path, content: str) -> None:
        raise ConfigError("the store is full")

    monkeypatch.setattr(StorePath, "put", refuse)
    file.write(b"one\n")
    store_of(path).flush_appended()
    with pytest.raises(OSError, match="the store is full"):
        file.write(b"two\n")
    monkeypatch.setattr(StorePath, "put", put)
    file.write(b"two\n")
    file.close()
    assert read_file(path) == b"one\ntwo\n"
