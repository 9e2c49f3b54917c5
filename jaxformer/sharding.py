"""Logical axes to mesh axes: the one place that knows how arrays lie on devices.

Layers name the axes of what they make; the two tables below place them on the mesh (data, fsdp,
tensor). Without a mesh in force (`jax.set_mesh`) every function here leaves its input as it is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

Axes = Sequence[str | None]
Rules = Mapping[str, tuple[str, ...]]

PARAMETERS: Rules = {
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}
ACTIVATION_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}


def partition(
    shape: Sequence[int], axes: Axes, rules: Rules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """Where the axes of an array go; an axis whose length the mesh does not divide is copied to
    every device."""
    placed: list[tuple[str, ...] | str | None] = []
    for length, axis in zip(shape, axes, strict=True):
        target = rules.get(axis or "", ())
        fits = target and length % math.prod(sizes[a] for a in target) == 0
        placed.append((target if len(target) > 1 else target[0]) if fits else None)
    return PartitionSpec(*placed)


def explicit_axes() -> bool:
    """True under a mesh whose sharding is part of the types (the tests that catch a site without a
    placement)."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def gathered(w: Any) -> Any:
    """A weight under explicit axes, whole along the mesh axes that split batches (automatic axes do
    this unasked). Of a weight that is no array every part."""
    return jax.tree.map(_gathered, w) if explicit_axes() else w


def _gathered(w: jax.Array) -> jax.Array:
    spec = jax.typeof(w).sharding.spec
    return jax.sharding.reshard(
        w, PartitionSpec(*(None if axis in ACTIVATION_RULES["batch"] else axis for axis in spec))
    )


def activation(shape: Sequence[int], axes: Axes) -> PartitionSpec:
    """The placement of an activation on the mesh in force."""
    return partition(shape, axes, ACTIVATION_RULES, jax.sharding.get_abstract_mesh().shape)


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` placed by the names of its axes on the mesh in force; `x` itself where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    spec = activation(x.shape, axes)
    return (
        jax.sharding.reshard(x, spec)
        if explicit_axes()
        else jax.lax.with_sharding_constraint(x, spec)
    )
