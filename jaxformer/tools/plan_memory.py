"""A run on devices that need not be attached, with every automatic choice made, and what one of
them holds during a step: the state exactly, and an estimate of the temporary arrays.

Of the arrays of a layer the backward pass reads its input, unless the host keeps it, and those of
its points that `model.remat` names (`models/remat.py`); norms, activation functions and rotations
are computed again. Kept points that nothing reads again, such as the output of the last product,
are not stored. On a CPU `remat=none` keeps everything.
"""

import dataclasses
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxformer.arrays.hardware import Device, device_named
from jaxformer.arrays.mesh import (
    MESH_AXES,
    batch_devices,
    batch_sharding,
    bytes_of_device,
    check_batch_size,
    check_split,
    mesh_shape,
    parameter_sharding,
)
from jaxformer.arrays.params import Spec, rows
from jaxformer.arrays.sharding import PARAMETERS, partition
from jaxformer.config.model import ModelConfig
from jaxformer.config.rules import names_of
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.variants import BIASED_SCORES
from jaxformer.files import ConfigError
from jaxformer.layers.biases import has_layer_bias, is_disentangled
from jaxformer.layers.blocked import MOST_BLOCKS, QUERY_BLOCK
from jaxformer.layers.exchange import CONTEXT, exchange_of
from jaxformer.layers.ring import LONGEST_BLOCK
from jaxformer.layers.sublayer import Sizes, StoredArray
from jaxformer.losses import cross_entropy
from jaxformer.models.cost import Stack, block_arrays, stacks
from jaxformer.models.remat import kept_points
from jaxformer.runs.resolve import AbstractBatch, Resolved, resolve, resolve_without_data
from jaxformer.training.state import learning

REFERENCE = "parameters of the reference"

# The fraction of a GPU's memory that JAX takes for itself unless the environment says otherwise.
GPU_FRACTION = 0.75
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# A TPU stores the last axis of an array in lanes, so heads of 64 take as much as heads of 128.
LANES_OF_TPU = 128
# Copies of the logits of a tile: a TPU has the logits and their powers at one time.
LOGIT_COPIES = {"tpu": 2}
# Arrays of scores at a time: of a block of queries in blocked attention, and of a block of queries
# and keys in ring attention.
BLOCK_ARRAYS = 12
RING_ARRAYS = 3
# What model.remat=dots stores besides.
PRODUCTS = ("latent", "q", "k", "v", "out", "gate", "up", "down")
# The rules of the axes of parameters that are not gathered for a product.
PRODUCT_RULES = {name: axes for name, axes in PARAMETERS.items() if name != "embed"}


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Resolved):
    """A run on devices of a kind, of which no array is made. `target`, its state, and `batch` are
    shapes with their shardings on `mesh`."""

    mesh: AbstractMesh
    device_name: str
    device: Device
    batch: AbstractBatch

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the compute dtype."""
        return int(jnp.dtype(self.model.dtype).itemsize)

    @property
    def packed(self) -> bool:
        """Whether rows come with segment ids."""
        return "segment_ids" in self.batch

    def size(self, *axes: str) -> int:
        """Return the number of devices along axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def shards(self) -> int:
        """The number of devices among which parameters are divided, besides tensor parallelism."""
        return self.size(*PARAMETERS["embed"])

    def held_elements(self, spec: Spec) -> int:
        """Return elements of a parameter that a device holds."""
        sharding = parameter_sharding(self.mesh, spec.shape, spec.axes)
        return math.prod(sharding.shard_shape(spec.shape))

    def gathered_elements(self, spec: Spec) -> float:
        """Return elements of a parameter on a device that has gathered it over fsdp and context."""
        placed = partition(spec.shape, spec.axes, PRODUCT_RULES, self.mesh.shape)
        return math.prod(spec.shape) / self.size(*(axis for axis in placed if axis))

    @property
    def context(self) -> int:
        """The number of devices that have different tokens of a row."""
        return self.size(CONTEXT)

    def positions(self, length: int) -> int:
        """Return the tokens of a row of `length` on a device."""
        return length // self.context

    @property
    def exchange(self) -> str:
        """How attention gets the keys of the tokens of other devices: an `Exchange`, or "ring"."""
        exchange = exchange_of(self.length, self.model.n_heads, self.mesh.shape)
        is_ring = self.model.attention.kernel == "ring"
        if is_ring and exchange != "none":
            return "ring"
        return exchange

    @property
    def of_pairs(self) -> bool:
        """Whether the loss is one of pairs, which computes the logits again for their gradient."""
        return self.sequences > self.run.train.batch_size

    @property
    def rows(self) -> int:
        """Sequences of a microbatch on a device."""
        return self.sequences // (self.run.train.n_microbatches * batch_devices(self.mesh))

    @property
    def outputs(self) -> int:
        """The width of the logits."""
        model = self.model
        if model.output in ("classes", "tags"):
            return model.head.n_classes
        return model.vocab_size

    @property
    def stacks(self) -> list[Stack]:
        """The stacks of the model, on the lengths of its rows."""
        return stacks(self.model, self.length, self.source_length)

    def sizes(self, length: int) -> Sizes:
        """Return a microbatch on one device: its tokens of rows of `length`, which read each
        other."""
        lanes = 1
        if self.device.platform == "tpu":
            lanes = LANES_OF_TPU
        return Sizes(
            self.rows,
            self.positions(length),
            length,
            self.dtype_bytes,
            tensor=self.size("tensor"),
            lanes=lanes,
            context=self.context,
            exchange=self.exchange,
            expert=self.size("expert"),
        )

    def arrays(self, layer: ModelConfig, stack: Stack) -> list[StoredArray]:
        """Return all arrays of a layer that its backward pass reads, stored or computed again."""
        return block_arrays(layer, stack, self.sizes(stack.tokens))


