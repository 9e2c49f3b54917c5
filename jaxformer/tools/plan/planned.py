"""The input of a plan: a run with every automatic choice made, on devices that need not be
attached."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxformer.arrays.hardware import Device, device_named
from jaxformer.arrays.mesh import MESH_AXES, batch_sharding, check_batch_size, mesh_shape
from jaxformer.arrays.params import Specs
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError
from jaxformer.runs.compose import (
    abstract_batch,
    assumed_segments,
    check_split,
    compares_with_start,
    encoded_length,
    run_specs,
    with_kernel,
)
from jaxformer.runs.objectives import OBJECTIVES, Objective, objective_of
from jaxformer.training.optim import make_optimizer, make_schedule
from jaxformer.training.state import TrainState, abstract_state

# Classes of a head whose number only the data says.
ASSUMED_CLASSES = 2


@dataclass(frozen=True)
class PlannedRun:
    """A run on devices. In `run` every automatic choice is made; `kernel` is a sentence about the
    attention kernel. `state` and `batch` are shapes with their shardings on `mesh`."""

    run: RunConfig
    device_name: str
    device: Device
    mesh: AbstractMesh
    kernel: str
    specs: Specs
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> ModelConfig:
        return self.run.model

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.model.dtype == "float32" else 2

    @property
    def packed(self) -> bool:
        """Whether rows come with segment ids."""
        return "segment_ids" in self.batch

    def size(self, *axes: str) -> int:
        """The number of devices along axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[objective_of(self.model, self.run.data)]

    @property
    def sequences(self) -> int:
        """Sequences of the model in a step: a row of the batch is one, or the two of a pair."""
        return self.run.train.batch_size * self.objective.sequences

    @property
    def of_pairs(self) -> bool:
        """Whether the loss is one of pairs, which computes the logits again for their gradient."""
        return self.sequences > self.run.train.batch_size

    @property
    def rows(self) -> int:
        """Sequences of a microbatch on a device."""
        return self.sequences // (self.run.train.n_microbatches * self.size("data", "fsdp"))

    @property
    def has_reference(self) -> bool:
        """Whether the devices also hold the parameters that the run starts from."""
        return compares_with_start(self.run)

    @property
    def length(self) -> int:
        return self.run.data.sequence_length

    @property
    def source_length(self) -> int:
        """Tokens of a row of sources, with a prompt before them; 0 where the model reads none."""
        return encoded_length(self.run, self.model.max_segments)

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.length


def abstract_mesh(sizes: tuple[int, int, int], name: str) -> AbstractMesh:
    """A mesh of devices of a row of `hardware.DEVICES`, which need not be attached."""
    device = device_named(name)
    abstract = AbstractDevice(name, num_cores=device.cores, platform=device.platform)
    kinds = (AxisType.Auto,) * 3
    return AbstractMesh(sizes, MESH_AXES, axis_types=kinds, abstract_device=abstract)


def planned_run(
    run: RunConfig, device_name: str, devices: int = 0, packed: bool | None = None
) -> PlannedRun:
    """A run on `devices` of a kind of `hardware.DEVICES`.

    Args:
      run: its settings.
      device_name: a name of the table, such as "h100".
      devices: their number; 0 takes the product of the sizes of the mesh.
      packed: whether rows come with segment ids; None goes by the objective and data.packing.

    Raises:
      ConfigError: for an unknown device, for a vocabulary that only the data knows, and for
        settings that a run refuses.
    """
    device, settings = device_named(device_name), run.mesh
    if devices < 0:
        raise ConfigError(f"--devices {devices}: give the number of devices, at least 1.")
    count = devices or max(settings.data, 1) * settings.fsdp * settings.tensor
    sizes = mesh_shape(count, settings.data, settings.fsdp, settings.tensor, device_name)
    mesh = abstract_mesh(sizes, device_name)
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    run, notes = with_known_sizes(run)
    if compares_with_start(run):
        notes += ("what the forward pass of the reference exchanges and stores is not counted",)
    batch = abstract_batch(run, mesh, packed)
    run, kernel = with_kernel(run, assumed_segments(run, batch), mesh)
    specs, optimizer = _specs_and_optimizer(run)
    check_split(specs, mesh)
    state = abstract_state(specs, optimizer, mesh)
    return PlannedRun(run, device_name, device, mesh, kernel, specs, optimizer, state, batch, notes)


def replanned(planned: PlannedRun, run: RunConfig) -> PlannedRun:
    """The same devices with other settings of mesh, microbatches, remat or loop of layers. Raises
    ConfigError where the devices or the rows do not divide."""
    settings, count = run.mesh, planned.mesh.size
    sizes = mesh_shape(count, settings.data, settings.fsdp, settings.tensor, planned.device_name)
    if sizes == tuple(planned.mesh.shape.values()):
        mesh, state, batch = planned.mesh, planned.state, planned.batch
    else:
        mesh = abstract_mesh(sizes, planned.device_name)
        check_split(planned.specs, mesh)
        state = abstract_state(planned.specs, planned.optimizer, mesh)
        sharding = batch_sharding(mesh)
        batch = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for name, array in planned.batch.items()
        }
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    return dataclasses.replace(planned, run=run, mesh=mesh, state=state, batch=batch)


def _specs_and_optimizer(run: RunConfig) -> tuple[Specs, optax.GradientTransformation]:
    specs = run_specs(run)
    schedule = make_schedule(run.optimizer, run.train.steps)
    return specs, make_optimizer(run.optimizer, schedule, specs)


def with_known_sizes(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` with the sizes that otherwise come from the data, and a sentence about each."""
    model, notes = run.model, []
    if not model.vocab_size:
        raise ConfigError(
            "model.vocab_size=0, and the size of this tokenizer is not known before its data is"
            " read: give it, as in --model.vocab_size 32000."
        )
    if model.output in ("classes", "tags") and not model.n_classes:
        model = dataclasses.replace(model, n_classes=ASSUMED_CLASSES)
        notes.append(f"{ASSUMED_CLASSES} classes are assumed; the data says how many there are")
    return dataclasses.replace(run, model=model), tuple(notes)


def shard_bytes(leaf: Any) -> int:
    """Bytes of an abstract array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)


def tree_bytes(tree: Any) -> int:
    """Bytes of a pytree of abstract arrays on one device."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))
