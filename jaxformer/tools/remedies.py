"""What to change where memory ran out: the settings that need less, beside the plan of the run."""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from jaxformer.arrays.hardware import DEVICES, name_of
from jaxformer.arrays.mesh import batch_devices
from jaxformer.arrays.out_of_memory import Shortage
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import VOLATILE
from jaxformer.files import ConfigError
from jaxformer.report import human_bytes
from jaxformer.runs.compose import with_kernel
from jaxformer.runs.run import RunOutOfMemory
from jaxformer.runs.setup import RunSetup
from jaxformer.tools.plan.make import Plan, make_plan
from jaxformer.tools.plan.planned import planned_run
from jaxformer.tools.plan.report import memory_text


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


def remedies_of(setup: RunSetup, shortage: Shortage, planned: Plan | None) -> list[Remedy]:
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
    rows = run.train.batch_size // run.train.n_microbatches
    halves = rows % (2 * batch_devices(setup.mesh)) == 0
    if run.model.attention_kernel == "xla" and _supports(setup, "blocked"):
        found.append(Remedy({"model.attention_kernel": "blocked"}, "no scores [T, T] in memory"))
    if stores and run.model.remat != "full":
        found.append(Remedy({"model.remat": "full"}, "activations recomputed instead of stored"))
    if stores and halves:
        effect = f"activations of {rows // 2} rows at a time instead of {rows}"
        found.append(Remedy({"train.microbatches": 2 * run.train.n_microbatches}, effect))
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
        run = dataclasses.replace(setup.run, model=model)
        with_kernel(run, model.max_segments, setup.mesh)
    except ConfigError:
        return False
    return True


def advice(error: RunOutOfMemory) -> str:
    """What is printed below the sentence of a shortage: the plan of the memory, the remedies, and
    what they mean for the run directory."""
    setup, shortage, saved, begun = error.setup, error.shortage, error.saved, error.begun
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


def plan_of(setup: RunSetup) -> Plan | None:
    """The plan of the run on its devices; None for devices whose memory is not known."""
    name = name_of(setup.mesh.devices.flat[0].device_kind)
    if name is None or DEVICES[name].memory is None:
        return None
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