def abstract_mesh(count: int, sizes: Mapping[str, int], name: str) -> AbstractMesh:
    """Return a mesh of `count` devices of a row of `hardware.DEVICES`, which need not be attached,
    with axes of these sizes."""
    device = device_named(name)
    shape = mesh_shape(count, sizes, name)
    abstract = AbstractDevice(name, num_cores=device.cores, platform=device.platform)
    kinds = (AxisType.Auto,) * len(shape)
    return AbstractMesh(shape, MESH_AXES, axis_types=kinds, abstract_device=abstract)


def planned_run(
    run: RunConfig, device_name: str, devices: int = 0, packed: bool | None = None
) -> PlannedRun:
    """Return a run on `devices` of a kind of `hardware.DEVICES`.

    Args:
      run: its settings.
      device_name: a name of the table, such as "h100".
      devices: their number; 0 takes the product of the sizes of the mesh.
      packed: whether rows come with segment ids; None goes by the objective and data.packing.
    """
    device = device_named(device_name)
    sizes = run.mesh.sizes
    if devices < 0:
        raise ConfigError(f"--devices {devices}: give the number of devices, at least 1.")
    count = devices or math.prod(max(size, 1) for size in sizes.values())
    mesh = abstract_mesh(count, sizes, device_name)
    resolved, batch = resolve_without_data(run, mesh, packed)
    check_split(resolved.specs, mesh)
    if resolved.has_reference or resolved.teacher is not None:
        note = "what the forward pass of the reference exchanges and stores is not counted"
        resolved = dataclasses.replace(resolved, notes=(*resolved.notes, note))
    return PlannedRun(**resolved.fields(), device_name=device_name, device=device, batch=batch)


