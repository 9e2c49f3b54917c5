"""The memory that the process keeps from its operating system."""

import ctypes
import os
import sys


def keep_memory() -> None:
    """Makes glibc's malloc keep freed memory for the next training step; otherwise a CPU spends its
    time on page faults. On two cores of an AMD EPYC with AVX-512 the small step of
    benchmarks/train_cpu.py is 1.32 times as fast in 1 microbatch (1.12 to 1.48, 12 samples in
    turn), and 1.03 times in 4 (0.99 to 1.17, 14 samples).

    This affects the whole process, so only the entry point does it, before JAX is imported.
    JAXFORMER_MALLOC=system turns it off.
    """
    unwanted = sys.platform != "linux" or os.environ.get("JAXFORMER_MALLOC") == "system"
    if unwanted or "jax" in sys.modules:
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    settings = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}
    for parameter, value in settings.values():
        mallopt(parameter, value)
