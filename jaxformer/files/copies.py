"""Objects of a store on this machine: read block by block, or copied to its disk once, for what is
mapped into memory or read in pieces (token stores, token ids, weights, tokenizers).

<folder>/<name>-<digest>/   copies of objects of the store's folder <name>

The digest is that of the URLs and versions, or of the content where that is known, so that another
version has another copy. The folder is that of the environment variable JAXFORMER_COPIES, else
~/.cache/jaxformer/copies. The processes of one machine make each copy once.
"""

import contextlib
import fnmatch
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from jaxformer.files import ConfigError, is_remote, replacing, store_errors

VARIABLE, DEFAULT = "JAXFORMER_COPIES", "~/.cache/jaxformer/copies"
RANGE_BYTES = 16 << 20  # that one request asks for
OBJECTS_TOGETHER = 16  # objects that are asked for or copied at the same time
SILENT_BYTES = 10**8  # copies of fewer bytes are made without a line
# What stores call the version of an object, the surest first.
VERSION_KEYS = ("generation", "ETag", "etag", "LastModified", "last_modified", "mtime", "created")


class ObjectVersion(NamedTuple):
    """The size of an object in bytes, and what its store gives another value with each change."""

    size: int
    tag: str


def version_of(path: Path) -> ObjectVersion:
    """The version of an object. Raises ConfigError where there is none, or it may not be read."""
    version = version_if_there(path)
    if version is None:
        raise ConfigError(f"{path} does not exist: correct the URL, or write it again.")
    return version


def version_if_there(path: Path) -> ObjectVersion | None:
    """The version of a file or an object, None where there is none. Raises ConfigError for an
    object that may not be read, unlike `path.exists()`."""
    if not is_remote(path):
        if not path.is_file():
            return None
        status = path.stat()
        return ObjectVersion(status.st_size, str(status.st_mtime_ns))
    store: Any = path
    with contextlib.suppress(FileNotFoundError):
        entry = store.entry()
        if entry["type"] == "file":
            return version_in(entry)
    return None


def version_in(entry: Mapping[str, Any]) -> ObjectVersion:
    """The version that an entry of a listing of fsspec has."""
    tag = next((str(entry[key]) for key in VERSION_KEYS if entry.get(key)), "")
    return ObjectVersion(int(entry.get("size") or 0), tag)


@contextlib.contextmanager
def opened(path: Path, version: ObjectVersion | None = None) -> Iterator[BinaryIO]:
    """Opens an object, which is read by ranges. Raises ConfigError where it cannot be read, and
    where it is not, at the end of the block too, of this `version`, by default that of now."""
    version = version or version_of(path)
    options: dict[str, Any] = {"block_size": RANGE_BYTES, "cache_type": "readahead"}
    failure: ConfigError | None = None
    try:
        with store_errors(path, "read"), path.open("rb", **options) as file:
            yield cast(BinaryIO, file)
    except ConfigError as error:
        failure = error
    # Another version may be the cause of a failure.
    if version_of(path) != version:
        raise ConfigError(
            f"{path} was replaced while it was read: run again when it no longer changes."
        ) from failure
    if failure:
        raise failure


def remote_blocks(path: Path, size: int, version: ObjectVersion | None = None) -> Iterator[bytes]:
    """The bytes of an object, `size` at a time. Raises ConfigError as `opened` does."""
    version, count = version or version_of(path), 0
    with opened(path, version) as file:
        while block := file.read(size):
            count += len(block)
            yield block
    if count != version.size:
        raise ConfigError(
            f"{path} ended after {count:,} of {version.size:,} bytes: start the same command again."
        )


def local_copy(path: Path, digest: str = "") -> Path:
    """The copy of an object on this machine's disk, made where it is missing or of an earlier
    version; a local path as it is.

    The digest is that of the content (BLAKE2b, 128 bits): a copy that has it is used without asking
    the store. Raises ConfigError where the object cannot be read, has another digest, or changes
    meanwhile, and where the disk is full.
    """
    if not is_remote(path):
        return path
    version = None if digest else version_of(path)
    copy = _folder(path.parent, digest or f"{path} {version}") / path.name
    if not copy.is_file():
        _make(path, copy, version or version_of(path), digest)
    return copy


def local_copies(paths: Sequence[Path], digests: Sequence[str] = ()) -> list[Path]:
    """`local_copy` of several objects at a time."""
    with ThreadPoolExecutor(OBJECTS_TOGETHER) as threads:
        return [*threads.map(local_copy, paths, digests or [""] * len(paths))]


def local_folder(folder: Path, is_wanted: Callable[[str], bool]) -> Path:
    """The directory with the copies of the objects directly below a URL whose names are wanted; a
    local directory as it is. Raises ConfigError as `local_copy` does."""
    if not is_remote(folder):
        return folder
    store: Any = folder
    versions = {
        entry["name"].rpartition("/")[2]: version_in(entry)
        for entry in store.entries()
        if entry["type"] == "file"
    }
    directory = _folder(folder, f"{folder} {sorted(versions.items())}")
    wanted = [name for name in versions if is_wanted(name) and not (directory / name).is_file()]
    objects = [folder / name for name in wanted]
    with ThreadPoolExecutor(OBJECTS_TOGETHER) as threads:
        # Not the versions of the listing, which some stores say otherwise.
        current = threads.map(version_of, objects)
        list(threads.map(_make, objects, [directory / name for name in wanted], current))
    return directory


def matching(*patterns: str) -> Callable[[str], bool]:
    """A test of names by patterns such as "*.json"."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _folder(folder: Path, content: str) -> Path:
    """Where copies of objects of a folder are kept."""
    root = Path(os.environ.get(VARIABLE) or DEFAULT).expanduser().absolute()
    name = str(folder).rstrip("/").rpartition("/")[2] or "root"
    return root / f"{name}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"


def _make(path: Path, copy: Path, version: ObjectVersion, digest: str = "") -> None:
    """Makes one copy, unless another process has made it meanwhile."""
    advice = f"make room, or set {VARIABLE} to another directory"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        lock = open(copy.with_name(f".{copy.name}.lock"), "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"{copy} cannot be written ({error.strerror}): {advice}.") from None
    with lock:
        if sys.platform != "win32":
            import fcntl

            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
        if copy.is_file():
            return
        if version.size >= SILENT_BYTES:
            line = f"copying {path} ({version.size / 1e9:.2f} GB) to {copy}"
            print(line, file=sys.stderr, flush=True)
        hashed = hashlib.blake2b(digest_size=16)
        with replacing(copy, advice) as file:
            for block in remote_blocks(path, RANGE_BYTES, version):
                hashed.update(block)
                file.write(block)
            if digest and hashed.hexdigest() != digest:
                raise ConfigError(
                    f"{path} was altered since it was written (its checksum is another): restore"
                    " it, or remove it to have it made again from the text."
                )
