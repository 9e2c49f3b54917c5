"""A file in a store that grows, such as the metrics of a run. A store has no append, so the object
is put anew, with all its content."""

import contextlib
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, append_to, is_remote, read_file, replacing

SECONDS = 5.0  # between two puts; Google Cloud refuses more than one a second of one object
BYTES_PER_SECOND = 1 << 20  # that puts take on average at most: large objects are put more rarely

_open: "weakref.WeakSet[AppendedObject]" = weakref.WeakSet()


def open_appended(path: Path) -> Any:
    """Opens a file to write at its end, as `append_to` does for a local one. Raises OSError for a
    symbolic link, and ConfigError for a URL that cannot be written."""
    return AppendedObject(path) if is_remote(path) else append_to(path)


def flush_appended() -> None:
    """Puts what was appended to all open files. A checkpoint calls it, so that the lines before it
    are in the store when it is. A failure is left to the next write, which reports it."""
    for file in tuple(_open):
        with contextlib.suppress(OSError):
            file.flush()


class AppendedObject:
    """Takes the bytes to append to a file, and puts them on a thread each `SECONDS`.

    `write` raises OSError, with the reason, while they cannot be put; what it took before is tried
    again. Raises ConfigError where the file cannot be written at first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        exists = path.exists()
        self._content = bytearray(read_file(path) if exists else b"")
        self._unput, self._failure = False, ""
        self._lock, self._closing = threading.RLock(), threading.Event()
        if not exists:
            with replacing(path):
                pass
        self._thread = threading.Thread(target=self._put_regularly, daemon=True)
        self._thread.start()
        _open.add(self)

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
                with replacing(self.path) as file:
                    file.write(self._content)
            except ConfigError as error:
                self._failure = str(error)
                raise OSError(self._failure) from error
            self._unput, self._failure = False, ""

    def close(self) -> None:
        """Puts the rest; a warning says what could not be written."""
        self._closing.set()
        self._thread.join()
        _open.discard(self)
        try:
            self.flush()
        except OSError as error:
            warnings.warn(f"{self.path} may lack its last lines: {error}", stacklevel=3)

    def _put_regularly(self) -> None:
        while not self._closing.wait(max(SECONDS, len(self._content) / BYTES_PER_SECOND)):
            with contextlib.suppress(OSError):
                self.flush()
