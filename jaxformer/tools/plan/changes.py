"""The smallest changes of settings with which a run fits its devices, each tried by the plan."""

import itertools
from typing import Any, NamedTuple, get_type_hints

from jaxformer.arrays.mesh import batch_devices
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import choices
from jaxformer.files import ConfigError
from jaxformer.layers.exchange import CONTEXT
from jaxformer.tools.plan.memory import memory_plan
from jaxformer.tools.plan.planned import PlannedRun, replanned

MOST_SHOWN = 4
# Policies of model.remat from the one that recomputes least to the one that recomputes all.
RECOMPUTING = ("none", "dots", "names", "full")


class Change(NamedTuple):
    """Settings by name with which the run fits, and the bytes that it then takes of a device."""

    settings: dict[str, Any]
    peak: float


def smallest_changes(planned: PlannedRun) -> list[Change]:
    """Up to `MOST_SHOWN` changes with which the run fits, those of one setting before those of
    several; of each combination of settings only the smallest. Empty where none fits.

    Only where no row fits on a device are there changes of mesh.context, which exchanges more than
    mesh.fsdp.
    """
    variants: dict[tuple[int, int], PlannedRun] = {}
    options = _options(planned)
    return _fitting(planned, options, [{}], variants) or _fitting(
        planned, _options_of_tokens(planned, options), _contexts(planned), variants
    )


def _fitting(
    planned: PlannedRun,
    options: dict[str, list[Any]],
    meshes: list[dict[str, Any]],
    variants: dict[tuple[int, int], PlannedRun],
) -> list[Change]:
    """The changes of the fewest options with which the run fits on one of the meshes."""
    for number in range(len(options) + 1):
        fitting: list[Change] = []
        for names in itertools.combinations(options, number):
            for mesh, *values in itertools.product(meshes, *(options[name] for name in names)):
                settings = {**mesh, **dict(zip(names, values, strict=True))}
                peak = _peak(planned, settings, variants)
                if peak is not None:
                    fitting.append(Change(settings, peak))
                    break
        if fitting:
            return fitting[:MOST_SHOWN]
    return []


def _options(planned: PlannedRun) -> dict[str, list[Any]]:
    """The values of each setting that may take less memory, the smallest change first."""
    run, model, fsdp = planned.run, planned.model, planned.size("fsdp")
    allowed = choices(get_type_hints(ModelConfig, include_extras=True)["remat"])
    policies = [policy for policy in RECOMPUTING if policy in allowed]
    # Rows of a device in all microbatches.
    rows = run.train.batch_size // batch_devices(planned.mesh)
    return {
        "mesh.fsdp": [n for n in _divisors(planned.size("data", "fsdp")) if n > fsdp],
        "train.microbatches": [n for n in _divisors(rows) if n > run.train.n_microbatches],
        "model.remat": policies[policies.index(model.remat) + 1 :],
        "model.layer_loop": [name for name in ("unroll", "scan") if name != model.layer_loop],
    }


def _options_of_tokens(planned: PlannedRun, options: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The options besides a mesh of `_contexts`, whose devices may have more rows each."""
    train = planned.run.train
    microbatches = [n for n in _divisors(train.batch_size) if n > train.n_microbatches]
    without_mesh = {name: values for name, values in options.items() if name != "mesh.fsdp"}
    return {**without_mesh, "train.microbatches": microbatches}


def _contexts(planned: PlannedRun) -> list[dict[str, Any]]:
    """The sizes of fsdp and context that divide parameters among all devices, with more devices for
    the tokens of a row."""
    devices = planned.size("data", "fsdp", CONTEXT)
    contexts = [n for n in _divisors(devices) if n > planned.context]
    return [{"mesh.fsdp": devices // n, "mesh.context": n} for n in contexts]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _peak(
    planned: PlannedRun, settings: dict[str, Any], variants: dict[tuple[int, int], PlannedRun]
) -> float | None:
    """The bytes of a device with these settings; None where they do not fit or are not allowed.

    `variants` keeps the run for each size of fsdp and context, since the placement of its state
    takes longer than all else.
    """
    mesh = planned.run.mesh
    fsdp = settings.get("mesh.fsdp", mesh.fsdp)
    context = settings.get("mesh.context", mesh.context)
    try:
        if (fsdp, context) not in variants:
            sizes = {"mesh.fsdp": fsdp, "mesh.context": context}
            variants[fsdp, context] = replanned(planned, sizes)
        memory = memory_plan(replanned(variants[fsdp, context], settings))
    except ConfigError:
        return None
    return memory.peak if memory.fits else None


def shown(settings: dict[str, Any]) -> str:
    """Settings as arguments of the command line."""
    return " ".join(f"--{name} {value}" for name, value in settings.items())
