"""What to change where memory ran out: the settings that need less, beside the plan of the run."""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from jax.sharding import Mesh

from jaxformer.arrays.hardware import DEVICES, name_of
from jaxformer.arrays.mesh import batch_devices
from jaxformer.arrays.out_of_memory import Shortage
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import VOLATILE
from jaxformer.files import ConfigError
from jaxformer.report import human_bytes
from jaxformer.runs.resolve import resolve
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
    any; else changes that need less, those that cost least first."""
    if shortage.on_chip and "experts" in shortage.place:
        return [Remedy({"model.expert_kernel": "ragged"}, "experts without a Pallas kernel")]
    if shortage.on_chip:
        return [Remedy({"model.attention_kernel": "xla"}, "attention without a fused kernel")]
    # A training step stores activations for its backward pass.
    is_step = shortage.place.startswith(("compiling", "step"))
    if planned and is_step and planned.changes:
        return [_planned_remedy(change.settings, change.peak) for change in planned.changes]
    remedies = _state_remedies(setup.mesh)
    if is_step or "evaluation" in shortage.place:
        remedies += _batch_remedies(setup, is_step)
    return remedies


def _planned_remedy(settings: dict[str, Any], peak: float) -> Remedy:
    # The devices that an axis of the mesh gets are taken from mesh.data.
    if any(name.startswith("mesh.") for name in settings):
        settings = {"mesh.data": 0, **settings}
    return Remedy(settings, f"{human_bytes(peak)} of a device (estimate)")


def _state_remedies(mesh: Mesh) -> list[Remedy]:
    """Remedies for the memory of parameters and optimizer state."""
    if mesh.shape["data"] == 1:
        return []
    sizes = {"mesh.data": 1, "mesh.fsdp": batch_devices(mesh)}
    return [Remedy(sizes, "parameters and optimizer state split over all devices")]


def _batch_remedies(setup: RunSetup, is_step: bool) -> list[Remedy]:
    """Remedies for the memory that grows with the rows of a batch. An evaluation has neither a
    backward pass nor microbatches."""
    run, remedies = setup.run, list[Remedy]()
    rows = run.train.batch_size // run.train.n_microbatches
    can_halve = rows % (2 * batch_devices(setup.mesh)) == 0
    if run.model.attention_kernel == "xla":
        blocked = dataclasses.replace(run.model, attention_kernel="blocked")
        # A kernel that does not support the run is no remedy.
        with contextlib.suppress(ConfigError):
            resolve(dataclasses.replace(run, model=blocked), setup.mesh, blocked.max_segments)
            remedies.append(
                Remedy({"model.attention_kernel": "blocked"}, "no scores [T, T] in memory")
            )
    if is_step and run.model.remat != "full":
        remedies.append(Remedy({"model.remat": "full"}, "activations recomputed instead of stored"))
    if is_step and can_halve:
        effect = f"activations of {rows // 2} rows at a time instead of {rows}"
        remedies.append(Remedy({"train.microbatches": 2 * run.train.n_microbatches}, effect))
    if can_halve:
        remedies.append(
            Remedy({"train.batch_size": run.train.batch_size // 2}, "half as many rows")
        )
    if run.data.sequence_length > 1:
        shorter = run.data.sequence_length // 2
        remedies.append(Remedy({"data.sequence_length": shorter}, "rows half as long"))
    return remedies


def advice(error: RunOutOfMemory) -> str:
    """What is printed below the sentence of a shortage: the plan of the memory, the remedies, and
    what they mean for the run directory."""
    setup, shortage, saved, begun = error.setup, error.shortage, error.saved, error.begun
    plan = plan_of(setup)
    remedies = remedies_of(setup, shortage, plan)
    lines = [memory_text(plan)] if plan else []
    if remedies:
        fits = plan is not None and plan.changes and "(estimate)" in remedies[0].effect
        lines.append(
            "The smallest changes that fit:" if fits else "What needs less, the cheapest first:"
        )
    width = max((len(str(remedy)) for remedy in remedies), default=0)
    for remedy in remedies:
        needs_new_dir = (saved is not None or begun) and not remedy.resumes
        where = ", in another run.dir" if needs_new_dir else ""
        lines.append(f"  {remedy!s:<{width}}  {remedy.effect}{where}")
    lines.append(_directory_sentence(setup.run.run.dir, remedies, saved, begun))
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


def _directory_sentence(
    path: str, remedies: Sequence[Remedy], saved: int | None, begun: bool
) -> str:
    """What the run directory has, and which remedies need another one."""
    if all(remedy.resumes for remedy in remedies):
        new_dir = ""
    elif saved:
        new_dir = (
            " Settings that change its numbers need another run.dir;"
            f" --run.init_from {path} starts there from its parameters."
        )
    else:
        new_dir = " Settings that change its numbers need another run.dir."
    if saved is not None:
        return (
            f"{path} holds step {saved}, from which the same command continues with the other"
            f" settings.{new_dir}"
        )
    if begun:
        return f"{path} was begun by an earlier command and holds no checkpoint.{new_dir}"
    return f"Nothing was trained in {path}: the same command with any of them begins the run."
