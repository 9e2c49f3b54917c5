"""Out of memory as an error class: how many bytes were asked for, and by what. `remedies.py` lists
the settings that need less."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from jaxformer.config.format import human_bytes

AMOUNT = r"([\d.]+) ?([KMGT]?)(?:i?B|bytes)?"
# Messages of the compilers and allocators (libtpu 0.0.42, jaxlib 0.10, and older ones) that give
# the bytes needed, then the bytes available.
NEEDED = (
    # TPU: "(40.00G) exceeds available hbm (31.25G)"
    rf"\({AMOUNT}\) exceeds available \w+ \({AMOUNT}\)",
    # TPU: "Used 21.95G of 15.48G hbm"
    rf"Used {AMOUNT} of {AMOUNT} \w+",
    # GPU, for the shared memory of a kernel: "requested: 262144, available: 232448"
    rf"requested:? {AMOUNT}, available:? {AMOUNT}",
)
# Messages that give only the bytes of an allocation that failed. GPU: "trying to allocate 6291456
# bytes", "allocate request for 2.00GiB (...)"; CPU: "allocating".
ASKED = rf"allocat(?:e|ing)(?: request for)? {AMOUNT}"
# Memory that only a fused kernel uses: no smaller batch makes it fit.
ON_CHIP = re.compile(r"\b[vs]mem\b|shared memory", re.IGNORECASE)


class OutOfMemory(RuntimeError):
    """A device has not enough memory for a run. The message says what the run was doing, how many
    bytes it asked for and how many the device has; existing checkpoints are untouched. For the
    error of a run, `jaxformer.tools.remedies.advice` names the settings that need less.

    `place` is what the run was doing. `needed` is the number of bytes that it needs at once,
    `asked` that of an allocation that failed, `available` that of the device, each None where
    unknown.
    """

    def __init__(self, message: str, shortage: "Shortage") -> None:
        super().__init__(message)
        self.shortage = shortage
        self.place, self.needed = shortage.place, shortage.needed
        self.asked, self.available = shortage.asked, shortage.available


@dataclass(frozen=True)
class Shortage:
    """What ran out, and during what; bytes are None where the error does not give them."""

    place: str
    text: str
    needed: int | None = None
    asked: int | None = None
    available: int | None = None
    in_use: int | None = None

    @property
    def on_chip(self) -> bool:
        """Whether a kernel does not fit in the small memory beside the processors."""
        return ON_CHIP.search(self.text) is not None

    def __str__(self) -> str:
        if self.needed and self.available:
            memory = "its on-chip memory" if self.on_chip else "the memory of a device"
            return (
                f"{self.place}: it needs {human_bytes(self.needed)}, and {memory} is"
                f" {human_bytes(self.available)}."
            )
        in_use = f", of which {human_bytes(self.in_use)} are in use" if self.in_use else ""
        size = f"; a device has {human_bytes(self.available)}{in_use}" if self.available else ""
        if self.asked:
            return f"{self.place}: an allocation of {human_bytes(self.asked)} failed{size}."
        return f"{self.place}: a device has no memory left{size}."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error of a compiler or an allocator says that memory has run out."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def shortage_of(error: BaseException, place: str) -> Shortage:
    """The figures of an error for which `is_out_of_memory` is true; where it has none, those that
    the device reports."""
    text = str(error)
    for pattern in NEEDED:
        amounts = re.search(pattern, text, re.IGNORECASE)
        if amounts:
            needed, needed_unit, available, available_unit = amounts.groups()
            return Shortage(
                place,
                text,
                needed=_bytes(needed, needed_unit),
                available=_bytes(available, available_unit),
            )
    asked = re.search(ASKED, text, re.IGNORECASE)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Shortage(
        place,
        text,
        asked=_bytes(*asked.groups()) if asked else None,
        available=stats.get("bytes_limit"),
        in_use=stats.get("bytes_in_use"),
    )


def _bytes(number: str, unit: str) -> int:
    """The bytes of a number in a unit of AMOUNT: "" for bytes, or K, M, G or T."""
    return round(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))


@contextlib.contextmanager
def memory_of(place: str | Callable[[], str]) -> Iterator[None]:
    """Raises OutOfMemory, naming `place`, where a device has not enough memory for what is done
    inside."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        shortage = shortage_of(error, place if isinstance(place, str) else place())
        raise OutOfMemory(str(shortage), shortage) from error
