"""Standard output and error of a command that goes on when nobody reads them any more, and the
number of files that it may open."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from jaxformer.files import ConfigError

MIN_FILES = 64  # that training may have to open at once
MAX_FILES = 65_536  # that are requested of the system where it allows more


class LastingStream:
    """A text stream that warns of its first failed write, and then writes nothing: training
    outlives `| head`, a `tee` that died, a terminal that was closed, and a full disk of its log."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Redirects the stream to the null device, and says so on standard error."""
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())
        print(
            f"WARNING: {self._name} cannot be written ({error.strerror}): the run goes on without"
            " it. metrics.jsonl has its numbers.",
            file=sys.stderr,
            flush=True,
        )


def open_closed_streams() -> None:
    """Opens the null device for each standard stream that was closed when the command started.

    Python has None for such a stream, and the next file that is opened would get its number, and
    with it whatever a library prints.
    """
    streams = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(streams.items()):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        stream = os.fdopen(number, mode, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def require_files() -> None:
    """Raises the number of files that this process may open to what the machine allows. Raises
    ConfigError where training would run out of them at its first checkpoint."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > soft:
        limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
            soft = max(soft, limit)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise ConfigError(
            f"this process may open only {soft} files at once, and training needs at least"
            f" {MIN_FILES}: allow more where it is started, for example by `ulimit -n 1024`."
        )


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """In this block standard output and error are lasting streams."""
    before = sys.stdout, sys.stderr
    out, error = (
        LastingStream(sys.stdout, "standard output"),
        LastingStream(sys.stderr, "standard error"),
    )
    sys.stdout, sys.stderr = out, error  # type: ignore[assignment]
    try:
        yield
    finally:
        out.flush()
        sys.stdout, sys.stderr = before
