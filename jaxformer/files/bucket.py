"""What a bucket, or another store that a URL names, does in its own way.

universal_pathlib asks fsspec, and with it s3fs or gcsfs. A store has no folders, links, renames,
appends or locks: an object appears by one put, and nothing is left of one that fails. What is
mapped into memory or read in pieces (token stores, token ids, weights, tokenizers) is copied to
this machine once, and what a library writes to a disk alone is put there at its end. This module is
imported where a URL is named, because a run on a disk needs none of its packages.

<copies>/<name>-<digest>/   copies of objects of the store's folder <name>

The digest is that of the URLs and versions, or of the content where that is known, so that another
version has another copy. The folder of copies is that of the environment variable JAXFORMER_COPIES,
else ~/.cache/jaxformer/copies. The processes of one machine make each copy once.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
import fsspec.config
from upath.extensions import ProxyUPath

from jaxformer.files import read_object, replacing, write_text
from jaxformer.files.stores import (
    COPIES_TOGETHER,
    ConfigError,
    ObjectVersion,
    OutputFolder,
    is_hidden,
)

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of pyproject.toml, by scheme
REASON_CHARACTERS = 300  # of the message of an error of a store
# What stores call the version of an object, the surest first.
VERSION_KEYS = ("generation", "ETag", "etag", "LastModified", "last_modified", "mtime", "created")

VARIABLE = "JAXFORMER_COPIES"
COPIES_FOLDER = "~/.cache/jaxformer/copies"
RANGE_BYTES = 16 << 20  # that one request asks for
SILENT_BYTES = 10**8  # copies of fewer bytes are made without a line

PUT_SECONDS = 5.0  # between two puts of a file that grows; Google Cloud refuses more than one a
# second of one object
BYTES_PER_SECOND = 1 << 20  # that such puts take on average: large objects are put more rarely

CLAIM = "claim.json"  # in a run directory: which process holds it
RENEWAL = 10.0  # seconds between two renewals of a claim
LEFT_AFTER = 60.0  # seconds without a renewal after which nobody holds a claim
READINGS = 4  # of a claim, which its holder may renew while it is read
SETTLING = 1.0  # seconds in which of two processes that take over a claim the last one wins

# gcsfs logs each error with its traceback, which would stand before the one message about it.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())
# Another process, or TensorStore in this one, may have written since the last listing.
for _scheme in EXTRAS:
    fsspec.config.conf.setdefault(_scheme, {}).setdefault("use_listings_cache", False)

_reached = set[tuple[str, str]]()  # the schemes and buckets that have answered
_appended: "weakref.WeakSet[AppendedObject]" = weakref.WeakSet()


def explained(error: BaseException) -> str:
    """Return the reason, in parentheses, for what a store or its library raised once all tries were
    over, and what to do."""
    reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
    return (
        f"({reason}): look whether the bucket exists (jaxformer makes none), whether its region is"
        " that of AWS_DEFAULT_REGION, whether the credentials are valid and may list, read, write"
        " and delete objects there, and whether the network reaches it; start the same command"
        " again"
    )


@contextlib.contextmanager
def store_errors(
    path: Any, action: str, expected: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turns an error of the store into one ConfigError, as `OnDisk.store_errors` says."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ConfigError, *expected)):
            raise
        raise ConfigError(f"{path} cannot be {action} {explained(error)}.") from error


def _asks(action: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a method of a path: what the store answers says that it cannot be `action`. That
    an object is missing goes on as FileNotFoundError, unless it was to be written."""
    expected = () if action == "written" else (FileNotFoundError,)

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def ask(self: "StorePath", *args: Any, **options: Any) -> Any:
            with store_errors(self, action, expected):
                return method(self, *args, **options)

        return ask

    return decorate


