"""The plan of a run: what it needs of each device, what a step costs, and the smallest changes of
settings with which it fits."""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxformer.arrays.mesh import batch_devices
from jaxformer.files import ConfigError
from jaxformer.layers.exchange import CONTEXT
from jaxformer.tools.plan.bound import Bound, Products, bound, products
from jaxformer.tools.plan.memory import MemoryPlan, memory_plan
from jaxformer.tools.plan.planned import PlannedRun, replanned

MOST_CHANGES = 4
# Policies of model.remat from the one that recomputes least to the one that recomputes all.
RECOMPUTING = ("none", "dots", "names", "full")


class Change(NamedTuple):
    """Settings by name with which the run fits, and the bytes that it then takes of a device."""

    settings: dict[str, Any]
    peak: float


@dataclass(frozen=True)
class Plan:
    """The figures of a run before it starts.

    mfu: the model FLOPs utilization of steps that take no longer than the bound, None where a rate
        of the device is unknown. Masked scores count, so where a kernel skips them it can exceed 1.
    changes: the smallest changes of settings with which it fits; None where it fits as it is, or
        the device's memory is unknown.
    """

    planned: PlannedRun
    memory: MemoryPlan
    products: Products
    bound: Bound
    mfu: float | None
    changes: list[Change] | None


def make_plan(planned: PlannedRun) -> Plan:
    """The plan of a run. No array is made, and nothing is traced but the optimizer's state."""
    memory, flops = memory_plan(planned), products(planned)
    least = bound(planned, memory, flops)
    peak, mfu = planned.device.peak(planned.model.dtype), None
    if least.seconds and peak:
        mfu = flops.model / least.seconds / (peak * planned.mesh.size)
    changes = smallest_changes(planned) if memory.fits is False else None
    return Plan(planned, memory, flops, least, mfu, changes)


def smallest_changes(planned: PlannedRun) -> list[Change]:
    """Up to `MOST_CHANGES` changes with which the run fits, those of one setting before those of
    several; of each combination of settings only the smallest. Empty where none fits."""
    train, model = planned.run.train, planned.model
    rows_of_device = train.batch_size // batch_devices(planned.mesh)
    options: dict[str, list[Any]] = {
        "mesh.fsdp": _more(planned.size("fsdp"), planned.size("data", "fsdp")),
        "train.microbatches": _more(train.n_microbatches, rows_of_device),
        "model.remat": [*RECOMPUTING[RECOMPUTING.index(model.remat) + 1 :]],
        "model.layer_loop": [loop for loop in ("unroll", "scan") if loop != model.layer_loop],
    }
    changes = _fitting(planned, options, [{}])
    if changes:
        return changes
    # No row fits on a device. Its tokens are divided, which exchanges more than mesh.fsdp does, and
    # parameters among all devices, which may have more rows each.
    devices = planned.size("data", "fsdp", CONTEXT)
    meshes = [
        {"mesh.fsdp": devices // context, "mesh.context": context}
        for context in _more(planned.context, devices)
    ]
    del options["mesh.fsdp"]
    options["train.microbatches"] = _more(train.n_microbatches, train.batch_size)
    return _fitting(planned, options, meshes)


def _more(number: int, whole: int) -> list[int]:
    """The divisors of `whole` that are larger than a number."""
    return [n for n in range(number + 1, whole + 1) if whole % n == 0]


def _fitting(
    planned: PlannedRun, options: dict[str, list[Any]], meshes: list[dict[str, Any]]
) -> list[Change]:
    """The changes of the fewest options with which the run fits on one of the meshes."""
    # The run on each mesh, since the placement of its state takes longer than all else.
    placed: dict[tuple[Any, ...], PlannedRun] = {}
    for number in range(len(options) + 1):
        changes: list[Change] = []
        for names in itertools.combinations(options, number):
            for mesh, *values in itertools.product(meshes, *(options[name] for name in names)):
                settings = mesh | dict(zip(names, values, strict=True))
                axes = {name: settings[name] for name in settings if name.startswith("mesh.")}
                try:
                    if (key := tuple(axes.items())) not in placed:
                        placed[key] = replanned(planned, axes)
                    memory = memory_plan(replanned(placed[key], settings))
                except ConfigError:
                    continue
                if memory.fits:
                    changes.append(Change(settings, memory.peak))
                    break
        if changes:
            return changes[:MOST_CHANGES]
    return []
