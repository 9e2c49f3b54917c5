"""Files in a bucket, or another store that a URL names."""

import sys
from pathlib import Path

import pytest

from jaxformer.files import (
    ConfigError,
    is_remote,
    located,
    read_file,
    read_object,
    replacing,
    store_of,
    write_text,
)
from jaxformer.files.stores import OnDisk


def test_an_object_is_written_whole_or_stays_as_it_was(any_bucket: str) -> None:
    path = located(f"{any_bucket}/below/text.json")
    assert store_of(path) is path and str(path) == f"{any_bucket}/below/text.json"
    path.parent.mkdir()
    write_text(path, '{"first": 1}')
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"sec")
        raise KeyError
    assert read_object(path) == {"first": 1}
    write_text(path, "second")
    assert read_file(path) == b"second" and [*path.parent.iterdir()] == [path]


def test_an_object_that_is_missing_is_named(any_bucket: str) -> None:
    with pytest.raises(ConfigError, match=f"{any_bucket}/none does not exist: restore it"):
        read_file(located(f"{any_bucket}/none"))


def test_one_of_two_puts_of_a_new_object_is_refused(any_bucket: str) -> None:
    path = located(f"{any_bucket}/claim")
    assert [path.put_new(b"first"), path.put_new(b"second")] == [True, False]
    assert read_file(path) == b"first"
    path.unlink()
    assert path.put_new(b"third")


@pytest.mark.parametrize("server", ["s3_server", "gcs_server"])
def test_a_bucket_that_does_not_exist_is_not_made(server: str, request) -> None:
    request.getfixturevalue(server)
    scheme = {"s3_server": "s3", "gcs_server": "gs"}[server]
    with pytest.raises(ConfigError, match=r"not-made/a.* cannot be .*the bucket exists"):
        write_text(located(f"{scheme}://not-made/a"), "")


def test_local_paths_stay_those_of_pathlib(tmp_path: Path) -> None:
    for text in ("runs/mine", "/tmp/a", "a:b", "file:///tmp/a", str(tmp_path)):
        assert type(located(text)) is type(tmp_path) and located(text) == Path(text)
        assert not is_remote(text) and isinstance(store_of(located(text)), OnDisk)
    assert located(tmp_path) is tmp_path


def test_a_scheme_without_its_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r'needs another package: pip install "jaxformer\[s3\]"'):
        located("s3://bucket/run")
    with pytest.raises(ConfigError, match="no store is known for swift://"):
        located("swift://bucket/run")