class StorePath(ProxyUPath):
    """The path of a URL. It has the methods of `pathlib.Path`, but is none, and asks its store anew
    each time. They raise ConfigError for what keeps a store from answering. Those from `renames` on
    are what `OnDisk` has, and say what it says."""

    exists = _asks("read")(ProxyUPath.exists)
    is_file = _asks("read")(ProxyUPath.is_file)
    is_dir = _asks("read")(ProxyUPath.is_dir)
    stat = _asks("read")(ProxyUPath.stat)
    open = _asks("opened")(ProxyUPath.open)
    write_text = _asks("written")(ProxyUPath.write_text)
    unlink = _asks("removed")(ProxyUPath.unlink)

    @_asks("read")
    def read_bytes(self) -> bytes:
        """Return the content, by one request, so that it is of one version of the object."""
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

    @_asks("listed")
    def entries(self) -> dict[str, Any]:
        """Return what fsspec says of each object and folder directly below, by its name; nothing
        where there are none."""
        try:
            entries = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}

    @_asks("written")
    def copy_from(self, source: "StorePath") -> None:
        """Copies an object, or all objects below a path, of the same store to this path."""
        below = source.path.rstrip("/")
        copies = self.path.rstrip("/")
        for name in self.fs.find(source.path):
            self.fs.cp_file(name, copies + name.removeprefix(below))

    @_asks("removed")
    def remove(self) -> None:
        """Removes an object, or all objects below."""
        for name in self.fs.find(self.path):
            self.fs.rm_file(name)

    # What `OnDisk` has

    renames = False
    reads_in_place = False
    store_errors = store_errors

    def require_writable(self) -> None:
        path = self / f"probe-{uuid.uuid4().hex}"
        with path.replacing():
            pass
        path.unlink()

    def free_space(self) -> None:
        return None

    def lacks_folder(self) -> bool:
        return False

    @contextlib.contextmanager
    def replacing(self, advice: str = "", follow: bool = True) -> Iterator[BinaryIO]:
        # On this machine first, which takes room there. fsspec also closes a file that it writes
        # after an error, and what was written until then would become the object.
        with tempfile.NamedTemporaryFile() as file:
            yield cast(BinaryIO, file)
            file.flush()
            self.put(file.name)

    def append(self) -> "AppendedObject":
        return AppendedObject(self)

    def flush_appended(self) -> None:
        for file in tuple(_appended):
            with contextlib.suppress(OSError):
                file.flush()

    @_asks("read")
    def make_folder(self) -> None:
        """Raises ConfigError where the bucket does not exist: s3fs would make one."""
        bucket = str(self).split("/")[2]
        if not self.fs.exists(bucket):
            raise ConfigError(
                f"{self} cannot be written: there is no bucket {bucket}, or it may not be listed"
                " with these credentials. Create it, or choose another path."
            )

    @contextlib.contextmanager
    def filled(self, in_order: bool) -> Iterator[Any]:
        if in_order:
            yield self
            return
        output = self.output_folder()
        yield output.path
        output.close()

    def output_folder(self) -> "Upload":
        return Upload(cast(Path, self))

    def gather(self, paths: Sequence[Any]) -> None:
        """Copies all objects before the first one is removed."""
        # A store has no rename. A process that is killed among the copies leaves each object in its
        # place, beside copies that no run reads; object by object, the run would be in two places.
        for path in paths:
            (self / path.name).copy_from(path)
        for path in paths:
            path.remove()

    def remove_folder(self) -> None:
        # Whatever the store raises: what stays is found again by its checksums.
        with contextlib.suppress(Exception):
            self.fs.rm(self.path, recursive=True)

    def set_aside(self, name: str, note: str, reason: str, marker: str) -> "StorePath":
        """Copies a folder, then removes it. The copy is complete once it has its note, and the
        folder counts until its marker is removed after that: a process that is killed in between
        copies it again when it is started again."""
        target = self.with_name(name)
        number = 1
        while (target / note).exists():
            number += 1
            target = self.with_name(f"{name}-{number}")
        target.copy_from(self)
        (target / note).write_text(f"{reason}\n")
        (self / marker).unlink()
        self.remove()
        return target

    def folders(self, marker: str, complete: bool = True) -> list[Any]:
        folders = []
        for name in self.entries():
            if (self / name / marker).exists() == complete:
                folders.append(self / name)
        return folders

    @_asks("read")
    def version(self) -> ObjectVersion | None:
        with contextlib.suppress(FileNotFoundError):
            entry = self.fs.info(self.path)
            if entry["type"] == "file":
                return _version_in(entry)
        return None

    def _current(self) -> ObjectVersion:
        version: ObjectVersion | None = self.version()
        if version is None:
            raise ConfigError(f"{self} does not exist: correct the URL, or write it again.")
        return version

    def blocks(self, size: int, version: ObjectVersion | None = None) -> Iterator[bytes]:
        version = version or self._current()
        count = 0
        with self.readable(version) as file:
            while block := file.read(size):
                count += len(block)
                yield block
        if count != version.size:
            raise ConfigError(
                f"{self} ended after {count:,} of {version.size:,} bytes: start the same command"
                " again."
            )

    @contextlib.contextmanager
    def readable(self, version: ObjectVersion | None = None) -> Iterator[BinaryIO]:
        """Opens an object, which is read by ranges. Raises ConfigError where it cannot be read, and
        where it is not, at the end of the block too, of this `version`, by default that of now."""
        version = version or self._current()
        failure: ConfigError | None = None
        try:
            options = {"block_size": RANGE_BYTES, "cache_type": "readahead"}
            with self.store_errors("read"), self.open("rb", **options) as file:
                yield file
        except ConfigError as error:
            failure = error
        # Another version may be the cause of a failure.
        if self._current() != version:
            raise ConfigError(
                f"{self} was replaced while it was read: run again when it no longer changes."
            ) from failure
        if failure:
            raise failure

    def local_copy(self, digest: str = "") -> Path:
        version = None if digest else self._current()
        copy = self.parent._folder_of_copies(digest or f"{self} {version}") / self.name
        if not copy.is_file():
            self._make_copy(copy, version or self._current(), digest)
        return copy

    def local_folder(self, is_wanted: Callable[[str], bool]) -> Path:
        versions = {}
        for name, entry in self.entries().items():
            if entry["type"] == "file":
                versions[name] = _version_in(entry)
        directory = self._folder_of_copies(f"{self} {sorted(versions.items())}")

        def copy(name: str) -> None:
            if not (directory / name).is_file():
                # Not the version of the listing, which some stores say otherwise.
                (self / name)._make_copy(directory / name, (self / name)._current())

        with ThreadPoolExecutor(COPIES_TOGETHER) as threads:
            list(threads.map(copy, filter(is_wanted, versions)))
        return directory

    def _folder_of_copies(self, content: str) -> Path:
        """Return where copies of objects of this folder are kept."""
        root = Path(os.environ.get(VARIABLE) or COPIES_FOLDER).expanduser().absolute()
        name = str(self).rstrip("/").rpartition("/")[2] or "root"
        return root / f"{name}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"

    def _make_copy(self, copy: Path, version: ObjectVersion, digest: str = "") -> None:
        """Makes one copy, unless another process has made it meanwhile."""
        advice = f"make room, or set {VARIABLE} to another directory"
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            lock = open(copy.with_name(f".{copy.name}.lock"), "w")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise ConfigError(f"{copy} cannot be written ({error.strerror}): {advice}.") from None
        # The lock file stays. If it were removed, a process that waits for it and one that makes it
        # anew would hold a lock each, and both would copy.
        with lock:
            if sys.platform != "win32":
                import fcntl  # Windows lacks it

                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            if copy.is_file():
                return
            if version.size >= SILENT_BYTES:
                line = f"copying {self} ({version.size / 1e9:.2f} GB) to {copy}"
                print(line, file=sys.stderr, flush=True)
            hashed = hashlib.blake2b(digest_size=16)
            with replacing(copy, advice) as file:
                for block in self.blocks(RANGE_BYTES, version):
                    hashed.update(block)
                    file.write(block)
                if digest and hashed.hexdigest() != digest:
                    raise ConfigError(
                        f"{self} was altered since it was written (its checksum is another):"
                        " restore it, or remove it to have it made again from the text."
                    )

    @_asks("listed")
    def files_below(self, leaves_out: Callable[[str], bool] = is_hidden) -> dict[Any, Any]:
        return self._matches(self.fs.find(self.path, detail=True), leaves_out)

    @_asks("listed")
    def files_matching(self, root: Any) -> dict[Any, Any]:
        return root._matches(self.fs.glob(self.path, detail=True), is_hidden)  # type: ignore[no-any-return]

    def _matches(
        self, entries: Mapping[str, Any], leaves_out: Callable[[str], bool]
    ) -> dict[Any, Any]:
        matches = {}
        for key in sorted(entries):
            entry = entries[key]
            name = key.removeprefix(self.path).lstrip("/")
            if entry["type"] == "file" and not any(map(leaves_out, name.split("/"))):
                matches[self / name] = _version_in(entry)
        return matches

    @_asks("listed")
    def names_below(self) -> list[str]:
        folder = f"{self.path.rstrip('/')}/"
        return [name.removeprefix(folder) for name in self.fs.find(self.path)]

    def is_locked(self) -> bool:
        """Return whether a process that is not known to have ended claims a folder."""
        record = _read_claim(self / CLAIM)
        return bool(record) and not _is_left(record)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Claims a folder during the block, by an object that its holder renews.

        It is made by a put that fails where there is one, names the process, and is removed at the
        end. One that a killed process left does not count: waits for a claim that is not renewed,
        up to `LEFT_AFTER` seconds, and takes it over. A process that finds the claim of another one
        in place of its own ends at once, with a message: it could not renew its claim, as without a
        network, and the other one has gone on with the run.
        """
        path = self / CLAIM
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "id": uuid.uuid4().hex,
        }
        first = ""
        began = time.monotonic()
        while not _put_claim(path, record):
            holder = _read_claim(path)
            if not holder:
                continue  # it was removed in between
            if holder.get("id") == record["id"]:
                break  # the store took it, and answered that it had failed
            # Also by the clock of this machine: the time in the claim is that of its holder, whose
            # clock may be ahead.
            if _is_left(holder) or time.monotonic() - began > LEFT_AFTER:
                _remove_claim(path)
                if _put_claim(path, record):
                    # Another process may have read the same old claim, and remove this new one in
                    # its place. The last one to put its claim has it, and the other one sees that
                    # below.
                    time.sleep(SETTLING)
                    if _read_claim(path).get("id") == record["id"]:
                        break
                continue
            holding = f"{holder.get('id')} {holder.get('renewed')}"
            by = f"process {holder.get('pid')} on {holder.get('host')}"
            # It was renewed, or is another one, since the first look: its process runs.
            if first and holding != first:
                raise ConfigError(
                    f"{name} is in use by another process: {by} holds {path}. Wait for it, or"
                    " choose another run.dir."
                )
            if not first:
                warnings.warn(
                    f"{by} claims {name}: waiting up to {LEFT_AFTER:g} s for whether it renews"
                    f" {path}.",
                    stacklevel=3,
                )
            first = holding
            time.sleep(RENEWAL / 4)
        released = threading.Event()
        thread = threading.Thread(target=_renew_claim, args=(path, record, released), daemon=True)
        thread.start()
        try:
            yield
        finally:
            released.set()
            # A renewal that came after the removal would leave a claim without a holder.
            thread.join()
            with contextlib.suppress(ConfigError):  # it will not count for long
                if _read_claim(path).get("id") == record["id"]:
                    _remove_claim(path)

    @contextlib.contextmanager
    def alone(self, waits: Callable[[], None]) -> Iterator[bool]:
        yield False


def opened_url(url: str) -> Path:
    """Return the path of a URL. Raises ConfigError where nothing here opens such URLs, and where
    its bucket does not answer."""
    scheme = url.split("://")[0].lower()
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = str(error)
        if extra:
            install = f'pip install "jaxformer[{extra}]"'
        raise ConfigError(f"{url}: {scheme}:// needs another package: {install}") from error
    except ValueError as error:
        raise ConfigError(
            f"{url}: no store is known for {scheme}://. Name a path, or a URL such as"
            " gs://bucket/run or s3://bucket/run."
        ) from error
    path = StorePath(url)
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


def _version_in(entry: Mapping[str, Any]) -> ObjectVersion:
    """Return the version that an entry of a listing of fsspec has."""
    tags = [*filter(None, map(entry.get, VERSION_KEYS)), ""]
    return ObjectVersion(int(entry.get("size") or 0), str(tags[0]))


class Upload(OutputFolder):
    """A temporary folder whose files `close` puts into the store. Until then, and after a kill, the
    store has none of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = Path(tempfile.mkdtemp(prefix="jaxformer-"))

    def close(self) -> None:
        try:
            for file in sorted(path for path in self.path.rglob("*") if path.is_file()):
                target: Any = self.folder / file.relative_to(self.path).as_posix()
                target.put(str(file))
        except ConfigError as error:
            raise ConfigError(f"{error} The files are in {self.path}.") from error
        shutil.rmtree(self.path, ignore_errors=True)


