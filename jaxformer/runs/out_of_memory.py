"""Out of memory as one message: what asked for how much and where, and the settings that need
less."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

import jax

from jaxformer.config import RunConfig
from jaxformer.hardware import DEVICES, name_of
from jaxformer.mesh import batch_devices
from jaxformer.plan.abstract import with_kernel
from jaxformer.report import human_bytes
from jaxformer.runs.setup import RunSetup
from jaxformer.settings import VOLATILE, ConfigError
from jaxformer.sharding import platform

if TYPE_CHECKING:
    from jaxformer.plan.make import Plan

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
class Remedy:
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


def remedies_of(setup: RunSetup, shortage: Shortage, planned: "Plan | None") -> list[Remedy]:
    """What to change: the smallest changes that fit by the plan, where it is about a step and knows
    any; else changes that need less, those that cost least first."""
    if shortage.on_chip:
        return [Remedy({"model.attention_kernel": "xla"}, "attention without a fused kernel")]
    stores = shortage.place.startswith(("compiling", "step"))  # activations, for a backward pass
    if planned and stores and planned.changes:
        return [_of_plan(change.settings, change.peak) for change in planned.changes]
    found = _of_memory(setup)
    if "evaluation" in shortage.place or stores:
        found += _of_rows(setup, stores)
    return found


def _of_plan(settings: dict[str, Any], peak: float) -> Remedy:
    whole = {"mesh.data": 0} if "mesh.fsdp" in settings else {}  # which fsdp takes devices from
    return Remedy(whole | settings, f"{human_bytes(peak)} of a device (estimate)")


def _of_memory(setup: RunSetup) -> list[Remedy]:
    """Remedies for the memory that a run holds whatever it does."""
    if setup.mesh.shape["data"] == 1:
        return []
    sizes = {"mesh.data": 1, "mesh.fsdp": batch_devices(setup.mesh)}
    return [Remedy(sizes, "parameters and optimizer state split over all devices")]


def _of_rows(setup: RunSetup, stores: bool) -> list[Remedy]:
    """Remedies for the memory that grows with the rows of a batch; `stores`: for a backward pass,
    which an evaluation has not, nor microbatches."""
    run, found = setup.run, list[Remedy]()
    rows = run.train.batch_size // run.train.microbatches
    halves = rows % (2 * batch_devices(setup.mesh)) == 0
    if run.model.attention_kernel == "xla" and _supports(setup, "blocked"):
        found.append(Remedy({"model.attention_kernel": "blocked"}, "no scores [T, T] in memory"))
    if stores and run.model.remat != "full":
        found.append(Remedy({"model.remat": "full"}, "activations recomputed instead of stored"))
    if stores and halves:
        effect = f"activations of {rows // 2} rows at a time instead of {rows}"
        found.append(Remedy({"train.microbatches": 2 * run.train.microbatches}, effect))
    if halves:
        found.append(Remedy({"train.batch_size": run.train.batch_size // 2}, "half as many rows"))
    if run.data.sequence_length > 1:
        shorter = run.data.sequence_length // 2
        found.append(Remedy({"data.sequence_length": shorter}, "rows half as long"))
    return found


def _supports(setup: RunSetup, kernel: Any) -> bool:
    """Whether the run can take an attention kernel by name."""
    model = dataclasses.replace(setup.run.model, attention_kernel=kernel)
    try:
        with_kernel(
            dataclasses.replace(setup.run, model=model), model.max_segments, platform(setup.mesh)
        )
    except ConfigError:
        return False
    return True


def advice(setup: RunSetup, shortage: Shortage, *, saved: int | None, begun: bool) -> str:
    """What is printed below the sentence of a shortage: the plan of the memory, the remedies, and
    what they mean for the run directory.

    `saved` is the newest checkpoint's step, None without one; `begun`: the directory belongs to
    the settings of an earlier command.
    """
    from jaxformer.plan.report import memory_text

    plan = plan_of(setup)
    remedies = remedies_of(setup, shortage, plan)
    lines = [memory_text(plan)] if plan else []
    if remedies:
        fits = plan is not None and plan.changes and "(estimate)" in remedies[0].effect
        least = "The smallest changes that fit" if fits else "What needs less, the cheapest first"
        lines.append(f"{least}:")
    width = max((len(str(remedy)) for remedy in remedies), default=0)
    for remedy in remedies:
        other = (saved is not None or begun) and not remedy.resumes
        where = ", in another run.dir" if other else ""
        lines.append(f"  {remedy!s:<{width}}  {remedy.effect}{where}")
    lines.append(_directory(setup.run.run.dir, remedies, saved, begun))
    return "\n".join(lines)


def plan_of(setup: RunSetup) -> "Plan | None":
    """The plan of the run on its devices; None for devices whose memory is not known."""
    name = name_of(setup.mesh.devices.flat[0].device_kind)
    if name is None or DEVICES[name].memory is None:
        return None
    from jaxformer.plan.make import make_plan
    from jaxformer.plan.planned import planned_run

    with contextlib.suppress(ConfigError):
        packed = setup.run.model.max_segments > 0
        return make_plan(planned_run(setup.run, name, setup.mesh.size, packed))
    return None


def _directory(path: str, remedies: Sequence[Remedy], saved: int | None, begun: bool) -> str:
    others = ""
    if any(not remedy.resumes for remedy in remedies):
        others = " Settings that change its numbers need another run.dir"
        others += f"; --run.init_from {path} starts there from its parameters." if saved else "."
    if saved is not None:
        continues = f"{path} holds step {saved}, from which the same command continues"
        return f"{continues} with the other settings.{others}"
    if begun:
        return f"{path} was begun by an earlier command and holds no checkpoint.{others}"
    return f"Nothing was trained in {path}: the same command with any of them begins the run."
