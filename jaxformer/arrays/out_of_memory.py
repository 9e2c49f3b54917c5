"""Out of memory as an error class."""

import contextlib
import re
from collections.abc import Callable, Iterator

import jax

# Memory that only a fused kernel uses: no smaller batch makes it fit.
CHIP_MEMORY = re.compile(r"\b[vs]mem\b|shared memory", re.IGNORECASE)


class OutOfMemory(RuntimeError):
    """A device has not enough memory for a run. The message says what the run was doing, and what
    the compiler or the allocator said; existing checkpoints are untouched. For the error of a run,
    `jaxformer.cli.train.advice` names the settings that need less.

    `place` is what the run was doing. `on_chip` says whether a kernel does not fit in the small
    memory beside the processors.
    """

    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text.splitlines()[0]}")
        self.place = place
        self.text = text
        self.on_chip = CHIP_MEMORY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error of a compiler or an allocator says that memory has run out."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


@contextlib.contextmanager
def memory_of(place: str | Callable[[], str]) -> Iterator[None]:
    """Raises OutOfMemory, naming `place`, where a device has not enough memory for what is done
    inside."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(place if isinstance(place, str) else place(), str(error)) from error
