"""What a command does before it imports JAX: it keeps freed memory, and turns signals into exit
statuses.

This file imports only the standard library.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator

from jaxformer.cluster.signals import StopRequest, current, watched


def keep_memory() -> None:
    """Makes glibc's malloc keep freed memory for the next training step, which otherwise spends its
    time on page faults. On two cores of an AMD EPYC with AVX-512 the small step of
    benchmarks/train_cpu.py is 1.32 times as fast in 1 microbatch (1.12 to 1.48, 12 samples in
    turn), and 1.03 times in 4 (0.99 to 1.17, 14 samples).

    This affects the entire process, so only the entry point does it, before JAX is imported.
    JAXFORMER_MALLOC=system turns it off.
    """
    unwanted = sys.platform != "linux" or os.environ.get("JAXFORMER_MALLOC") == "system"
    if unwanted or "jax" in sys.modules:
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    for parameter, value in (
        (-8, 1),  # M_ARENA_MAX
        (-4, 0),  # M_MMAP_MAX
        (-1, -1),  # M_TRIM_THRESHOLD
    ):
        mallopt(parameter, value)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A block that imports libraries and does nothing else, so that a signal may end the process in
    it without unwinding."""
    request = current() or StopRequest()
    request.imports = True
    try:
        yield
    finally:
        request.imports = False


def guarded(run: Callable[[], int]) -> int:
    """The exit status of a program that signals may end: 128 + the signal's number, 143 for SIGTERM
    and 130 for SIGINT."""
    with watched(ends=True) as request:
        try:
            return run()
        except KeyboardInterrupt as stop:
            request.signal = getattr(stop, "signal", signal.SIGINT)
            with contextlib.suppress(OSError):  # a terminal that was closed
                print(request.ending(), file=sys.stderr)
            return 128 + int(request.signal)
