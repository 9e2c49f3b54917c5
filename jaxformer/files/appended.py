"""A file in a store that grows, such as the metrics of a run: the object of its name, and tail
objects in `<name>.parts/`, which are joined when it is read.

A store has no append. Each tail is named by its first byte, and counts only where the bytes before
it end, so that no order of puts and removals, and no kill between two of them, shows a line twice.
"""

import contextlib
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, append_to, is_remote, read_file, replacing, store_errors

SECONDS = 5.0  # between two puts; Google Cloud refuses more than one a second of one object
TAIL_BYTES = 2**16  # from this size on a tail is not put again, and the next one begins

_open: "weakref.WeakSet[AppendedObject]" = weakref.WeakSet()


def open_appended(path: Path) -> Any:
    """Opens a file to write at its end, as `append_to` does for a local one. Raises OSError for a
    symbolic link, and ConfigError for a URL that cannot be written."""
    return AppendedObject(path) if is_remote(path) else append_to(path)


def read_appended(path: Path) -> bytes:
    """The bytes of an appended file. Raises ConfigError as `read_file` does."""
    content = read_file(path)
    with store_errors(path, "read"):
        for tail in _tails(path):
            # A tail that does not follow is left from before the file was replaced.
            if int(tail.name) == len(content):
                with contextlib.suppress(FileNotFoundError):  # joined since the listing
                    content += tail.read_bytes()
    return content


def remove_tails(path: Path) -> None:
    """Removes the tails of an appended file, whose content is then that of its object."""
    with store_errors(path, "written"):
        for tail in reversed(_tails(path)):
            with contextlib.suppress(FileNotFoundError):
                tail.unlink()


def modified(path: Path) -> float:
    """When an appended file was last written, in seconds as of `time.time()`."""
    with store_errors(path, "read"):
        return max(file.stat().st_mtime for file in (path, *_tails(path)))


def flush_appended() -> None:
    """Puts what was appended to all open files. A checkpoint calls it, so that the lines before it
    are in the store when it is. A failure is left to the next write, which reports it."""
    for file in tuple(_open):
        with contextlib.suppress(OSError):
            file.flush()


def _joined(path: Path) -> int:
    """Puts the content of an appended file into its one object; the number of its bytes."""
    with store_errors(path, "read"):
        exists = path.exists()
    content = read_appended(path) if exists else b""
    if not exists or _tails(path):
        with replacing(path) as file:
            file.write(content)
        remove_tails(path)
    return len(content)


def _tails(path: Path) -> list[Path]:
    """The tails of a file, in the order of their bytes; a local file has none."""
    if not is_remote(path):
        return []
    try:
        tails = [*path.with_name(f"{path.name}.parts").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [tail for tail in tails if tail.name.isdecimal()]
    return sorted(named, key=lambda tail: int(tail.name))


class AppendedObject:
    """Takes the bytes to append to a file, and puts them on a thread each `SECONDS`.

    `write` raises OSError, with the reason, while they cannot be put; what it took before is tried
    again. Raises ConfigError where the file cannot be written at first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail, self._unput = bytearray(), False
        self._first_byte = _joined(path)
        self._failure = ""
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._put_regularly, daemon=True)
        self._thread.start()
        _open.add(self)

    def write(self, content: bytes | bytearray) -> int:
        """Takes all bytes, and returns their number. Raises OSError."""
        with self._lock:
            if self._failure:
                self.flush()
            if len(self._tail) >= TAIL_BYTES and not self._unput:
                self._first_byte += len(self._tail)
                self._tail.clear()
            self._tail += content
            self._unput = True
        return len(content)

    def flush(self) -> None:
        """Puts what is not in the store yet. Raises OSError."""
        with self._lock:
            if not self._unput:
                return
            name = f"{self.path.name}.parts/{self._first_byte:012d}"
            try:
                with replacing(self.path.parent / name) as file:
                    file.write(self._tail)
            except ConfigError as error:
                self._failure = str(error)
                raise OSError(self._failure) from error
            self._unput, self._failure = False, ""

    def close(self) -> None:
        """Puts the rest and joins the tails; a warning says what could not be written."""
        self._closing.set()
        self._thread.join()
        _open.discard(self)
        try:
            self.flush()
            _joined(self.path)
        except (OSError, ConfigError) as error:
            warnings.warn(f"{self.path} may lack its last lines: {error}", stacklevel=3)

    def _put_regularly(self) -> None:
        began = time.monotonic()
        while not self._closing.wait(max(SECONDS - (time.monotonic() - began), 0.1)):
            began = time.monotonic()
            with contextlib.suppress(OSError):
                self.flush()
