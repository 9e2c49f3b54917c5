"""What a disk does in its own way: locks, renames, appends, links and files that are read in place.

`bucket.Bucket` has the same methods for a bucket, or another store that a URL names. `store_of` a
path is the only place that chooses between them, so that no caller asks where a path leads.
"""

import contextlib
import errno
import fnmatch
import glob
import os
import shutil
import stat
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

LOCK = ".lock"  # the file in a run directory that the process of the run locks
UNFINISHED = ".unfinished"  # the folder in a target in which its files are written
ROOM = "make room, or choose another path"


class ConfigError(ValueError):
    """An invalid setting or input; the message says what, where, what is allowed, what to do."""


class ObjectVersion(NamedTuple):
    """The size of a file in bytes, and what its store gives another value with each change."""

    size: int
    tag: str


class OutputFolder:
    """`path` is a folder on a disk to write to, for libraries that write to nothing else, such as
    event files of TensorBoard and traces. `close` brings its files to `folder`, where it is another
    one. Raises ConfigError, which names `path`, where they cannot be written; then they stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder

    def close(self) -> None:
        pass


class Disk:
    """The files of a disk."""

    # Whether a folder gets its name in one step, so that what has its name is complete.
    renames = True
    # Whether a file is read in pieces where it is, rather than copied to this machine before.
    reads_in_place = True

    # Errors

    @contextlib.contextmanager
    def store_errors(
        self, path: Path, action: str, expected: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Turns what keeps a bucket from answering a library that asks in its own way into one
        ConfigError: `path` cannot be `action`, such as "read". Errors of a disk go on as they are,
        as do `expected` ones."""
        yield

    def require_writable(self, folder: Path) -> None:
        """Writes a file to the folder, or to the nearest one above that exists, and removes it.
        Raises ConfigError where that cannot be done."""
        folder = self._existing(folder)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written ({error.strerror or error}): choose another one."
            ) from error

    def require_folder_of(self, path: Path) -> None:
        """Raises ConfigError where the folder of a file that will be written does not exist."""
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{path} cannot be written: the directory {folder} does not exist.")

    def free_space(self, folder: Path) -> tuple[Path, int] | None:
        """The nearest folder that exists and the bytes that are free on its disk; None where there
        is no such bound."""
        folder = self._existing(folder)
        return folder, shutil.disk_usage(folder).free

    @staticmethod
    def _existing(path: Path) -> Path:
        path = path.absolute()
        return next(folder for folder in (path, *path.parents) if folder.exists())

    # Writing

    @contextlib.contextmanager
    def replacing(self, path: Path, advice: str = ROOM, follow: bool = True) -> Iterator[BinaryIO]:
        """Opens a binary file that gets the name `path` when the block ends without an error.

        The content is on the disk before the name changes, and until then an earlier file stays.
        After an error the new file is removed. Where the path is a symbolic link, the file that it
        leads to is replaced; without `follow`, as in a run directory, the link itself is replaced,
        with a warning. Raises ConfigError, with `advice`, where the file or its directory cannot be
        written, and where the path is something else than a file.
        """
        draft = None
        try:
            replaced_link = not follow and path.is_symlink()
            target = path if replaced_link else resolved_file(path, advice)
            draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
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

    def append(self, path: Path) -> Any:
        """Opens a file without a buffer, to write at its end. Raises OSError for a symbolic link,
        and ConfigError for a URL that cannot be written."""

        def without_links(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666)

        return open(path, "ab", buffering=0, opener=without_links)

    def flush(self) -> None:
        """Puts what was appended to all open files into their store. A failure is left to the next
        write, which reports it."""

    def make_folder(self, folder: Path) -> None:
        """Makes a folder and those above it. Raises ConfigError where it cannot be made."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written ({error.strerror}): choose another directory."
            ) from error

    @contextlib.contextmanager
    def filled(self, target: Path, in_order: bool) -> Iterator[Path]:
        """Gives the folder to write in this block, whose files are in the target at its end: an
        error or a signal leaves none of them. `in_order` says that the target counts for nothing
        before its last file is there."""
        is_new = not target.exists()
        folder = target / UNFINISHED
        self.make_folder(folder)
        try:
            yield folder
            for entry in folder.iterdir():
                entry.rename(target / entry.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):  # it has the files
                    target.rmdir()

    def output_folder(self, folder: Path) -> OutputFolder:
        """The folder in which a library writes what `folder` will hold."""
        return OutputFolder(folder)

    # Moving and removing

    def move_into(self, folder: Path, paths: Sequence[Path]) -> None:
        """Moves files and folders into a folder beside them, which is made; a link is moved
        itself."""
        folder.mkdir(exist_ok=True)
        for path in paths:
            path.rename(folder / path.name)

    def remove_folder(self, folder: Path) -> None:
        """Removes a folder with all that is in it, as far as it can be removed."""
        shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, folder: Path, name: str, note: str, reason: str, marker: str) -> Path:
        """Moves a folder to `name` beside it, or to the next free number of that name, where the
        file `note` says the reason. `marker` is the file that makes the folder complete where it
        cannot be renamed. Returns the new path."""
        target, number = folder.with_name(name), 1
        while self._is_taken(target, note):
            number += 1
            target = folder.with_name(f"{name}-{number}")
        self._move_aside(folder, target, target / note, f"{reason}\n", marker)
        return target

    def _is_taken(self, target: Path, note: str) -> bool:
        return target.exists()

    def _move_aside(self, folder: Path, target: Path, note: Path, text: str, marker: str) -> None:
        folder.rename(target)
        with self.replacing(note, follow=False) as file:
            file.write(text.encode())

    def complete(self, folder: Path, marker: str) -> list[Path]:
        """The folders directly below one that are complete: all, or where a folder cannot be
        renamed, those that have the file `marker`, which is written last."""
        return [path for path in folder.glob("*") if path.is_dir()]

    def incomplete(self, folder: Path, marker: str) -> list[Any]:
        """The other ones, each with a method `remove`."""
        return []

    # Reading

    def version(self, path: Path) -> ObjectVersion | None:
        """The version of a file, None where there is none. Raises ConfigError for an object that
        may not be read, unlike `path.exists()`."""
        try:
            status = path.stat()
        except ValueError:  # a path with a NUL
            return None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        if not stat.S_ISREG(status.st_mode):
            return None
        return ObjectVersion(status.st_size, str(status.st_mtime_ns))

    def blocks(
        self, path: Path, size: int, version: ObjectVersion | None = None
    ) -> Iterator[bytes]:
        """Reads a file, `size` bytes at a time. Raises OSError on a disk, and ConfigError for an
        object that cannot be read or is no longer of its version."""
        with open(path, "rb", buffering=0) as file:
            yield from iter(lambda: file.read(size), b"")

    @contextlib.contextmanager
    def readable(self, path: Path) -> Iterator[Any]:
        """Gives what a library reads in pieces by itself: the path, or an open file of ranges."""
        yield path

    def local_copy(self, path: Path, digest: str = "") -> Path:
        """The file on this machine's disk: itself, or a copy of the object, made where it is
        missing or of an earlier version.

        The digest is that of the content (BLAKE2b, 128 bits): a copy that has it is used without
        asking the store. Raises ConfigError where the object cannot be read, has another digest, or
        changes meanwhile, and where the disk is full.
        """
        return path

    def local_copies(self, paths: Sequence[Path], digests: Sequence[str] = ()) -> list[Path]:
        """`local_copy` of several files of one store at a time."""
        return [*paths]

    def local_folder(self, folder: Path, is_wanted: Callable[[str], bool]) -> Path:
        """The folder on this machine's disk: itself, or one with copies of the objects directly
        below a URL whose names are wanted. Raises ConfigError as `local_copy` does."""
        return folder

    def files_below(
        self, folder: Path, leaves_out: Callable[[str], bool] = lambda name: name.startswith(".")
    ) -> dict[Path, ObjectVersion]:
        """The files below a folder, sorted, with their versions, without the names that are left
        out (hidden ones) and what is below them; links are followed once. Raises ConfigError."""
        paths: list[Path] = []
        folders_read: set[str] = set()

        def refuse(error: OSError) -> None:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror or error}. Check its permissions"
                " and its disk."
            )

        for name, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
            real = os.path.realpath(name)
            if real in folders_read:
                folders.clear()
                continue
            folders_read.add(real)
            folders[:] = [below for below in folders if not leaves_out(below)]
            paths += [Path(name, file) for file in files if not leaves_out(file)]
        return self._versions(sorted(paths, key=lambda path: path.relative_to(folder).as_posix()))

    def files_matching(self, pattern: Path, root: Path) -> dict[Path, ObjectVersion]:
        """The files that a glob finds, sorted, with their versions; `root` is its fixed part.
        Raises ConfigError where a store does not answer."""
        return self._versions(sorted(map(Path, glob.glob(str(pattern), recursive=True))))

    def _versions(self, paths: Sequence[Path]) -> dict[Path, ObjectVersion]:
        versions = {path: self.version(path) for path in paths}
        return {path: version for path, version in versions.items() if version}

    def names_below(self, folder: Path) -> list[str]:
        """The names of all files below a folder, relative to it."""
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def irregular(self, folder: Path) -> list[Path]:
        """What is below a folder and may never end when it is read: pipes, devices, sockets."""
        return [
            path
            for path in folder.rglob("*")
            if path.exists() and not (path.is_file() or path.is_dir())
        ]

    def links(self, paths: Sequence[Path], below: Mapping[Path, str]) -> list[Path]:
        """Which of the paths, and of those that globs find below folders, are symbolic links."""
        found = [path for folder, pattern in below.items() for path in folder.glob(pattern)]
        return [path for path in (*paths, *found) if path.is_symlink()]

    def lacks(self, folder: Path) -> bool:
        """Whether a folder is missing, where even an empty one is there."""
        return not folder.exists()

    # Locks

    def is_locked(self, folder: Path) -> bool:
        """Whether a process has locked a folder."""
        import fcntl  # Windows lacks it

        try:
            descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextlib.contextmanager
    def locked(self, folder: Path, name: str) -> Iterator[None]:
        """Makes a folder where it is missing, and locks it during the block; messages say `name`. A
        folder that was made and has no file at the end is removed. Raises ConfigError where it
        cannot be written, and where another process has locked it."""
        import fcntl  # Windows lacks it

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
    def alone(self, folder: Path, waits: Callable[[], None]) -> Iterator[bool]:
        """Keeps a folder from other processes of this machine during the block, and waits for one
        that has it; `waits` is called before. Gives False where the file system cannot lock: work
        may then be done twice, with the same result."""
        if sys.platform == "win32":
            yield False
            return
        import fcntl  # Windows lacks it

        handle = os.open(folder, os.O_RDONLY)
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


DISK = Disk()


def store_of(path: Path) -> Disk:
    """The store of a path: the path of a URL names its own, and others are those of a disk."""
    store: Disk = getattr(path, "store", DISK)
    return store


def resolved_file(path: Path, advice: str) -> Path:
    """The file that is written for a path, with symbolic links resolved. Raises ConfigError, with
    `advice`, for something else than a file."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise ConfigError(f"{path} is {kind_of(target)} and not a file: {advice}.")
    return target


def kind_of(path: Path) -> str:
    """What a path is that is no file."""
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
    """A test of names by patterns such as "*.json"."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
