"""The device mesh, and the shardings of parameters and batches on it by `sharding.py`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxformer.arrays.sharding import ACTIVATION_RULES, PARAMETERS, Axes, partition
from jaxformer.files import ConfigError

AnyMesh = Mesh | AbstractMesh  # of devices, or of sizes alone
MESH_AXES = ("data", "fsdp", "tensor")


def make_mesh(
    data: int = 0,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[Any] | None = None,
    explicit: bool = False,
) -> Mesh:
    """The mesh of `devices` (default: all): axes data, fsdp and tensor of these sizes; data=0 takes
    the rest.

    Explicit axes make the sharding part of each array's type; the tests find missing placements by
    them. Raises ConfigError if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(len(devices), data, fsdp, tensor, devices[0].platform)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(shape, MESH_AXES, axis_types=(kind,) * 3, devices=devices)


def mesh_shape(
    devices: int, data: int, fsdp: int, tensor: int, platform: str
) -> tuple[int, int, int]:
    """The sizes of the three axes. Raises as `make_mesh` does."""
    rows = data or max(devices // (fsdp * tensor), 1)
    if rows * fsdp * tensor != devices:
        raise ConfigError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} does not fit {devices}"
            f" device{'s' * (devices != 1)} ({platform}): the three must multiply"
            f" to {devices}; mesh.data=0 takes what is left."
        )
    return rows, fsdp, tensor


def check_batch_size(mesh: AnyMesh, batch_size: int, microbatches: int = 1) -> None:
    """ConfigError if a microbatch does not divide among the devices that hold different rows."""
    rows, split = batch_size // microbatches, batch_devices(mesh)
    if rows % split:
        raise ConfigError(
            f"train.batch_size={batch_size} in {microbatches} microbatches gives {rows} rows at a"
            f" time, not divisible among mesh.data x mesh.fsdp = {split} devices: make"
            f" train.batch_size a multiple of {split * microbatches}."
        )


def batch_devices(mesh: AnyMesh) -> int:
    """The number of devices that hold different rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in ACTIVATION_RULES["batch"])


def held_blocks(mesh: AnyMesh) -> tuple[tuple[int, ...], int]:
    """(numbers, count): the blocks of rows of a batch that the devices of this process hold, of the
    `count` that the mesh has. With a tensor axis over processes, several hold the same."""
    count = batch_devices(mesh)
    if jax.process_count() == 1:
        return tuple(range(count)), count
    places = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return tuple(sorted({(rows or [slice(None)])[0].start or 0 for rows in places})), count


def undivided(mesh: AnyMesh, shape: Sequence[int], axes: Axes) -> list[str]:
    """The axes of a parameter that the mesh would split if it divided their length, as "vocab 257
    by tensor 2"."""
    left = lengths_left(mesh, shape, axes)
    return [f"{axis} {length} by {target} {size}" for axis, length, target, size in left]


def lengths_left(
    mesh: AnyMesh, shape: Sequence[int], axes: Axes
) -> list[tuple[str, int, str, int]]:
    """(axis, its length, the axis of the mesh, its size) for each axis of a parameter that the mesh
    would split if it divided its length."""
    found = []
    for length, axis in zip(shape, axes, strict=True):
        target = PARAMETERS.get(axis or "", ())
        size = math.prod(mesh.shape[name] for name in target)
        if size > 1 and length % size:
            found.append((str(axis), length, " x ".join(target), size))
    return found


def parameter_sharding(mesh: AnyMesh, shape: Sequence[int], axes: Axes) -> NamedSharding:
    return NamedSharding(mesh, partition(shape, axes, PARAMETERS, mesh.shape))


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows over the devices of the batch axes; all but the first axis of an array is whole."""
    return NamedSharding(mesh, PartitionSpec(ACTIVATION_RULES["batch"]))


def replicated(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place_array(array: Any, where: Sharding) -> jax.Array:
    """`array`, of which every process holds the same, placed as `where` says.

    `jax.device_put` of jax 0.10 makes an array whose shards cannot be read, and so not be saved, of
    one of this process that it places on the devices of several.
    """
    local = not isinstance(array, jax.Array) or array.is_fully_addressable
    if where.is_fully_addressable or not local:
        return jax.device_put(array, where)
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, where, lambda index: values[index])


def place_batch(batch: Any, mesh: AnyMesh | None) -> Any:
    """This process's rows of a batch (a pytree of arrays, rows first) as global arrays on the mesh,
    or on the device.

    An array without axes is replicated. Raises ConfigError for rows that the devices do not divide.
    """
    if mesh is None:
        return jax.tree.map(jax.device_put, batch)
    rows, whole = batch_sharding(mesh), replicated(mesh)
    held, split = held_blocks(mesh)

    def place(path: Any, array: Any) -> jax.Array:
        if isinstance(array, jax.Array) and array.sharding in (rows, whole):
            return array
        local = np.asarray(array)
        if not local.ndim:
            return jax.make_array_from_process_local_data(whole, local)
        if len(local) % len(held):
            raise ConfigError(
                f"batch{jax.tree_util.keystr(path)} has {len(local)} rows, not divisible among the"
                f" {len(held)} devices that {' x '.join(ACTIVATION_RULES['batch'])} of the mesh"
                f" counts{' in this process' * (len(held) < split)}: make it a multiple of"
                f" {len(held)}."
            )
        if jax.process_count() == 1:
            return jax.make_array_from_process_local_data(rows, local)
        size = len(local) // len(held)

        def block(index: Any) -> np.ndarray:
            at = held.index((index[0].start or 0) // size)
            return local[at * size : (at + 1) * size]

        return jax.make_array_from_callback((split * size, *local.shape[1:]), rows, block)

    return jax.tree.map_with_path(place, batch)
