"""Out of memory as an error of its own: what asked for how much, and where. `remedies.py` has what
to change."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from jaxformer.config.format import human_bytes

AMOUNT = r"([\d.]+) ?([KMGT]?)(?:i?B|bytes)?"
# How the compilers and allocators say it (libtpu 0.0.42, jaxlib 0.10, and older ones), with the
# bytes needed and those there are.
NEEDED = (
    rf"\({AMOUNT}\) exceeds available \w+ \({AMOUNT}\)",  # TPU: "(40.00G) exceeds ..."
    rf"Used {AMOUNT} of {AMOUNT} \w+",  # TPU: "Used 21.95G of 15.48G hbm"
    rf"requested:? {AMOUNT}, available:? {AMOUNT}",  # GPU: shared memory of a kernel
)
# GPU: "trying to allocate 6291456 bytes", "allocate request for 2.00GiB (...)"; CPU: "allocating".
ASKED = rf"allocat(?:e|ing)(?: request for)? {AMOUNT}"
# Memory that only a fused kernel uses: no smaller batch makes it fit.
ON_CHIP = re.compile(r"\b[vs]mem\b|shared memory", re.IGNORECASE)


class OutOfMemory(RuntimeError):
    """A device has not enough memory for a run. The message says for what, how much was asked for
    and is there, and which settings need less; checkpoints from before are untouched.

    `place` is what the run was doing; `needed` are the bytes that it needs at once, `asked` those
    of an allocation that failed, `available` those of the device, each None where unknown.
    """

    def __init__(self, message: str, shortage: "Shortage") -> None:
        super().__init__(message)
        self.shortage = shortage
        self.place, self.needed = shortage.place, shortage.needed
        self.asked, self.available = shortage.asked, shortage.available


@dataclass(frozen=True)
class Shortage:
    """What ran out, and where; bytes are None where the error does not say them."""

    place: str
    text: str
    needed: int | None = None
    asked: int | None = None
    available: int | None = None
    in_use: int | None = None

    @property
    def on_chip(self) -> bool:
        """Whether it is the small memory beside the processors that a kernel does not fit."""
        return ON_CHIP.search(self.text) is not None

    def __str__(self) -> str:
        has = human_bytes(self.available) if self.available else ""
        if self.needed and has:
            memory = "its on-chip memory" if self.on_chip else "the memory of a device"
            return f"{self.place}: it needs {human_bytes(self.needed)}, and {memory} is {has}."
        known = f", of which {human_bytes(self.in_use)} are in use" if self.in_use else ""
        there = f"; a device has {has}{known}" if has else ""
        if self.asked:
            return f"{self.place}: an allocation of {human_bytes(self.asked)} failed{there}."
        return f"{self.place}: a device has no memory left{there}."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a compiler or an allocator has run out of memory."""
    text = str(error)
    named = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return isinstance(error, jax.errors.JaxRuntimeError) and named


def shortage_of(error: BaseException, place: str) -> Shortage:
    """What an error of which `is_out_of_memory` holds says, with the figures of the device where
    the error has none."""
    text = str(error)
    for pattern in NEEDED:
        if found := re.search(pattern, text, re.IGNORECASE):
            needed, available = _bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])
            return Shortage(place, text, needed=needed, available=available)
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
        found = shortage_of(error, place if isinstance(place, str) else place())
        raise OutOfMemory(str(found), found) from error
