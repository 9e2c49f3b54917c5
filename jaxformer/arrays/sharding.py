"""Logical axes to mesh axes: the one module that decides how arrays are placed on devices.

Layers name the axes of their arrays; the two tables below map these names to the axes of the mesh
(data, fsdp, expert, context, tensor). Without a mesh in force (`jax.set_mesh`) every function here
returns its input.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

Axes = Sequence[str | None]
Rules = Mapping[str, tuple[str, ...]]
RunT = TypeVar("RunT", bound=Callable[..., Any])

TENSOR_RULES = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), ("tensor",))
# Of the axes that divide tokens, all but data also divide the width of weights, which are gathered
# before they are multiplied (ZeRO-3, arXiv:1910.02054).
PARAMETERS: Rules = {"experts": ("expert",), "embed": ("fsdp", "expert", "context"), **TENSOR_RULES}
# Axes of parameters that count weights beside each other (`Spec.batch`).
BATCH_AXES = ("layers", "experts")
# Axes of parameters that count the heads of attention.
HEAD_AXES = ("heads", "kv_heads")
ACTIVATION_RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),
    **TENSOR_RULES,
    # Heads while attention has all tokens of them on a device (`layers/exchange.py`).
    "exchanged_heads": ("tensor", "context"),
    # Axes of `lookup` in params.py: the rows of a batch of one replica of the parameters, the
    # columns of the embedding table that a device has, and those that the devices of its rows have
    # together.
    "replica": ("data",),
    "column": PARAMETERS["embed"],
    "column_of_rows": ("fsdp", "expert"),
}


def targets(
    shape: Sequence[int], axes: Axes, rules: Rules, sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Return the axes of the mesh that should divide each axis of an array. What divides one axis
    of it divides no later one."""
    targets_of_axes = []
    used = set[str]()
    for length, axis in zip(shape, axes, strict=True):
        names = (name for name in rules.get(axis or "", ()) if sizes.get(name, 1) > 1)
        target = tuple(name for name in names if name not in used)
        targets_of_axes.append(target)
        # One that does not divide this axis is left for a later one.
        if length % math.prod(sizes[name] for name in target) == 0:
            used |= {*target}
    return targets_of_axes


def partition(
    shape: Sequence[int], axes: Axes, rules: Rules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """Return the partition of an array; an axis whose length the mesh does not divide is
    replicated."""
    placed: list[tuple[str, ...] | str | None] = []
    for length, target in zip(shape, targets(shape, axes, rules, sizes), strict=True):
        if not target or length % math.prod(sizes[name] for name in target):
            placed.append(None)
        else:
            # Of one axis a partition has the name.
            placed.append(target if len(target) > 1 else target[0])
    return PartitionSpec(*placed)


def entry_axes(entry: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Return the axes of the mesh that an entry of a partition names."""
    if entry is None:
        return ()
    if isinstance(entry, tuple):
        return entry
    return (entry,)


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """Return the platform of a mesh (None: the one in force): "cpu", "gpu" or "tpu". The devices of
    the mesh need not exist on this machine. Without a mesh it is that of JAX's default backend."""
    abstract = mesh.abstract_mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    device = abstract.abstract_device
    if device is None:
        return jax.default_backend()
    return device.platform


def free_axes() -> dict[str, int]:
    """Return the sizes of the axes of the mesh in force, except those that an enclosing
    `jax.shard_map` divides; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}


def on_devices(
    run: RunT, in_specs: Any, out_specs: Any, axes: Collection[str] | None = None
) -> RunT:
    """Return `run` as a function of whole arrays, which each device of the mesh in force computes
    from its parts of them; `axes` of the mesh divide them (None: all that are free)."""
    # The kernels do not declare along which axes their results vary, so that is not checked.
    divided: RunT = jax.shard_map(
        run,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*(free_axes() if axes is None else axes)},
        check_vma=False,
    )
    return divided


def explicit_axes() -> bool:
    """Return whether the mesh makes sharding part of the types (the tests find missing sites by
    it)."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def gathered(w: Any) -> Any:
    """Return a weight, or every array of a custom leaf, gathered along the mesh axes that split
    batches. With automatic axes it is unchanged, because the compiler gathers it."""
    if not explicit_axes():
        return w
    tokens = {*ACTIVATION_RULES["batch"], *ACTIVATION_RULES["sequence"]}

    def without_tokens(array: jax.Array) -> jax.Array:
        axes: list[Any] = []
        for axis in jax.typeof(array).sharding.spec:
            axes.append(None if tokens & {*entry_axes(axis)} else axis)
        return jax.sharding.reshard(array, PartitionSpec(*axes))

    return jax.tree.map(without_tokens, w)


def activation(shape: Sequence[int], axes: Axes) -> PartitionSpec:
    """Return the placement of an activation on the mesh in force."""
    return partition(shape, axes, ACTIVATION_RULES, free_axes())


def constrain(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Return `x` placed by the names of its axes on the mesh in force; `x` itself without a mesh,
    and with None for the axes."""
    # One device needs no placement, which would only lengthen the program.
    if axes is None or math.prod(free_axes().values()) == 1:
        return x
    sharding = activation(x.shape, axes)
    if explicit_axes():
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)