class AppendedObject:
    """Takes the bytes to append to a file, and puts the object anew, with all its content, on a
    thread each `PUT_SECONDS`: a store has no append.

    `write` raises OSError, with the reason, while they cannot be put; what it took before is tried
    again. Raises ConfigError where the file cannot be written at first.
    """

    def __init__(self, path: StorePath) -> None:
        self.path = path
        exists = path.exists()
        self._content = bytearray()
        if exists:
            self._content += path.read_bytes()
        self._unput = False
        self._failure = ""
        self._lock = threading.RLock()
        self._closing = threading.Event()
        if not exists:
            self._put()
        self._thread = threading.Thread(target=self._put_regularly, daemon=True)
        self._thread.start()
        _appended.add(self)

    def _put(self) -> None:
        with self.path.replacing() as file:
            file.write(self._content)

    def write(self, content: bytes | bytearray) -> int:
        """Takes all bytes, and returns their number. Raises OSError."""
        with self._lock:
            if self._failure:
                self.flush()
            self._content += content
            self._unput = True
        return len(content)

    def flush(self) -> None:
        """Puts what is not in the store yet. Raises OSError."""
        with self._lock:
            if not self._unput:
                return
            try:
                self._put()
            except ConfigError as error:
                self._failure = str(error)
                raise OSError(self._failure) from error
            self._unput = False
            self._failure = ""

    def close(self) -> None:
        """Puts the rest; a warning says what could not be written."""
        self._closing.set()
        self._thread.join()
        _appended.discard(self)
        try:
            self.flush()
        except OSError as error:
            warnings.warn(f"{self.path} may lack its last lines: {error}", stacklevel=3)

    def _put_regularly(self) -> None:
        while not self._closing.wait(max(PUT_SECONDS, len(self._content) / BYTES_PER_SECOND)):
            with contextlib.suppress(OSError):
                self.flush()


