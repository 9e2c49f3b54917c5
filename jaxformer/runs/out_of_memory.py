"""Out of memory as one message: what asked for how much and where, and the settings that need
less."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import jax
from jax.sharding import Mesh

from jaxformer.config import RunConfig
from jaxformer.mesh import batch_devices
from jaxformer.report import human_bytes
from jaxformer.runs.device import with_kernel
from jaxformer.runs.setup import RunSetup
from jaxformer.settings import VOLATILE, ConfigError
from jaxformer.sharding import platform

SIZE = r"([\d.]+) ?([KMGT]?)(?:i?B|bytes)?"
# How the compilers and allocators say it (libtpu 0.0.42, jaxlib 0.10, and older ones), with the
# bytes needed and those there are.
NEEDED = (
    rf"\({SIZE}\) exceeds available \w+ \({SIZE}\)",  # TPU: "HLO temporaries (40.00G) exceeds ..."
    rf"Used {SIZE} of {SIZE} \w+",  # TPU: "Used 21.95G of 15.48G hbm"
    rf"requested:? {SIZE}, available:? {SIZE}",  # GPU: shared memory of a kernel
)
# GPU: "trying to allocate 6291456 bytes", "allocate request for 2.00GiB (...)"; CPU: "allocating".
ASKED = rf"allocat(?:e|ing)(?: request for)? {SIZE}"
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


@dataclass(frozen=True)
class Change:
    """Settings by their dotted names, with which a run needs less memory, and how."""

    settings: dict[str, Any]
    effect: str

    def __str__(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in self.settings.items())

    @property
    def resumes(self) -> bool:
        """Whether a run that was begun may continue with it."""
        return all(map(is_volatile, self.settings))


def is_volatile(name: str) -> bool:
    """Whether a continued run may change a setting."""
    section, _, field = name.partition(".")
    kind: Any = next(entry.type for entry in dataclasses.fields(RunConfig) if entry.name == section)
    hint = get_type_hints(kind, include_extras=True)[field]
    return VOLATILE in getattr(hint, "__metadata__", ())


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


def smaller(setup: RunSetup, shortage: Shortage) -> list[Change]:
    """Changes that leave less in the memory of a device, those that cost least first."""
    run, mesh, changes = setup.run, setup.mesh, list[Change]()
    if shortage.on_chip:
        kernel = {"model.attention_kernel": "xla"}
        return [Change(kernel, "attention without a fused kernel")]
    split, rows = batch_devices(mesh), run.train.batch_size // run.train.microbatches
    if mesh.shape["data"] > 1:
        sizes = {"mesh.data": 1, "mesh.fsdp": split}
        changes.append(Change(sizes, "parameters and optimizer state split over all devices"))
    if run.model.attention_kernel == "xla" and _supports(setup, "blocked"):
        changes.append(Change({"model.attention_kernel": "blocked"}, "no scores [T, T] in memory"))
    if "evaluation" not in shortage.place:  # which keeps no activations, and has no microbatches
        if run.model.remat != "full":
            effect = "activations recomputed instead of stored"
            changes.append(Change({"model.remat": "full"}, effect))
        if rows % (2 * split) == 0:
            effect = f"activations of {rows // 2} rows at a time instead of {rows}"
            changes.append(Change({"train.microbatches": 2 * run.train.microbatches}, effect))
    if rows % (2 * split) == 0:
        changes.append(Change({"train.batch_size": run.train.batch_size // 2}, "half as many rows"))
    if run.data.sequence_length > 1:
        shorter = run.data.sequence_length // 2
        changes.append(Change({"data.sequence_length": shorter}, "rows half as long"))
    return changes


def _supports(setup: RunSetup, kernel: Any) -> bool:
    """Whether the run can take an attention kernel by name."""
    model = dataclasses.replace(setup.run.model, attention_kernel=kernel)
    try:
        with_kernel(dataclasses.replace(setup.run, model=model), setup.packed, platform(setup.mesh))
    except ConfigError:
        return False
    return True


def advice(setup: RunSetup, shortage: Shortage, *, saved: int | None, begun: bool) -> str:
    """What is printed below the sentence of a shortage: the plan of the memory, the changes, and
    what they mean for the run directory.

    `saved` is the newest checkpoint's step, None without one; `begun`: the directory belongs to
    the settings of an earlier command.
    """
    run = setup.run
    lines = [f"  {line}" for line in plan_lines(run, setup.mesh)]
    changes = smaller(setup, shortage)
    fixed = saved is not None or begun
    if changes:
        lines.append("What needs less, what costs least first:")
    width = max((len(str(change)) for change in changes), default=0)
    for change in changes:
        where = ", in another run.dir" if fixed and not change.resumes else ""
        lines.append(f"  {change!s:<{width}}  {change.effect}{where}")
    lines.append(_directory(run.run.dir, changes, saved, begun))
    return "\n".join(lines)


def _directory(path: str, changes: Sequence[Change], saved: int | None, begun: bool) -> str:
    others = ""
    if any(not change.resumes for change in changes):
        others = " Settings that change its numbers need another run.dir"
        others += f"; --run.init_from {path} starts there from its parameters." if saved else "."
    if saved is not None:
        continues = f"{path} holds step {saved}, from which the same command continues"
        return f"{continues} with the other settings.{others}"
    if begun:
        return f"{path} was begun by an earlier command and holds no checkpoint.{others}"
    return f"Nothing was trained in {path}: the same command with any of them begins the run."


def plan_lines(run: RunConfig, mesh: Mesh) -> list[str]:
    """The memory of a device as `jaxformer plan` counts it."""
    return []