def of_mesh(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the mesh among some by their dotted names, and the others."""
    axes = {}
    others = {}
    for name, value in settings.items():
        if name.startswith("mesh."):
            axes[name] = value
        else:
            others[name] = value
    return axes, others


def replanned(planned: PlannedRun, settings: Mapping[str, Any]) -> PlannedRun:
    """Return the same devices with other values of some settings, by their dotted names: of the
    mesh, microbatches, remat or the loop of layers. Other axes of the mesh take their devices from
    mesh.data."""
    axes, others = of_mesh(settings)
    if axes:
        sizes = with_settings(planned.run, {"mesh.data": 0, **axes}).mesh
        mesh = abstract_mesh(planned.mesh.size, sizes.sizes, planned.device_name)
        check_split(planned.specs, mesh)
        asked = dataclasses.replace(planned.asked, mesh=sizes)
        segments = planned.model.attention.max_segments
        resolved = dataclasses.replace(resolve(asked, mesh, segments), added=planned.added)
        sharding = batch_sharding(mesh)
        batch = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for name, array in planned.batch.items()
        }
        planned = dataclasses.replace(planned, **resolved.fields(), batch=batch)
    run = with_settings(planned.run, others)
    check_batch_size(planned.mesh, run.train.batch_size, run.train.n_microbatches)
    return dataclasses.replace(planned, run=run)


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
        return max(self.stages, key=lambda name: sum(line.bytes for line in self.stages[name]))

    @property
    def temporary(self) -> float:
        return sum(line.bytes for line in self.stages[self.largest])

    @property
    def peak(self) -> float:
        return sum(line.bytes for line in self.held) + self.temporary

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the capacity; None if that is unknown."""
        if self.capacity is None:
            return None
        return self.peak <= self.capacity


def memory_plan(planned: PlannedRun) -> MemoryPlan:
    """Return the memory of one device in a step of the run.

    The stages are the largest moments of a step: the loss, after the forward pass; the backward
    pass of each stack, after which its activations are freed; and the update.
    """
    state = planned.target
    numbers = planned.dtype_bytes
    held = [
        MemoryLine("parameters", bytes_of_device(state.params), "exact"),
        MemoryLine("optimizer state", bytes_of_device((state.step, state.optimizer)), "exact"),
        MemoryLine("batch", bytes_of_device(planned.batch), "exact"),
    ]
    if planned.has_reference or planned.teacher is not None:
        reference = planned.with_teacher({}) or state.params
        held.append(MemoryLine(REFERENCE, bytes_of_device(reference), "exact"))

    gradients = gradient_bytes(planned)
    always = []
    if numbers < 4 and planned.model.layer_loop == "unroll":
        # The matrices are cast once a step, as shards; a loop casts those of one layer at a time.
        cast = numbers * matrix_elements(planned)
        always.append(MemoryLine(f"weights in {planned.model.dtype}", cast))
    if planned.run.train.n_microbatches > 1:
        always.append(MemoryLine("gradients of earlier microbatches", gradients))
    weights = []
    if planned.shards > 1:
        # Of a layer and of the next, which is gathered meanwhile; experts that no other device has
        # are cast when their layer runs.
        layers = 1
        if planned.size("fsdp", CONTEXT) > 1:
            layers = 2
        dense = layer_elements(planned)
        experts = layer_elements(planned, of_experts=True)
        gathered = (2 * dense + layers * experts) * numbers
        weights.append(MemoryLine("gathered weights of two layers", gathered))
        # Their gradients before and while they are scattered.
        weights.append(MemoryLine("gradients of a layer's weights", gathered))

    of_stacks = activations(planned)
    # From here on backward through the model: each stage frees what its stack has stored.
    stored = sum(stack.stored for stack in of_stacks) + edge_bytes(planned)
    tile, matrix = logits_bytes(planned, tile_length(planned))
    stages = {
        "loss": [
            *always,
            MemoryLine("activations", stored),
            MemoryLine("logits of a tile", tile),
            MemoryLine("gradient of the output layer", matrix),
        ]
    }
    for stack in reversed(of_stacks):
        lines = [
            *always,
            MemoryLine("activations", stored),
            MemoryLine("gradients", gradients),
            MemoryLine("gradients of a layer's arrays", stack.working),
        ]
        if stack.recomputed:
            lines.append(MemoryLine("a layer's recomputed arrays", stack.recomputed))
        stages[f"backward pass of the {stack.name}"] = [*lines, *weights]
        stored -= stack.stored
    stages["update"] = [*always, MemoryLine("gradients", 2 * gradients)]
    return MemoryPlan(held, stages, capacity_of(planned.device))


def is_stored(planned: PlannedRun, layer: ModelConfig, name: str) -> bool:
    """Tell whether an array of a layer is stored for its backward pass, and not computed again
    there."""
    if layer.remat == "none" and planned.device.platform == "cpu":
        return True
    if name == "input":
        return name not in names_of(layer.offload)
    if layer.remat == "dots" and name in PRODUCTS:
        return True
    return name in kept_points(layer)


def recomputed_names(planned: PlannedRun) -> set[str]:
    """Return the names of the arrays that the backward pass of the last stack computes again."""
    arrays = planned.arrays(planned.model, planned.stacks[-1])
    return {array.name for array in arrays if not is_stored(planned, planned.model, array.name)}


class StackActivations(NamedTuple):
    """Bytes of one device for a stack: what its layers store from the forward to the backward pass,
    what one layer computes again at a time, and what the backward pass of one layer takes
    besides."""

    name: str
    stored: float
    recomputed: float
    working: float


def activations(planned: PlannedRun) -> list[StackActivations]:
    """Return what each stack of a model stores for one microbatch, in the order of the forward
    pass."""
    by_stack = []
    for stack in planned.stacks:
        stored = recomputed = working = 0.0
        # Equal layers store the same.
        for layer, count in Counter(stack.layers).items():
            arrays = planned.arrays(layer, stack)
            again = 0.0
            for array in arrays:
                if is_stored(planned, layer, array.name):
                    stored += count * array.bytes
                else:
                    again += array.bytes
            # One layer at a time is computed again: the largest counts.
            recomputed = max(recomputed, again)
            working = max(working, backward_bytes(planned, layer, arrays, stack))
        bias, slope = bias_bytes(planned, stack)
        by_stack.append(StackActivations(stack.name, stored + bias, recomputed, working + slope))
    return by_stack


def backward_bytes(
    planned: PlannedRun, layer: ModelConfig, arrays: list[StoredArray], stack: Stack
) -> float:
    """Return the gradients that are alive at once in the backward pass of a layer: those of the
    arrays of one sublayer, and two residual streams."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for array in arrays:
        sizes[array.name] += array.bytes
    # Sublayers are differentiated one after the other.
    largest = 0.0
    for sublayer in stack.sublayers(layer).values():
        gradients = sum(sizes[name] for name in sublayer.gradients)
        if "attention" in sublayer.gradients:
            gradients += scores_bytes(planned, layer, stack)
        largest = max(largest, gradients)
    return largest + 2 * sizes["input"]


def scores_bytes(planned: PlannedRun, layer: ModelConfig, stack: Stack) -> float:
    """Return bytes of the scores, float32, that blocked and ring attention have at a time; 0 for
    other kernels."""
    keys = max(stack.tokens, stack.source)
    # Those of this device, where mesh.tensor divides them.
    heads = planned.sizes(keys).share(layer.n_heads)
    if layer.attention.kernel == "ring":
        block = min(LONGEST_BLOCK, planned.positions(keys))
        return RING_ARRAYS * 4 * planned.rows * heads * block**2
    if layer.attention.kernel != "blocked":
        return 0.0
    block = min(max(QUERY_BLOCK, -(-stack.tokens // MOST_BLOCKS)), stack.tokens)
    # Blocked attention has all tokens of some heads.
    return BLOCK_ARRAYS * 4 * planned.rows * heads / planned.context * block * keys


def bias_bytes(planned: PlannedRun, stack: Stack) -> tuple[float, float]:
    """Return bytes of the biases of scores that a stack has for all its rows, and of their
    gradients: one for all layers, or one for each."""
    model = planned.model
    if model.positions not in BIASED_SCORES:
        return 0.0, 0.0
    heads = planned.sizes(stack.tokens).share(model.n_heads) / planned.context
    # float32 [N, T, T]
    biases = 4 * heads * stack.tokens**2
    if has_layer_bias(model):
        biases *= len(stack.layers)
    if is_disentangled(model):
        biases *= planned.rows
    if model.positions == "alibi":
        return biases, 0.0
    return biases, biases


def edge_bytes(planned: PlannedRun) -> float:
    """Return what is stored before the first layer and after the last one."""
    model = planned.model
    numbers = planned.dtype_bytes
    tokens = planned.rows * planned.positions(planned.length)
    wide = tokens * model.d_model * numbers
    # The input and the output of the final norm; of the encoder's too, which all layers read.
    total = 2.0 * wide
    if model.family == "encoder_decoder":
        source = planned.positions(planned.source_length)
        total += 2 * planned.rows * source * model.d_model * numbers
    if model.output == "masked":
        # The dense layer, its activation and its norm.
        total += 3 * wide
    if model.embedding.norm:
        # The input of the norm, in float32.
        total += 2 * wide
    return total


def logits_bytes(planned: PlannedRun, tile: int) -> tuple[float, float]:
    """Return (bytes of the logits of a tile and of their gradient, bytes of all tiles together
    besides).

    `tile` is the number of positions of a device in each row that are computed at a time. The
    logits have train.logits_dtype, their gradient has the compute dtype; the gradient of the matrix
    is float32, and the matrix itself is gathered.
    """
    model = planned.model
    numbers = planned.dtype_bytes
    if model.output == "none":
        return 0.0, 0.0
    share = planned.sizes(planned.length).share(planned.outputs)
    length = planned.positions(planned.length)
    positions = min(tile, length)
    if model.output == "classes":
        positions = 1  # a class is one of a row
    copies = LOGIT_COPIES.get(planned.device.platform, 1)
    stored = jnp.dtype(planned.run.train.logits_dtype).itemsize
    logits = planned.rows * positions * share * (stored * copies + numbers)
    tiles = math.ceil(length / max(positions, 1))
    matrix = share * model.d_model
    of_x = planned.rows * length * model.d_model * numbers
    gathered = 0
    if planned.shards > 1 or tiles > 1:
        gathered = numbers
    return logits, matrix * (4 + gathered) + of_x


def gradient_bytes(planned: PlannedRun) -> float:
    """Return bytes of the gradients: float32, of the leaves that learn, placed as these."""
    learned = learning(planned.target.params, planned.target.frozen)
    return float(bytes_of_device(learned))


def matrix_elements(planned: PlannedRun, gathered: bool = False) -> float:
    """Return elements on a device of the matrices that products read: as it holds them, or gathered
    over fsdp and context."""
    total = 0.0
    for spec in rows(planned.specs).values():
        # Lookups are not multiplied, and so not cast or gathered.
        if not spec.is_matrix or spec.lookup:
            continue
        if gathered:
            total += planned.gathered_elements(spec)
        else:
            total += planned.held_elements(spec)
    return total


def layer_elements(planned: PlannedRun, of_experts: bool = False) -> float:
    """Return elements on a device of the matrices of the largest layer, gathered over fsdp and
    context: those of its experts, or all others."""
    sizes: dict[str, float] = {}
    for path, spec in rows(planned.specs).items():
        if not spec.is_matrix or not spec.is_stacked or ("experts" in spec.axes) != of_experts:
            continue
        stack = path.partition("blocks")[0]
        of_layer = planned.gathered_elements(spec) / spec.shape[spec.axes.index("layers")]
        sizes[stack] = sizes.get(stack, 0) + of_layer
    return max(sizes.values(), default=0)


def tile_length(planned: PlannedRun) -> int:
    """Return positions of each row whose logits are computed at a time."""
    of_microbatch = planned.sequences // planned.run.train.n_microbatches
    with jax.sharding.use_abstract_mesh(planned.mesh):
        tile = cross_entropy.tile_length(of_microbatch, planned.length, planned.outputs)
    return tile or planned.length


def capacity_of(device: Device) -> float | None:
    """Return bytes of a device that a program can use; None if they are unknown."""
    if device.memory is None:
        return None
    if device.platform != "gpu":
        return device.memory
    fractions = map(os.environ.get, FRACTION_VARIABLES)
    return device.memory * float(next(filter(None, fractions), GPU_FRACTION))