def _put_claim(path: Any, record: dict[str, Any]) -> bool:
    content = json.dumps(record | {"renewed": time.time()})
    return bool(path.put_new(content.encode()))


def _read_claim(path: Any) -> dict[str, Any]:
    """Return the record of a claim; empty where there is none. Raises ConfigError."""
    for attempt in range(READINGS):
        if not path.exists():
            return {}
        try:
            return read_object(path, "remove it if no process trains there")
        except ConfigError:
            # It may have been removed or renewed in between.
            if attempt == READINGS - 1:
                raise
    return {}


def _remove_claim(path: Any) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _is_left(record: dict[str, Any]) -> bool:
    """Return whether the process of a claim has ended on this machine, or has not renewed it for
    long."""
    renewed = record.get("renewed")
    pid = record.get("pid")
    if not isinstance(renewed, int | float) or time.time() - renewed > LEFT_AFTER:
        return True
    if not _machine() or record.get("machine") != _machine() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:  # or it is somebody else's
        return isinstance(error, ProcessLookupError)
    return False


def _machine() -> str:
    """Return a name of this start of this machine and of its table of processes; "" where it has
    none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _renew_claim(path: Any, record: dict[str, Any], released: threading.Event) -> None:
    """Renews a claim until it is released. A failure is tried again at the next time."""
    while not released.wait(RENEWAL):
        try:
            holder = _read_claim(path)
            # A claim that is missing counts as this one's, and is put again.
            if holder.get("id", record["id"]) != record["id"]:
                print(
                    f"error: process {holder.get('pid')} on {holder.get('host')} has taken over"
                    f" {path}, which this process could not renew in time. It ends here, and saves"
                    " nothing more.",
                    file=sys.stderr,
                    flush=True,
                )
                # At once: an exception would end this thread alone, while the main thread goes on
                # to save into a directory that is now that of another process.
                os._exit(1)
            write_text(path, json.dumps(record | {"renewed": time.time()}))
        except ConfigError as error:
            warnings.warn(f"the claim cannot be renewed yet: {error}", stacklevel=2)
