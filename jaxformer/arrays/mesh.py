"""The device mesh, and the shardings of parameters and batches on it by `sharding.py`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxformer.arrays.params import Specs, rows
from jaxformer.arrays.sharding import (
    ACTIVATION_RULES,
    PARAMETERS,
    Axes,
    entry_axes,
    partition,
    targets,
)
from jaxformer.config.format import human_bytes
from jaxformer.config.settings import divisors
from jaxformer.files import ConfigError

# A mesh of devices, or one that has only the sizes of its axes.
AnyMesh = Mesh | AbstractMesh
# By rising traffic, as `jax.make_mesh` takes them: it gives the last axis the fastest links where
# it knows how devices are connected.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
# What a batch has by this name is no rows: all rows read it, such as the parameters of a teacher.
SHARED_ENTRY = "shared"


def make_mesh(
    data: int = 0,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    devices: Sequence[jax.Device] | None = None,
    explicit: bool = False,
) -> Mesh:
    """Return the mesh of `devices` (default: all) with axes data, fsdp, expert, context and tensor
    of these sizes. With data=0, the axis data has the devices that the others leave.

    Explicit axes make the sharding part of each array's type, by which the tests find missing
    placements. Raises ConfigError if the sizes do not multiply to the number of devices.
    """
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}
    return mesh_of(sizes, devices, explicit)


def mesh_of(
    sizes: Mapping[str, int], devices: Sequence[Any] | None = None, explicit: bool = False
) -> Mesh:
    """Make a mesh as `make_mesh` does, with the sizes by the names of the axes, as
    `MeshConfig.sizes` has them."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(len(devices), sizes, devices[0].platform)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(shape, MESH_AXES, axis_types=(kind,) * len(shape), devices=devices)


