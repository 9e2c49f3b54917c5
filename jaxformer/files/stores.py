"""What a disk does in its own way: locks, renames, appends, links and files that are read in place.

`OnDisk` has it for a path of a disk, and `bucket.StorePath` has the same methods for a URL.
`store_of` is the only place that chooses between them, so that no caller asks where a path leads.
"""

import contextlib
import errno
import fnmatch
import glob
import itertools
import os
import shutil
import stat
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

LOCK = ".lock"  # the file in a run directory that the process of the run locks
UNFINISHED = ".unfinished"  # the folder in a target in which its files are written
COPIES_TOGETHER = 16  # objects that are asked for or copied at the same time
ROOM = "make room, or choose another path"


class ConfigError(ValueError):
    """An invalid setting or input; the message says what, where, what is allowed, what to do."""


class ObjectVersion(NamedTuple):
    """The size of a file in bytes, and what its store gives another value with each change."""

    size: int
    tag: str


# Files and their versions.
Matches = dict[Path, ObjectVersion]


def is_hidden(name: str) -> bool:
    return name.startswith(".")


class OutputFolder:
    """`path` is a folder on a disk to write to, for libraries that write to nothing else, such as
    event files of TensorBoard and traces. `close` brings its files to `folder`, where it is another
    one. Raises ConfigError, which names `path`, where they cannot be written; then they stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder

    def close(self) -> None:
        pass


class OnDisk:
    """A path of a disk."""

    # Whether a folder gets its name in one step, so that what has its name is complete.
    renames = True
    # Whether a file is read in pieces where it is, rather than copied to this machine before.
    reads_in_place = True

    def __init__(self, path: Path) -> None:
        self._path = path

    # Errors

    @contextlib.contextmanager
    def store_errors(
        self, action: str, expected: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Turns what keeps a bucket from answering a library that asks in its own way into one
        ConfigError: the path cannot be `action`, such as "read". Errors of a disk go on as they
        are, as do `expected` ones."""
        yield

    def require_writable(self) -> None:
        """Writes a file to the folder, or to the nearest one above that exists, and removes it.
        Raises ConfigError where that cannot be done."""
        folder = self._existing()
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written ({error.strerror or error}): choose another one."
            ) from error

    def free_space(self) -> tuple[Path, int] | None:
        """Return the nearest folder that exists and the bytes that are free on its disk; None where
        there is no such bound."""
        folder = self._existing()
        return folder, shutil.disk_usage(folder).free

    def _existing(self) -> Path:
        path = self._path.absolute()
        return next(folder for folder in (path, *path.parents) if folder.exists())

    def lacks_folder(self) -> bool:
        """Return whether the path is no folder, where there has to be one before files are
        written."""
        return not self._path.is_dir()

    # Writing

    @contextlib.contextmanager
    def replacing(self, advice: str = ROOM, follow: bool = True) -> Iterator[BinaryIO]:
        """Opens a binary file that gets the name of the path when the block ends without an error.

        The content is on the disk before the name changes, and until then an earlier file stays.
        After an error the new file is removed. Where the path is a symbolic link, the file that it
        leads to is replaced; without `follow`, as in a run directory, the link itself is replaced,
        with a warning. Raises ConfigError, with `advice`, where the file or its directory cannot be
        written, and where the path is something else than a file.
        """
        path = self._path
        draft = None
        try:
            replaced_link = not follow and path.is_symlink()
            target = path
            if not replaced_link:
                target = resolved_file(path, advice)
            # In the folder of the target, because a file cannot be renamed to another file system.
            # The name is new each time, so that two processes never write one draft.
            draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
            # The name is an entry of the folder. Without this the former file may be back after a
            # power cut.
            sync(target.parent)
            if replaced_link:
                warnings.warn(
                    f"{path} was a link. It is a file now, and what it led to was not changed:"
                    " nothing in a run directory is written through a link.",
                    stacklevel=3,
                )
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror or error}): {advice}."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                if draft is not None:
                    draft.unlink(missing_ok=True)

    def append(self) -> Any:
        """Opens a file without a buffer, to write at its end. Raises OSError for a symbolic link,
        and ConfigError for a URL that cannot be written."""

        def without_links(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666)

        return open(self._path, "ab", buffering=0, opener=without_links)

    def flush_appended(self) -> None:
        """Puts what was appended to all open files into their store. A failure is left to the next
        write, which reports it."""

    def make_folder(self) -> None:
        """Makes the folder and those above it. Raises ConfigError where it cannot be made."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written ({error.strerror}): choose another directory."
            ) from error

    @contextlib.contextmanager
    def filled(self, in_order: bool) -> Iterator[Path]:
        """Gives the folder to write in this block, whose files are in that of the path at its end:
        an error or a signal in the block leaves none of them. `in_order` says that they count for
        nothing before the last one is there."""
        target = self._path
        is_new = not target.exists()
        # Within the target, so that it is on the same file system and its entries can be renamed.
        folder = target / UNFINISHED
        OnDisk(folder).make_folder()
        try:
            yield folder
            # In the order of writing, so that a kill between two of them leaves what counts for
            # nothing where the last file makes the others count.
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime_ns):
                entry.rename(target / entry.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):  # it has the files
                    target.rmdir()

    def output_folder(self) -> OutputFolder:
        """Return the folder in which a library writes what the one of the path will hold."""
        return OutputFolder(self._path)

    # Moving and removing

    def gather(self, paths: Sequence[Path]) -> None:
        """Moves files and folders into this folder beside them, which is made; a link is moved
        itself."""
        self._path.mkdir(exist_ok=True)
        for path in paths:
            path.rename(self._path / path.name)

    def remove_folder(self) -> None:
        """Removes a folder with all that is in it, as far as it can be removed."""
        shutil.rmtree(self._path, ignore_errors=True)

    def set_aside(self, name: str, note: str, reason: str, marker: str) -> Path:
        """Moves a folder to `name` beside it, or to the next free number of that name, where the
        file `note` says the reason. `marker` is the file that makes the folder complete where it
        cannot be renamed. Returns the new path."""
        target = self._path.with_name(name)
        number = 1
        while target.exists():
            number += 1
            target = self._path.with_name(f"{name}-{number}")
        self._path.rename(target)
        with OnDisk(target / note).replacing(follow=False) as file:
            file.write(f"{reason}\n".encode())
        return target

    def folders(self, marker: str, complete: bool = True) -> list[Any]:
        """Return the folders directly below that are complete, or those that are not: where a
        folder cannot be renamed, it is complete once it has the file `marker`, which is written
        last."""
        if not complete:
            return []
        return [path for path in self._path.glob("*") if path.is_dir()]

    # Reading

    def version(self) -> ObjectVersion | None:
        """Return the version of a file, None where there is none. Raises ConfigError for an object
        that may not be read, unlike `path.exists()`."""
        try:
            status = self._path.stat()
        except ValueError:  # a path with a NUL
            return None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        if not stat.S_ISREG(status.st_mode):
            return None
        return ObjectVersion(status.st_size, str(status.st_mtime_ns))

    def blocks(self, size: int) -> Iterator[bytes]:
        """Reads a file, `size` bytes at a time. Raises OSError on a disk, and ConfigError for an
        object that cannot be read or is replaced meanwhile."""
        with open(self._path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(size), b"")

    @contextlib.contextmanager
    def readable(self) -> Iterator[Any]:
        """Gives what a library reads in pieces by itself: the path, or an open file of ranges."""
        yield self._path

    def local_copy(self, digest: str = "") -> Path:
        """Return the file on this machine's disk: itself, or a copy of the object, made where it is
        missing or of an earlier version.

        The digest is that of the content (BLAKE2b, 128 bits): a copy that has it is used without
        asking the store. Raises ConfigError where the object cannot be read, has another digest, or
        changes meanwhile, and where the disk is full.
        """
        return self._path

    def local_folder(self, is_wanted: Callable[[str], bool]) -> Path:
        """Return the folder on this machine's disk: itself, or one with copies of the objects
        directly below a URL whose names are wanted. Raises ConfigError as `local_copy` does."""
        return self._path

    def files_below(self, leaves_out: Callable[[str], bool] = is_hidden) -> Matches:
        """Return the files below a folder, sorted, with their versions, without the names that
        are left out (hidden ones) and what is below them; links are followed once. Raises
        ConfigError."""
        paths: list[Path] = []
        folders_read: set[str] = set()

        def refuse(error: OSError) -> None:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror or error}. Check its permissions"
                " and its disk."
            )

        for name, folders, files in os.walk(self._path, onerror=refuse, followlinks=True):
            real = os.path.realpath(name)
            # A link to a folder above it would be walked again and again.
            if real in folders_read:
                folders.clear()
                continue
            folders_read.add(real)
            folders[:] = [below for below in folders if not leaves_out(below)]
            paths += [Path(name, file) for file in files if not leaves_out(file)]
        paths.sort(key=lambda path: path.relative_to(self._path).as_posix())
        return with_versions(paths)

    def files_matching(self, root: Path) -> Matches:
        """Return the files that a glob finds, sorted, with their versions; `root` is its fixed
        part. Raises ConfigError where a store does not answer."""
        return with_versions(sorted(map(Path, glob.glob(str(self._path), recursive=True))))

    def names_below(self) -> list[str]:
        """Return the names of all files below a folder, relative to it."""
        names = []
        for path in self._path.rglob("*"):
            if path.is_file():
                names.append(path.relative_to(self._path).as_posix())
        return names

    # Locks

    def is_locked(self) -> bool:
        """Return whether a process has locked a folder."""
        import fcntl  # Windows lacks it

        try:
            # O_NONBLOCK, because the folder may come from somebody else, and a pipe of this name
            # would hold up the reader.
            descriptor = os.open(self._path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            # Shared, so that of two that look at once neither takes the other for a run.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Makes a folder where it is missing, and locks it during the block; messages say `name`. A
        folder that was made and has no file at the end is removed. Raises ConfigError where it
        cannot be written, and where another process has locked it."""
        import fcntl  # Windows lacks it

        folder = self._path
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            # A link is not followed, and nothing that is there is changed.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(folder / LOCK, flags, 0o666)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, f"{LOCK} is not a regular file")
            lock_file = os.fdopen(descriptor, "r+")
        except OSError as error:
            raise ConfigError(
                f"{name} cannot be written ({error.strerror}): choose another run.dir."
            ) from error
        with lock_file:
            try:
                # The system takes this lock back when the process ends, even by a kill. A file that
                # locks by being there would refuse the command that continues the run.
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"{name} is in use by another process: wait for it, or choose another run.dir."
                ) from error
            try:
                yield
            finally:
                entries = [path for path in folder.iterdir() if path.name != LOCK]
                if missing and all(path.is_dir() for path in entries):
                    # A folder in it that is not empty stays.
                    with contextlib.suppress(OSError):
                        for path in entries:
                            path.rmdir()
                        (folder / LOCK).unlink()
                        for path in missing:
                            path.rmdir()

    @contextlib.contextmanager
    def alone(self, waits: Callable[[], None]) -> Iterator[bool]:
        """Keeps a folder from other processes of this machine during the block, and waits for one
        that has it; `waits` is called before. Gives False where the file system cannot lock: work
        may then be done twice, with the same result."""
        if sys.platform == "win32":
            yield False
            return
        import fcntl  # Windows lacks it

        handle = os.open(self._path, os.O_RDONLY)
        try:
            is_alone = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                is_alone = False
            yield is_alone
        finally:
            os.close(handle)


