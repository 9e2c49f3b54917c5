"""The plan of a run: what it needs of each device, the products of a step and the time below which
it cannot be done, and the smallest changes of settings with which it fits."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxformer.arrays.mesh import batch_devices
from jaxformer.arrays.params import rows
from jaxformer.files import ConfigError
from jaxformer.layers.exchange import CONTEXT
from jaxformer.models.cost import score_flops, visible_pairs
from jaxformer.tools.plan.memory import (
    REFERENCE,
    MemoryPlan,
    activations,
    gradient_bytes,
    matrix_elements,
    memory_plan,
    planned_stacks,
    recomputed_names,
    tile_length,
)
from jaxformer.tools.plan.planned import PlannedRun, replanned

# Kernels that leave out the keys beyond a window; the others compute them and mask their scores.
WINDOWED = ("cudnn", "tpu", "ring")


class Products(NamedTuple):
    """FLOPs of a step over all devices: `model` as MFU counts them, `recomputed` what remat adds,
    and `skipped` the masked scores that a fused kernel does not compute. What every device computes
    because the mesh does not divide it counts once."""

    per_token: int
    model: float
    recomputed: float
    skipped: float

    @property
    def done(self) -> float:
        return self.model + self.recomputed - self.skipped


class Bound(NamedTuple):
    """Seconds of a step that the products, the memory traffic and the links of a device take at
    their published rates; None where a rate is unknown."""

    products: float | None
    memory: float | None
    links: float | None

    @property
    def seconds(self) -> float | None:
        """The least time of a step: the largest of the three, if they overlap entirely."""
        bounds = [seconds for seconds in self if seconds is not None]
        return max(bounds) if len(bounds) == len(self) else None

    @property
    def binds(self) -> str:
        """The name of the largest."""
        return max(self._fields, key=lambda name: getattr(self, name) or 0.0)


def products(planned: PlannedRun) -> Products:
    """The FLOPs of a step."""
    tokens = planned.tokens_per_step
    return Products(
        planned.flops_per_token,
        model=planned.flops_per_token * tokens,
        recomputed=repeated_flops(planned) * tokens,
        skipped=skipped_flops(planned) * tokens,
    )


def skipped_flops(planned: PlannedRun) -> float:
    """FLOPs a token of the masked scores of self-attention that a fused kernel does not compute."""
    kernel = planned.model.attention_kernel
    if kernel in ("auto", "xla"):
        return 0.0
    total = 0.0
    for stack in planned_stacks(planned):
        for layer in stack.layers:
            window = layer.window if kernel in WINDOWED else 0
            masked_pairs = stack.tokens**2 - visible_pairs(stack.tokens, window, stack.causal)
            for sublayer in stack.sublayers(layer).values():
                if not sublayer.reads_source:
                    total += 3 * sublayer.scores(layer, masked_pairs)
    return total / planned.length


def repeated_flops(planned: PlannedRun) -> float:
    """FLOPs a token of the products that the backward pass computes again: those that it reads and
    that are not stored."""
    model = planned.model
    again = recomputed_names(planned)
    share = planned.source_length / planned.length
    total = 0.0
    if planned.of_pairs and tile_length(planned) < planned.length:
        total += 2 * model.vocab_size * model.embedded_width
    for path, spec in rows(planned.specs).items():
        name = path.rpartition(".")[2]
        if spec.is_matrix and spec.is_stacked and name in again:
            flops = 2 * spec.active * math.prod(spec.shape)
            total += flops * (share if spec.reads == "source" else 1)
    if "weights" in again:
        total += score_flops(model, planned.length, planned.source_length) / 3
    return total


def traffic(planned: PlannedRun, memory: MemoryPlan) -> float:
    """The least bytes that a step moves between a device and its memory.

    The state is read and written once, and so is each gradient; a reference is read once. In every
    microbatch the matrices are read in the forward and in the backward pass, and what is stored is
    written and read.
    """
    state = sum(line.bytes for line in memory.held if line.name not in ("batch", REFERENCE))
    reference = sum(line.bytes for line in memory.held if line.name == REFERENCE)
    matrices = matrix_elements(planned, gathered=True) * planned.dtype_bytes
    stored = sum(stack.stored for stack in activations(planned))
    pieces = planned.run.train.n_microbatches * (matrices + stored)
    return reference + 2 * (state + gradient_bytes(planned) + pieces)


def link_bytes(planned: PlannedRun) -> float:
    """The least bytes that a device sends in a step, as in rings (Patarasuk and Yuan 2009): the
    weights that fsdp and context divide are gathered in the forward and in the backward pass of
    every microbatch, and their gradients are scattered; the gradients are summed over data; and the
    output and the gradient of each sublayer over tensor. What context and expert exchange besides
    is not counted."""
    microbatches = planned.run.train.n_microbatches
    # The switches between GPUs can sum, so that a device sends its array once and not twice.
    summed = 1 if planned.device.platform == "gpu" else 2
    # What a device gathers is what it has not.
    weights = matrix_elements(planned, gathered=True) - matrix_elements(planned)
    sent = 3 * microbatches * weights * planned.dtype_bytes
    gradients = gradient_bytes(planned) * planned.dtype_bytes / 4
    sent += summed * gradients * (1 - 1 / planned.size("data"))
    sublayers = 0
    for stack in planned_stacks(planned):
        tokens = planned.rows * planned.positions(stack.tokens)
        sublayers += sum(tokens * len(stack.sublayers(layer)) for layer in stack.layers)
    streams = 2 * microbatches * sublayers * planned.model.d_model * planned.dtype_bytes
    return sent + summed * streams * (1 - 1 / planned.size("tensor"))


def bound(planned: PlannedRun, memory: MemoryPlan, flops: Products) -> Bound:
    """The least time of a step on the planned devices."""
    device = planned.device

    def seconds(amount: float, rate: float | None) -> float | None:
        return None if rate is None else amount / rate

    return Bound(
        seconds(flops.done / planned.mesh.size, device.peak(planned.model.dtype)),
        seconds(traffic(planned, memory), device.bandwidth),
        seconds(link_bytes(planned), device.link) if planned.mesh.size > 1 else 0.0,
    )


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