def mesh_shape(devices: int, sizes: Mapping[str, int], platform: str) -> tuple[int, ...]:
    """Return the sizes of the axes in the order of MESH_AXES, where data=0 is the number of devices
    that the others leave."""
    divided = math.prod(size for axis, size in sizes.items() if axis != "data")
    shape = {**sizes, "data": sizes["data"] or max(devices // divided, 1)}
    if math.prod(shape.values()) != devices:
        asked = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            f"{asked} does not fit {devices} device{'' if devices == 1 else 's'} ({platform}): they"
            f" must multiply to {devices}; mesh.data=0 takes what is left."
        )
    return tuple(shape[axis] for axis in MESH_AXES)


def check_batch_size(mesh: AnyMesh, batch_size: int, microbatches: int = 1) -> None:
    """Raise ConfigError if a microbatch does not divide among the devices that hold different
    rows."""
    rows = batch_size // microbatches
    split = batch_devices(mesh)
    if rows % split:
        expert = " x mesh.expert" if mesh.shape["expert"] > 1 else ""
        raise ConfigError(
            f"train.batch_size={batch_size} in {microbatches} microbatches gives {rows} rows at a"
            f" time, not divisible among mesh.data x mesh.fsdp{expert} = {split} devices: make"
            f" train.batch_size a multiple of {split * microbatches}."
        )


def check_length(mesh: AnyMesh, length: int) -> None:
    """Raise ConfigError if the tokens of a row do not divide among the devices of mesh.context."""
    context = mesh.shape["context"]
    if length % context:
        raise ConfigError(
            f"mesh.context={context} does not divide rows of {length} tokens: make"
            " data.sequence_length, and data.source_length where there is one, multiples of"
            f" {context}, or choose a mesh.context that divides them."
        )


def check_experts(mesh: AnyMesh, experts: int) -> None:
    """Raise ConfigError if the experts of a model (0: it has none) do not divide among the devices
    of mesh.expert."""
    devices = mesh.shape["expert"]
    if devices > 1 and not experts:
        raise ConfigError(
            f"mesh.expert={devices} divides experts, and this model has none: set it to 1, and"
            " mesh.fsdp to the number of devices."
        )
    if experts % devices:
        raise ConfigError(
            f"mesh.expert={devices} does not divide model.experts.n={experts}: choose one of"
            f" {divisors(experts)}."
        )


def batch_devices(mesh: AnyMesh) -> int:
    """Return the number of devices that hold different rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ACTIVATION_RULES["batch"])


def held_blocks(mesh: AnyMesh) -> tuple[tuple[int, ...], int]:
    """Return the numbers of the blocks of rows of a batch that the devices of this process hold, in
    ascending order, and the number of blocks that the mesh has. With a tensor axis over processes,
    several processes hold the same blocks."""
    count = batch_devices(mesh)
    if jax.process_count() == 1:
        return tuple(range(count)), count
    # An array of one row for each block: the rows of a device are the blocks that it holds.
    blocks = set()
    for index in batch_sharding(mesh).addressable_devices_indices_map((count,)).values():
        rows = index[0] if index else slice(None)
        blocks.add(rows.start or 0)
    return tuple(sorted(blocks)), count


def check_split(specs: Specs, mesh: AnyMesh) -> list[str]:
    """Return a line for each parameter that the mesh should split but cannot, because none of its
    axes is divisible, with its bytes.

    Raises ConfigError where mesh.fsdp or mesh.tensor was given and splits no parameter at all.
    """
    used = set[str]()
    undivided_axes = dict[str, list[str]]()
    for path, spec in rows(specs).items():
        should_divide = targets(spec.shape, spec.axes, PARAMETERS, mesh.shape)
        for length, axis, target in zip(spec.shape, spec.axes, should_divide, strict=True):
            size = math.prod(mesh.shape[name] for name in target)
            if length % size:
                text = f"{axis} {length} by {' x '.join(target)} {size}"
                undivided_axes.setdefault(path, []).append(text)
        for entry in parameter_sharding(mesh, spec.shape, spec.axes).spec:
            used |= {*entry_axes(entry)}
    for name in {axis: None for rule in PARAMETERS.values() for axis in rule}:
        # What divides tokens is of use without dividing parameters.
        if mesh.shape[name] > 1 and name not in (*used, *ACTIVATION_RULES["sequence"]):
            reasons = [f"{path}: {', '.join(axes)}" for path, axes in undivided_axes.items()]
            listed = "\n  ".join(reasons[:8])
            raise ConfigError(
                f"mesh.{name}={mesh.shape[name]} splits no parameter of this model, because it"
                " divides none of their axes; every device would hold all of them:\n"
                f"  {listed}\nChoose a mesh.{name} that divides them, or leave it at 1."
            )
    sizes = {path: human_bytes(4 * math.prod(spec.shape)) for path, spec in rows(specs).items()}
    return [
        f"{path}, {sizes[path]}, is not split along {', '.join(axes)}"
        for path, axes in undivided_axes.items()
    ]


def parameter_sharding(mesh: AnyMesh, shape: Sequence[int], axes: Axes) -> NamedSharding:
    return NamedSharding(mesh, partition(shape, axes, PARAMETERS, mesh.shape))


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Divide rows over the devices of the batch axes; the other axes of an array are not
    divided."""
    rows = batch_devices(mesh)
    return NamedSharding(mesh, partition((rows,), ("batch",), ACTIVATION_RULES, mesh.shape))


def replicated(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def whole(array: Any) -> Any:
    """Return an array of which other processes may have parts as one that this process has. All
    processes have to call it."""
    if array.is_fully_addressable:
        return array
    everywhere = replicated(array.sharding.mesh)
    copies = jax.jit(lambda array: array, out_shardings=everywhere)(array)
    return copies.addressable_data(0)


def with_automatic_axes(mesh: Mesh) -> Mesh:
    """Return the mesh of the same devices with axes on which the compiler places what no type
    says."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def on_same_devices(tree: Any, mesh: Mesh) -> Any:
    """Return the arrays of a tree as those of another mesh of the same devices and axes. Nothing is
    copied; what has no mesh stays as it is."""

    def moved(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return leaf
        shards = [shard.data for shard in leaf.addressable_shards]
        where = NamedSharding(mesh, sharding.spec)
        return jax.make_array_from_single_device_arrays(leaf.shape, where, shards)

    return jax.tree.map(moved, tree)


def place_array(array: Any, where: Sharding) -> jax.Array:
    """Return `array`, which is the same in every process, placed as `where` says.

    `jax.device_put` of jax 0.10 places an array of one process on the devices of several in such a
    way that its shards cannot be read, and so cannot be saved. Such an array is made by a callback.
    """
    local = not isinstance(array, jax.Array) or array.is_fully_addressable
    if where.is_fully_addressable or not local:
        return jax.device_put(array, where)
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, where, lambda index: values[index])


def place_batch(batch: Any, mesh: AnyMesh | None) -> Any:
    """Place this process's rows of a batch (a pytree of arrays, rows first) as global arrays on
    the mesh, or on the device.

    An array without axes is replicated, and so is what `SHARED_ENTRY` names, if it is not placed
    already. Raises ConfigError for rows that the devices do not divide.
    """
    if mesh is None:
        return jax.tree.map(jax.device_put, batch)
    by_rows = batch_sharding(mesh)
    replicated_everywhere = replicated(mesh)
    blocks, count = held_blocks(mesh)

    def placed(path: Any, array: Any) -> jax.Array:
        is_shared = path[:1] == (jax.tree_util.DictKey(SHARED_ENTRY),)
        if isinstance(array, jax.Array) and (
            is_shared or array.sharding in (by_rows, replicated_everywhere)
        ):
            return array
        local = np.asarray(array)
        if is_shared or not local.ndim:
            return jax.make_array_from_process_local_data(replicated_everywhere, local)
        if len(local) % len(blocks):
            raise ConfigError(
                f"batch{jax.tree_util.keystr(path)} has {len(local)} rows, not divisible among the"
                f" {len(blocks)} devices that {' x '.join(ACTIVATION_RULES['batch'])} of the mesh"
                f" counts{' in this process' if len(blocks) < count else ''}: make it a multiple of"
                f" {len(blocks)}."
            )
        if jax.process_count() == 1:
            return jax.make_array_from_process_local_data(by_rows, local)
        # The rows of this process are its blocks, in ascending order, of `size` rows each. A block
        # is looked up by the first of the global rows [count * size] that a device asks for.
        size = len(local) // len(blocks)

        def rows_of_device(index: Any) -> np.ndarray:
            position = blocks.index((index[0].start or 0) // size)
            return local[position * size : (position + 1) * size]

        shape = (count * size, *local.shape[1:])
        return jax.make_array_from_callback(shape, by_rows, rows_of_device)

    return jax.tree.map_with_path(placed, batch)


def bytes_of_device(tree: Any) -> int:
    """Return the bytes of a pytree of arrays, or of their shapes and shardings, on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(tree)
    )


def placement(mesh: AnyMesh | None, shape: Sequence[int], axes: Axes) -> Sharding:
    """Return where a parameter is read to: onto a mesh, or onto the first device of this
    process."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return parameter_sharding(mesh, shape, axes)
