"""The input of a plan: a run with every automatic choice made, on devices that need not be
attached."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxformer.arrays.hardware import Device, device_named
from jaxformer.arrays.mesh import (
    MESH_AXES,
    batch_devices,
    batch_sharding,
    check_batch_size,
    check_split,
    mesh_shape,
    parameter_sharding,
)
from jaxformer.arrays.params import Spec
from jaxformer.arrays.sharding import PARAMETERS, partition
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError
from jaxformer.layers.exchange import CONTEXT, exchange_of
from jaxformer.runs.resolve import AbstractBatch, Resolved, resolve_without_data, with_kernel
from jaxformer.training.state import TrainState, abstract_state

# The rules of the axes of parameters that are not gathered for a product.
NOT_GATHERED = {name: axes for name, axes in PARAMETERS.items() if name != "embed"}


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Resolved):
    """A run on devices of a kind, of which no array is made. `state` and `batch` are shapes with
    their shardings on `mesh`."""

    mesh: AbstractMesh
    device_name: str
    device: Device
    state: TrainState
    batch: AbstractBatch

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
    def shards(self) -> int:
        """The number of devices among which parameters are divided, besides tensor parallelism."""
        return self.size(*PARAMETERS["embed"])

    def held_elements(self, spec: Spec) -> int:
        """Elements of a parameter that a device holds."""
        sharding = parameter_sharding(self.mesh, spec.shape, spec.axes)
        return math.prod(sharding.shard_shape(spec.shape))

    def gathered_elements(self, spec: Spec) -> float:
        """Elements of a parameter on a device that has gathered it over fsdp and context."""
        placed = partition(spec.shape, spec.axes, NOT_GATHERED, self.mesh.shape)
        return math.prod(spec.shape) / self.size(*(axis for axis in placed if axis))

    @property
    def context(self) -> int:
        """The number of devices that have different tokens of a row."""
        return self.size(CONTEXT)

    def positions(self, length: int) -> int:
        """Tokens of a row of `length` on a device."""
        return length // self.context

    @property
    def exchange(self) -> str:
        """How attention gets the keys of the tokens of other devices: an `Exchange`, or "ring"."""
        exchange = exchange_of(self.length, self.model.n_heads, self.mesh.shape)
        is_ring = self.model.attention_kernel == "ring"
        return "ring" if is_ring and exchange != "none" else exchange

    @property
    def of_pairs(self) -> bool:
        """Whether the loss is one of pairs, which computes the logits again for their gradient."""
        return self.sequences > self.run.train.batch_size

    @property
    def rows(self) -> int:
        """Sequences of a microbatch on a device."""
        return self.sequences // (self.run.train.n_microbatches * batch_devices(self.mesh))


def abstract_mesh(count: int, sizes: Mapping[str, int], name: str) -> AbstractMesh:
    """A mesh of `count` devices of a row of `hardware.DEVICES`, which need not be attached, with
    axes of these sizes."""
    device, shape = device_named(name), mesh_shape(count, sizes, name)
    abstract = AbstractDevice(name, num_cores=device.cores, platform=device.platform)
    kinds = (AxisType.Auto,) * len(shape)
    return AbstractMesh(shape, MESH_AXES, axis_types=kinds, abstract_device=abstract)


def planned_run(
    run: RunConfig, device_name: str, devices: int = 0, packed: bool | None = None
) -> PlannedRun:
    """A run on `devices` of a kind of `hardware.DEVICES`.

    Args:
      run: its settings.
      device_name: a name of the table, such as "h100".
      devices: their number; 0 takes the product of the sizes of the mesh.
      packed: whether rows come with segment ids; None goes by the objective and data.packing.
    """
    device, sizes = device_named(device_name), run.mesh.sizes
    if devices < 0:
        raise ConfigError(f"--devices {devices}: give the number of devices, at least 1.")
    count = devices or math.prod(max(size, 1) for size in sizes.values())
    mesh = abstract_mesh(count, sizes, device_name)
    resolved, batch = resolve_without_data(run, mesh, packed)
    check_split(resolved.specs, mesh)
    if resolved.has_reference:
        note = "what the forward pass of the reference exchanges and stores is not counted"
        resolved = dataclasses.replace(resolved, notes=(*resolved.notes, note))
    return PlannedRun(
        **resolved.fields(),
        device_name=device_name,
        device=device,
        state=resolved.target,
        batch=batch,
    )


def replanned(planned: PlannedRun, settings: Mapping[str, Any]) -> PlannedRun:
    """The same devices with other values of some settings, by their dotted names: of the mesh,
    microbatches, remat or the loop of layers. Other axes of the mesh take their devices from
    mesh.data."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    if "mesh" in sections:
        sections["mesh"]["data"] = 0
    replaced: dict[str, Any] = {
        section: dataclasses.replace(getattr(planned.run, section), **fields)
        for section, fields in sections.items()
    }
    run = dataclasses.replace(planned.run, **replaced)
    mesh, state, batch = planned.mesh, planned.state, planned.batch
    kernel = planned.kernel
    changed_mesh = abstract_mesh(mesh.size, run.mesh.sizes, planned.device_name)
    if changed_mesh.shape != mesh.shape:
        mesh = changed_mesh
        check_split(planned.specs, mesh)
        before = planned.asked.model
        asked = dataclasses.replace(
            run.model, attention_kernel=before.attention_kernel, expert_kernel=before.expert_kernel
        )
        length = math.gcd(planned.length, planned.source_length)
        model, kernel = with_kernel(asked, run.adapter, length, asked.max_segments, mesh)
        run = dataclasses.replace(run, model=model)
        state = abstract_state(planned.specs, planned.optimizer, mesh)
        sharding = batch_sharding(mesh)
        batch = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for name, array in planned.batch.items()
        }
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    return dataclasses.replace(planned, run=run, mesh=mesh, kernel=kernel, state=state, batch=batch)
