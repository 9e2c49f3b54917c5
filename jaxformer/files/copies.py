"""Objects of a store on this machine: read block by block, or copied to its disk once, for what is
mapped into memory or read in pieces (token stores, token ids, weights, tokenizers).

<folder>/<name>-<digest of a URL>/             the copies of the objects directly below that URL
<folder>/<name>-<digest of a URL>/.versions/   which version of its object each of them is

The folder is that of the environment variable JAXFORMER_COPIES, else ~/.cache/jaxformer/copies. A
copy is used again until its object changes. The processes of one machine make each copy once.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from jaxformer.files import (
    ConfigError,
    is_remote,
    located,
    read_object,
    replacing,
    store_errors,
    write_text,
)

VARIABLE, DEFAULT = "JAXFORMER_COPIES", "~/.cache/jaxformer/copies"
VERSIONS = ".versions"
RANGE_BYTES = 16 << 20  # that one request asks for
OBJECTS_TOGETHER = 16  # objects that are asked for or copied at the same time
SILENT_BYTES = 10**8  # copies of fewer bytes are made without a line
# What stores call the version of an object, the surest first.
VERSION_KEYS = (
    *("generation", "ETag", "etag", "blob_id", "md5Hash"),
    *("LastModified", "last_modified", "mtime", "updated", "created"),
)


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
    """The version of an object, None where there is none. Raises ConfigError where it may not be
    read, unlike `path.exists()`."""
    store: Any = path
    with store_errors(path, "read"):
        try:
            return version_in(store.fs.info(store.path))
        except FileNotFoundError:
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
    try:
        with store_errors(path, "read"), path.open("rb", **options) as file:
            yield cast(BinaryIO, file)
    except ConfigError:
        # Which may come of another version.
        require_version(path, version)
        raise
    require_version(path, version)


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


def require_version(path: Path, version: ObjectVersion) -> None:
    """Raises ConfigError where an object is now another one, or cannot be read."""
    if version_of(located(str(path))) != version:
        raise ConfigError(
            f"{path} was replaced while it was read: run again when it no longer changes."
        )


def local_copy(path: Path, digest: str = "") -> Path:
    """The copy of an object, as `local_copies` gives it; a local path as it is."""
    return local_copies([path], [digest])[0]


def local_copies(paths: Sequence[Path], digests: Sequence[str] = ()) -> list[Path]:
    """The copies of objects on this machine's disk, made where they are missing or of an earlier
    version; local paths as they are.

    A digest is that of the content (BLAKE2b, 128 bits): a copy that has it is used without asking
    the store. Raises ConfigError where an object cannot be read, has another digest, or changes
    meanwhile, and where the disk has too little room for all of them.
    """
    copies = [_copy_of(path) if is_remote(path) else path for path in paths]
    wanted = zip(paths, copies, digests or [""] * len(paths), strict=True)
    entries = [entry for entry in wanted if is_remote(entry[0])]
    if entries:
        with ThreadPoolExecutor(OBJECTS_TOGETHER) as threads:
            are_current = threads.map(lambda entry: _is_current(*entry), entries)
            pairs = zip(entries, are_current, strict=True)
            _make([entry for entry, is_current in pairs if not is_current], threads)
    return copies


def local_folder(folder: Path, is_wanted: Callable[[str], bool]) -> Path:
    """The directory with the copies of the objects directly below a URL whose names are wanted, and
    without those that are no longer there; a local directory as it is. Raises ConfigError as
    `local_copies` does."""
    if not is_remote(folder):
        return folder
    with store_errors(folder, "listed"):
        paths = [path for path in folder.iterdir() if is_wanted(path.name) and path.is_file()]
    local_copies(paths)
    directory = _copy_of(folder / VERSIONS).parent
    names = {path.name for path in paths}
    for copy in directory.iterdir() if directory.is_dir() else ():
        if is_wanted(copy.name) and copy.name not in names:
            copy.unlink()
    return directory


def matching(*patterns: str) -> Callable[[str], bool]:
    """A test of names by patterns such as "*.json"."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _root() -> Path:
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser().absolute()


def _copy_of(path: Path) -> Path:
    """Where the copy of an object is kept."""
    url = str(path.parent).rstrip("/")
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return _root() / f"{url.rpartition('/')[2] or 'root'}-{digest}" / path.name


def _record_of(copy: Path) -> Path:
    return copy.parent / VERSIONS / f"{copy.name}.json"


def _is_current(path: Path, copy: Path, digest: str) -> bool:
    try:
        record = read_object(_record_of(copy))
    except ConfigError:
        return False
    if not copy.is_file():
        return False
    if digest:
        return record.get("digest") == digest
    return (record.get("size"), record.get("tag")) == version_of(path)


def _make(entries: list[tuple[Path, Path, str]], threads: ThreadPoolExecutor) -> None:
    """Makes copies, several at a time. Raises ConfigError where the disk has no room for them."""
    if not entries:
        return
    root = _root()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be made ({error.strerror}): set {VARIABLE} to a directory that can be"
            " written."
        ) from None
    sizes = threads.map(lambda entry: version_of(entry[0]).size, entries)
    size, free = sum(sizes), shutil.disk_usage(root).free
    files = "1 file" if len(entries) == 1 else f"{len(entries):,} files"
    source = f"{files} of {entries[0][0].parent}"
    if size > free:
        raise ConfigError(
            f"{source} take {size / 1e9:.2f} GB on the disk of this machine, and {root} has"
            f" {free / 1e9:.2f} GB free: make room, or set {VARIABLE} to a directory on a larger"
            " disk."
        )
    if size >= SILENT_BYTES:
        line = f"copying {source} ({size / 1e9:.2f} GB) to {root}"
        print(line, file=sys.stderr, flush=True)
    for copying in [threads.submit(_make_one, *entry) for entry in entries]:
        copying.result()


def _make_one(path: Path, copy: Path, digest: str) -> None:
    """Makes one copy, unless another process has made it meanwhile."""
    with _locked(copy):
        if _is_current(path, copy, digest):
            return
        version, hashed = version_of(path), hashlib.blake2b(digest_size=16)
        with replacing(copy, f"make room, or set {VARIABLE} to another directory") as file:
            for block in remote_blocks(path, RANGE_BYTES, version):
                hashed.update(block)
                file.write(block)
            if digest and hashed.hexdigest() != digest:
                raise ConfigError(
                    f"{path} was altered since it was written (its checksum is another): restore"
                    " it, or remove it to have it made again from the text."
                )
        record = {"url": str(path), "digest": hashed.hexdigest(), **version._asdict()}
        write_text(_record_of(copy), json.dumps(record))


@contextlib.contextmanager
def _locked(copy: Path) -> Iterator[None]:
    """Lets nobody else of this machine make a copy during the block, where its file system can."""
    folder = copy.parent / VERSIONS
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(folder / f"{copy.name}.lock", "w") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
