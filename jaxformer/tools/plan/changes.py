"""The smallest changes of settings with which a run fits its devices, each tried by the plan."""

import itertools
from typing import Any, NamedTuple, get_type_hints

from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import choices
from jaxformer.files import ConfigError
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
    several; of each combination of settings only the smallest. Empty where none fits."""
    options = {name: values for name, values in _options(planned).items() if values}
    variants: dict[int, PlannedRun] = {}
    fitting: list[Change] = []
    for number in range(1, len(options) + 1):
        for names in itertools.combinations(options, number):
            if any(set(change.settings) <= set(names) for change in fitting):
                # Fewer settings are enough.
                continue
            for values in itertools.product(*(options[name] for name in names)):
                settings = dict(zip(names, values, strict=True))
                peak = _peak(planned, settings, variants)
                if peak is not None:
                    fitting.append(Change(settings, peak))
                    break
        if fitting:
            break
    return fitting[:MOST_SHOWN]


def _options(planned: PlannedRun) -> dict[str, list[Any]]:
    """The values of each setting that may take less memory, the smallest change first."""
    run, model, devices = planned.run, planned.model, planned.mesh.size
    tensor, fsdp = planned.size("tensor"), planned.size("fsdp")
    allowed = choices(get_type_hints(ModelConfig, include_extras=True)["remat"])
    policies = [policy for policy in RECOMPUTING if policy in allowed]
    # Rows of a device in all microbatches.
    rows = run.train.batch_size // planned.size("data", "fsdp")
    return {
        "mesh.fsdp": [n for n in _divisors(devices // tensor) if n > fsdp],
        "train.microbatches": [n for n in _divisors(rows) if n > run.train.n_microbatches],
        "model.remat": policies[policies.index(model.remat) + 1 :],
        "model.layer_loop": [name for name in ("unroll", "scan") if name != model.layer_loop],
    }


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _peak(
    planned: PlannedRun, settings: dict[str, Any], variants: dict[int, PlannedRun]
) -> float | None:
    """The bytes of a device with these settings; None where they do not fit or are not allowed.

    `variants` keeps the run for each size of fsdp, since the placement of its state takes longer
    than all else.
    """
    fsdp = settings.get("mesh.fsdp", planned.run.mesh.fsdp)
    try:
        if fsdp not in variants:
            variants[fsdp] = replanned(planned, {"mesh.fsdp": fsdp})
        memory = memory_plan(replanned(variants[fsdp], settings))
    except ConfigError:
        return None
    return memory.peak if memory.fits else None


def shown(settings: dict[str, Any]) -> str:
    """Settings as arguments of the command line."""
    return " ".join(f"--{name} {value}" for name, value in settings.items())
