"""What to change where memory ran out: the settings that need less, beside the plan of the run."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any, get_type_hints

from jaxformer.arrays.hardware import DEVICES, name_of
from jaxformer.arrays.mesh import batch_devices
from jaxformer.arrays.out_of_memory import Shortage
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import VOLATILE
from jaxformer.files import ConfigError
from jaxformer.report import human_bytes
from jaxformer.runs.setup import RunSetup
from jaxformer.runs.train_run import RunOutOfMemory
from jaxformer.tools.plan.plan import Plan, make_plan
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
    """What to change. For a step these are the smallest changes that fit by the plan, where it has
    any; else recomputing, fewer rows at a time, and a state that is split over the devices."""
    if shortage.on_chip and "experts" in shortage.place:
        return [Remedy({"model.expert_kernel": "ragged"}, "experts without a Pallas kernel")]
    if shortage.on_chip:
        return [Remedy({"model.attention_kernel": "xla"}, "attention without a fused kernel")]
    # A training step stores activations for its backward pass.
    is_step = shortage.place.startswith(("compiling", "step"))
    remedies = list[Remedy]()
    if planned and is_step and planned.changes:
        for change in planned.changes:
            settings = change.settings
            if any(name.startswith("mesh.") for name in settings):
                # The devices that an axis of the mesh gets are taken from mesh.data.
                settings = {"mesh.data": 0, **settings}
            effect = f"{human_bytes(change.peak)} of a device (estimate)"
            remedies.append(Remedy(settings, effect))
        return remedies
    train, devices = setup.run.train, batch_devices(setup.mesh)
    rows = train.batch_size // train.n_microbatches
    can_halve = rows % (2 * devices) == 0
    if is_step and setup.run.model.remat != "full":
        remedies.append(Remedy({"model.remat": "full"}, "activations recomputed instead of stored"))
    if is_step and can_halve:
        effect = f"activations of {rows // 2} rows at a time instead of {rows}"
        remedies.append(Remedy({"train.microbatches": 2 * train.n_microbatches}, effect))
    if "evaluation" in shortage.place and can_halve:
        remedies.append(Remedy({"train.batch_size": train.batch_size // 2}, "half as many rows"))
    if setup.mesh.shape["data"] > 1:
        sizes = {"mesh.data": 1, "mesh.fsdp": devices}
        remedies.append(Remedy(sizes, "parameters and optimizer state split over all devices"))
    return remedies


def advice(error: RunOutOfMemory) -> str:
    """What is printed below the sentence of a shortage: the plan of the memory, the remedies, and
    what they mean for the run directory."""
    setup, run_dir = error.setup, error.setup.run.run.dir
    plan = plan_of(setup)
    remedies = remedies_of(setup, error.shortage, plan)
    lines = [memory_text(plan)] if plan else []
    if remedies:
        fits = plan is not None and plan.changes and "(estimate)" in remedies[0].effect
        lines.append("The smallest changes that fit:" if fits else "What needs less:")
    width = max((len(str(remedy)) for remedy in remedies), default=0)
    for remedy in remedies:
        needs_new_dir = (error.saved is not None or error.begun) and not remedy.resumes
        where = ", in another run.dir" if needs_new_dir else ""
        lines.append(f"  {remedy!s:<{width}}  {remedy.effect}{where}")
    if error.saved is not None:
        lines.append(
            f"{run_dir} holds step {error.saved}, from which the same command continues with the"
            " other settings."
        )
    elif error.begun:
        lines.append(f"{run_dir} was begun by an earlier command and holds no checkpoint.")
    else:
        lines.append(
            f"Nothing was trained in {run_dir}: the same command with any of them begins the run."
        )
    return "\n".join(lines)


def plan_of(setup: RunSetup) -> Plan | None:
    """The plan of the run on its devices; None for devices whose memory is not known."""
    name = name_of(setup.mesh.devices.flat[0].device_kind)
    if name is None or DEVICES[name].memory is None:
        return None
    with contextlib.suppress(ConfigError):
        packed = setup.model.max_segments > 0
        return make_plan(planned_run(setup.run, name, setup.mesh.size, packed))
    return None
