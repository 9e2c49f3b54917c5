"""Averages of weights in a checkpoint: found by the names of its leaves, and read by themselves."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from jaxformer.arrays.mesh import replicated
from jaxformer.checkpoints.averages import AVERAGES, AverageKind


class SavedAverage(NamedTuple):
    """What a checkpoint holds of an average: its kind, and for the dotted path of each parameter
    that learns the names of its array and of its number among the leaves of the checkpoint."""

    kind: AverageKind
    names: dict[str, tuple[str, str]]


def saved_average(names: Collection[str]) -> SavedAverage | None:
    """The average among the leaves of a checkpoint, by their `names`; None where it has none."""
    for kind in AVERAGES:
        table = dict[str, tuple[str, str]]()
        for scalar in names:
            if not scalar.startswith("optimizer.") or not scalar.endswith(f".{kind.scalar}"):
                continue
            prefix = f"{scalar.removesuffix(kind.scalar)}{kind.leaves}."
            leaves = {name for name in names if name.startswith(prefix)}
            table |= {name.removeprefix(prefix): (name, scalar) for name in leaves}
        if table:
            return SavedAverage(kind, table)
    return None


def read_average(
    read: Callable[[dict[str, Any]], dict[str, Any]],
    average: SavedAverage,
    saved: Mapping[str, Any],
    shapes: dict[str, Any],
) -> dict[str, Any]:
    """The average of each leaf of `shapes`, as its dtype; a leaf that does not learn is itself.
    `read` reads leaves of a checkpoint, and `saved` has their [shape, dtype] by name."""
    names = {path: average.names.get(path.removeprefix("params.")) for path in shapes}
    formula, wanted = average.kind.formula, dict[str, Any]()
    for path, shape in shapes.items():
        pair = names[path]
        if pair is None or formula is not None:
            wanted[path] = shape
        if pair is not None:
            leaf_dtype = jnp.dtype(saved[pair[0]][1])
            wanted[pair[0]] = jax.ShapeDtypeStruct(shape.shape, leaf_dtype, sharding=shape.sharding)
        if pair is not None and formula is not None:
            dtype, sharding = jnp.dtype(saved[pair[1]][1]), _undivided(shape.sharding)
            wanted[pair[1]] = jax.ShapeDtypeStruct((), dtype, sharding=sharding)
    leaves = read(wanted)

    def averaged(path: str, shape: Any) -> Any:
        pair = names[path]
        if pair is None:
            return leaves[path]
        leaf = leaves[pair[0]]
        if formula is not None:
            leaf = formula(leaves[path], leaf, leaves[pair[1]])
        return leaf.astype(shape.dtype)

    return {path: averaged(path, shape) for path, shape in shapes.items()}


def _undivided(sharding: Sharding) -> Sharding:
    """The sharding of a number beside an array."""
    return replicated(sharding.mesh) if isinstance(sharding, NamedSharding) else sharding
