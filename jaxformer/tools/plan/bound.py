"""The products of a step, and the time below which it cannot be done."""

import math
from typing import NamedTuple

from jaxformer.arrays.params import rows
from jaxformer.models.cost import flops_per_token, score_flops, visible_pairs
from jaxformer.tools.plan.memory import (
    REFERENCE,
    MemoryPlan,
    activations,
    gradient_bytes,
    matrix_elements,
    multiplied_elements,
    planned_stacks,
    recomputed_names,
    tile_length,
)
from jaxformer.tools.plan.planned import PlannedRun

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
    model, tokens = planned.model, planned.tokens_per_step
    per_token = flops_per_token(
        model,
        planned.length,
        planned.source_length,
        planned.counted_specs,
        planned.objective.reference,
    )
    return Products(
        per_token,
        model=per_token * tokens,
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
    matrices = multiplied_elements(planned) * planned.dtype_bytes
    stored = sum(stack.stored for stack in activations(planned))
    pieces = 2 * matrices + 2 * stored
    microbatches = planned.run.train.n_microbatches
    return 2 * state + reference + 2 * gradient_bytes(planned) + microbatches * pieces


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
    weights = (multiplied_elements(planned) - matrix_elements(planned)) * planned.dtype_bytes
    sent = 3 * microbatches * weights
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
