"""Standard output and error of a command that goes on without whoever reads them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


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


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """In this block standard output and error are lasting streams."""
    before = sys.stdout, sys.stderr
    if None in before:  # closed by whoever started the command, and nothing is written
        yield
        return
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