def store_of(path: Path) -> OnDisk:
    """Return what the store of a path does in its own way; the path of a URL has these methods
    itself."""
    bucket_path: Any = path
    return OnDisk(path) if isinstance(path, Path) else bucket_path


def local_copies(
    paths: Sequence[Path], digests: Iterable[str] = itertools.repeat("")
) -> list[Path]:
    """`local_copy` of several files at a time."""
    with ThreadPoolExecutor(COPIES_TOGETHER) as threads:
        copies = [store_of(path).local_copy for path in paths]
        return [*threads.map(lambda copy, digest: copy(digest), copies, digests)]


def with_versions(paths: Sequence[Path]) -> Matches:
    """Return the paths that are files, with their versions."""
    matches = {}
    for path in paths:
        if version := OnDisk(path).version():
            matches[path] = version
    return matches


def resolved_file(path: Path, advice: str) -> Path:
    """Return the file that is written for a path, with symbolic links resolved. Raises ConfigError,
    with `advice`, for something else than a file."""
    target = path
    if path.is_symlink():
        target = Path(os.path.realpath(path))
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise ConfigError(f"{path} is {kind_of(target)} and not a file: {advice}.")
    return target


def kind_of(path: Path) -> str:
    """Return what a path is that is no file."""
    if not path.exists():
        return "a link that leads to itself"
    return "a directory" if path.is_dir() else "a device, a pipe or a socket"


def sync(*paths: Path) -> None:
    """Flushes files, and names in directories, to the disk, where their file system can."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(descriptor)


def matching(*patterns: str) -> Callable[[str], bool]:
    """Return a test of names by patterns such as "*.json"."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
