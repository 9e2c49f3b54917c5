"""Standard output and error of a command that goes on without whoever reads them, and the files
that it may open."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from jaxformer.files import ConfigError

# Files that training may have to open at once; and how many are asked of the system where it
# allows more.
FEWEST_FILES, MOST_FILES = 64, 65_536


class LastingStream:
    """A text stream whose first failed write is told, and whose later ones write nothing: training
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
        """Leads what is written from now on to the null device, and says so on standard error."""
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())
        told = f"{self._name} cannot be written ({error.strerror}): the run goes on without it."
        print(f"WARNING: {told} metrics.jsonl has its numbers.", file=sys.stderr, flush=True)


def open_closed_streams() -> None:
    """Puts the null device in place of each standard stream that whoever started the command has
    closed: Python has None there, and the next file that is opened would get the stream's number,
    and with it whatever a library prints."""
    streams = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(streams.items()):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this
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
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
            soft = max(soft, wanted)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        raise ConfigError(
            f"this process may open only {soft} files at once, and training needs at least"
            f" {FEWEST_FILES}: allow more where it is started, for example by `ulimit -n 1024`."
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
