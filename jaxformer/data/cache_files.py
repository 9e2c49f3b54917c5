"""The files of the cache: directories, which one process claims at a time, and checksums, by which
altered files are found."""

import contextlib
import functools
import hashlib
import os
import reprlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.config.settings import Log
from jaxformer.files import ConfigError, is_remote, make_directory
from jaxformer.files.copies import version_if_there

# Written last: what it describes is complete when it is there.
MANIFEST = "manifest.json"
# What comes of a JSON file that is missing (ConfigError, a ValueError) or of other content.
WRONG_RECORD = (ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError)
LARGEST_COUNT = 2**62


@contextlib.contextmanager
def claimed(directory: Path, log: Log) -> Iterator[bool]:
    """Makes a directory and locks it against other processes of this machine during the block.

    Gives False where the file system cannot lock, and for a URL: work may then be done twice, with
    the same result.
    """
    make_folder(directory)
    if sys.platform == "win32" or is_remote(directory):
        yield False
        return
    import fcntl

    handle = os.open(directory, os.O_RDONLY)
    try:
        locked = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that is at work in {directory}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(handle)


def make_folder(directory: Path) -> None:
    """Makes a directory of the cache."""
    try:
        make_directory(directory)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {directory} cannot be made ({error.strerror or error}): set"
            " data.cache_dir to a directory that can be written."
        ) from None


def remove_folder(directory: Path) -> None:
    """Removes a directory of the cache with all that is in it, as far as it can be removed."""
    if not is_remote(directory):
        shutil.rmtree(directory, ignore_errors=True)
        return
    store: Any = directory
    # Whatever the store raises: what stays is found again by its checksums.
    with contextlib.suppress(Exception):
        store.fs.rm(store.path, recursive=True)


def require_counts(record: Mapping[str, Any], *names: str) -> None:
    """Raises TypeError where one of these entries of a JSON object is no count."""
    for name in names:
        if type(record[name]) is not int or not 0 <= record[name] <= LARGEST_COUNT:
            raise TypeError(f"{name} is {reprlib.repr(record[name])}, not a count")


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes and a digest of its content."""

    size: int
    digest: str

    def require_size(self, path: Path) -> None:
        """FileNotFoundError where the file is gone, ConfigError where it has another size."""
        version = version_if_there(path)
        if version is None:
            raise FileNotFoundError(path)
        if version.size != self.size:
            raise _altered(path, f"it has {version.size:,} bytes of {self.size:,}")

    @functools.lru_cache(None)  # noqa: B019 (it is kept for the life of the process on purpose)
    def verify_once(self, path: Path) -> None:
        """Compares the whole file with its digest, the first time that this process asks."""
        self.require_size(path)
        if digest(path) != self.digest:
            raise _altered(path, "its checksum is another")


def _altered(path: Path, difference: str) -> ConfigError:
    return ConfigError(
        f"{path} was altered since it was written ({difference}): restore it, or remove it to have"
        " it made again from the text."
    )


def digest(path: Path) -> str:
    """A digest of a file's bytes."""
    with open(path, "rb") as file:
        blake2b = functools.partial(hashlib.blake2b, digest_size=16)
        return hashlib.file_digest(file, blake2b).hexdigest()
