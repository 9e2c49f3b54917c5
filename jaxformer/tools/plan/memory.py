"""What a device holds during a step: the state exactly, and an estimate of the temporary arrays."""

import os
from typing import Literal, NamedTuple

import jax

from jaxformer.arrays.hardware import Device
from jaxformer.arrays.params import rows
from jaxformer.layers.attention import CROSS_ATTENTION
from jaxformer.layers.block import MIXERS
from jaxformer.layers.exchange import CONTEXT
from jaxformer.layers.sublayer import Sublayer
from jaxformer.losses import cross_entropy
from jaxformer.tools.plan.activations import StackActivations, activations, edge_bytes, logits_bytes
from jaxformer.tools.plan.planned import PlannedRun, tree_bytes
from jaxformer.training.state import learning

REFERENCE = "parameters of the reference"

# The fraction of a GPU's memory that JAX takes for itself unless the environment says otherwise.
GPU_FRACTION = 0.75
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class MemoryLine(NamedTuple):
    """What a part of the memory of a device holds, in bytes."""

    name: str
    bytes: float
    certainty: Literal["exact", "estimate"] = "estimate"


class MemoryPlan(NamedTuple):
    """The memory of one device in a step.

    `held` are the arrays that stay from step to step; `stages` are the arrays that each stage of a
    step adds to them at its largest, and the largest stage decides the peak. `capacity` is the
    memory of the device that a program can use, None if it is unknown.
    """

    held: list[MemoryLine]
    stages: dict[str, list[MemoryLine]]
    capacity: float | None

    @property
    def largest(self) -> str:
        """The name of the stage that takes most."""
        return max(self.stages, key=lambda name: _total(self.stages[name]))

    @property
    def temporary(self) -> float:
        return _total(self.stages[self.largest])

    @property
    def peak(self) -> float:
        return _total(self.held) + self.temporary

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the capacity; None if that is unknown."""
        return None if self.capacity is None else self.peak <= self.capacity


def _total(lines: list[MemoryLine]) -> float:
    return sum(line.bytes for line in lines)


def memory_plan(planned: PlannedRun) -> MemoryPlan:
    """The memory of one device in a step of the run."""
    state = planned.state
    lines = [
        MemoryLine("parameters", tree_bytes(state.params), "exact"),
        MemoryLine("optimizer state", tree_bytes((state.step, state.optimizer)), "exact"),
        MemoryLine("batch", tree_bytes(planned.batch), "exact"),
    ]
    if planned.has_reference:
        lines.append(MemoryLine(REFERENCE, tree_bytes(state.params), "exact"))
    return MemoryPlan(lines, _stages(planned), capacity_of(planned.device))


def _stages(planned: PlannedRun) -> dict[str, list[MemoryLine]]:
    """The arrays of the largest moments of a step, besides those that stay: the loss, after the
    forward pass; the backward pass of each stack, after which its activations are freed; and the
    update."""
    stacks, edges = activations(planned), edge_bytes(planned)
    gradients = gradient_bytes(planned)
    tile, matrix = logits_bytes(planned, tile_length(planned))
    always = _always(planned, gradients)
    stored = sum(stack.stored for stack in stacks) + edges
    stages = {
        "loss": [
            *always,
            MemoryLine("activations", stored),
            MemoryLine("logits of a tile", tile),
            MemoryLine("gradient of the output layer", matrix),
        ]
    }
    for stack in reversed(stacks):
        stages[f"backward pass of the {stack.name}"] = [
            *always,
            MemoryLine("activations", stored),
            MemoryLine("gradients", gradients),
            *_of_one_layer(planned, stack),
        ]
        stored -= stack.stored
    stages["update"] = [*always, MemoryLine("gradients", 2 * gradients)]
    return stages


def _always(planned: PlannedRun, gradients: float) -> list[MemoryLine]:
    """What every stage has: weights in the compute dtype, and sums over microbatches."""
    lines = []
    if planned.dtype_bytes < 4 and planned.model.layer_loop == "unroll":
        # The matrices are cast once a step, as shards; a loop casts those of one layer at a time.
        cast = planned.dtype_bytes * matrix_elements(planned)
        lines.append(MemoryLine(f"weights in {planned.model.dtype}", cast))
    if planned.run.train.n_microbatches > 1:
        lines.append(MemoryLine("gradients of earlier microbatches", gradients))
    return lines


def _of_one_layer(planned: PlannedRun, stack: StackActivations) -> list[MemoryLine]:
    """What the backward pass of one layer takes while it runs."""
    lines = [MemoryLine("gradients of a layer's arrays", stack.working)]
    if stack.recomputed:
        lines.append(MemoryLine("a layer's recomputed arrays", stack.recomputed))
    if planned.shards > 1:
        numbers = planned.dtype_bytes
        dense, experts = layer_elements(planned), layer_elements(planned, of_experts=True)
        # Of this layer and of the next, which is gathered meanwhile; experts that no other device
        # has are cast when their layer runs.
        layers = 2 if planned.axes("fsdp", CONTEXT) else 1
        gathered = (2 * dense + layers * experts) * numbers
        lines.append(MemoryLine("gathered weights of two layers", gathered))
        # Their gradients before and while they are scattered.
        lines.append(MemoryLine("gradients of a layer's weights", gathered))
    return lines


def gradient_bytes(planned: PlannedRun) -> float:
    """Bytes of the gradients: float32, of the leaves that learn, placed as these."""
    learned = learning(planned.state.params, planned.state.frozen)
    return float(tree_bytes(learned))


def matrix_elements(planned: PlannedRun) -> float:
    """Elements on a device of the matrices that products read, as it holds them."""
    return sum(
        planned.held_elements(spec)
        for spec in rows(planned.specs).values()
        if spec.is_matrix and not spec.lookup
    )


def multiplied_elements(planned: PlannedRun) -> float:
    """Elements of all matrices that the products of a device read."""
    return sum(
        planned.gathered_elements(spec)
        for spec in rows(planned.specs).values()
        if spec.is_matrix and not spec.lookup
    )


def layer_elements(planned: PlannedRun, of_experts: bool = False) -> float:
    """Elements on a device of the matrices of the largest layer, gathered over fsdp and context:
    those of its experts, or all others."""
    sizes: dict[str, float] = {}
    for path, spec in rows(planned.specs).items():
        if not spec.is_matrix or not spec.is_stacked or ("experts" in spec.axes) != of_experts:
            continue
        stack = path.partition("blocks")[0]
        of_layer = planned.gathered_elements(spec) / spec.shape[spec.axes.index("layers")]
        sizes[stack] = sizes.get(stack, 0) + of_layer
    return max(sizes.values(), default=0)


def tile_length(planned: PlannedRun) -> int:
    """Positions of each row whose logits are computed at a time."""
    model = planned.model
    outputs = model.n_classes if model.output in ("classes", "tags") else model.vocab_size
    of_microbatch = planned.sequences // planned.run.train.n_microbatches
    with jax.sharding.use_abstract_mesh(planned.mesh):
        return cross_entropy.tile_length(of_microbatch, planned.length, outputs) or planned.length


def capacity_of(device: Device) -> float | None:
    """Bytes of a device that a program can use; None if they are unknown."""
    if device.memory is None:
        return None
    if device.platform != "gpu":
        return device.memory
    stated = (os.environ.get(name) for name in FRACTION_VARIABLES)
    return device.memory * float(next(filter(None, stated), GPU_FRACTION))


def cache_bytes(planned: PlannedRun) -> float:
    """Bytes of the key-value cache of one row of model.max_length tokens, on one device."""
    model, tensor = planned.model, planned.size("tensor")
    if model.family == "encoder":
        return 0.0

    def numbers(sublayer: Sublayer, tokens: int) -> float:
        """Those of so many tokens in the cache of a layer."""
        heads, key_width, value_width = sublayer.cached(model)
        return tokens * heads * (key_width + value_width) / (1 if heads % tensor else tensor)

    of_layer = numbers(MIXERS[model.mixer], model.max_length)
    of_layer += numbers(CROSS_ATTENTION, planned.source_length)
    return of_layer * model.n_layers * planned.dtype_bytes
