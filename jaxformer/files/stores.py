"""Paths of URLs, such as those of a bucket, and what a store cannot do that a disk can.

universal_pathlib asks fsspec, and with it s3fs or gcsfs. A store has no directories, links, renames
or locks: an object appears by one put, and nothing is left of one that fails. This module is
imported where a URL is named, because a run on a disk needs none of these packages.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import fsspec
from upath.extensions import ProxyUPath

from jaxformer.files import ConfigError, explained, store_errors

# gcsfs logs each error with its traceback, which would stand before the one message about it.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())

_reached = set[tuple[str, str]]()  # the schemes and buckets that have answered
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of pyproject.toml, by scheme


def _asks(action: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a method of a path: what the store answers says that it cannot be `action`. That
    an object is missing goes on as FileNotFoundError, unless it was to be written."""
    expected = () if action == "written" else (FileNotFoundError,)

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def ask(self: "StorePath", *args: Any, **options: Any) -> Any:
            with store_errors(self, action, expected):  # type: ignore[arg-type]
                return method(self, *args, **options)

        return ask

    return decorate


class StorePath(ProxyUPath):
    """The path of a URL. It has the methods of `pathlib.Path`, but is none, and asks its store anew
    each time. They raise ConfigError for what keeps a store from answering."""

    exists = _asks("read")(ProxyUPath.exists)
    is_file = _asks("read")(ProxyUPath.is_file)
    is_dir = _asks("read")(ProxyUPath.is_dir)
    stat = _asks("read")(ProxyUPath.stat)
    open = _asks("opened")(ProxyUPath.open)
    write_text = _asks("written")(ProxyUPath.write_text)
    unlink = _asks("removed")(ProxyUPath.unlink)

    @_asks("read")
    def read_bytes(self) -> bytes:
        """The content, by one request, so that it is of one version of the object."""
        return bytes(self.fs.cat_file(self.path))

    @_asks("listed")
    def iterdir(self) -> list[Any]:
        return list(super().iterdir())

    @_asks("listed")
    def glob(self, pattern: str) -> list[Any]:
        return list(super().glob(pattern))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a store has no directories."""

    @_asks("written")
    def put(self, file: str) -> None:
        """Writes the content of a local file, by one put."""
        self.fs.put_file(file, self.path)

    @_asks("written")
    def put_new(self, content: bytes) -> bool:
        """Writes an object where none has its name, in one request that no other process can come
        between: S3 has `If-None-Match`, Google Cloud `ifGenerationMatch`. Returns False where there
        is one. Other stores are asked first, and a write between is not noticed."""
        try:
            self.fs.pipe_file(self.path, content, mode="create")
        except FileExistsError:
            return False
        return True

    @_asks("read")
    def entry(self) -> Any:
        """What fsspec says of an object, by name. Raises FileNotFoundError."""
        return self.fs.info(self.path)

    @_asks("listed")
    def entries(self) -> Any:
        """What fsspec says of each object and folder directly below."""
        return self.fs.ls(self.path, detail=True)

    @_asks("listed")
    def names_below(self) -> list[str]:
        """The names of all objects below, relative to this path, by one listing."""
        folder = f"{self.path.rstrip('/')}/"
        return [name.removeprefix(folder) for name in self.fs.find(self.path)]

    @_asks("written")
    def copy_from(self, source: "StorePath") -> None:
        """Copies an object, or all objects below a path, of the same store to this path."""
        below, copies = source.path.rstrip("/"), self.path.rstrip("/")
        for name in self.fs.find(source.path):
            self.fs.cp_file(name, copies + name.removeprefix(below))

    @_asks("removed")
    def remove(self) -> None:
        """Removes an object, or all objects below."""
        for name in self.fs.find(self.path):
            self.fs.rm_file(name)


def opened_url(url: str) -> Path:
    """The path of a URL. Raises ConfigError where nothing here opens such URLs, and where its
    bucket does not answer."""
    scheme = url.split("://")[0].lower()
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = f'pip install "jaxformer[{extra}]"' if extra else str(error)
        raise ConfigError(f"{url}: {scheme}:// needs another package: {install}") from error
    except ValueError as error:
        raise ConfigError(
            f"{url}: no store is known for {scheme}://. Name a path, or a URL such as"
            " gs://bucket/run or s3://bucket/run."
        ) from error
    # Another process, or Orbax in this one, may have written since the last listing.
    options: Any = {"use_listings_cache": False} if scheme in EXTRAS else {}
    path = StorePath(url, **options)
    bucket = url.split("/")[2]
    if scheme in EXTRAS and (scheme, bucket) not in _reached:
        # What keeps a store from being read is said before anything begins.
        try:
            path.fs.info(path.path)
        except Exception as error:
            has_bucket = "NoSuchBucket" not in str(error.__cause__)
            if not (isinstance(error, FileNotFoundError) and has_bucket):
                raise ConfigError(f"{path} cannot be read {explained(error)}.") from error
        _reached.add((scheme, bucket))
    return cast(Path, path)
