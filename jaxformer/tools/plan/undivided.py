"""Axes of parameters that a mesh would divide and does not, because the number of its devices does
not divide their length: each of these devices then stores and computes all of them."""

import itertools
import math
from typing import NamedTuple

from jaxformer.arrays.mesh import AnyMesh, lengths_left
from jaxformer.arrays.params import Specs, rows
from jaxformer.files import first_of

# Axes that may be longer than the model asks: the setting of each.
PADDED = {"vocab": "model.vocab_size", "mlp": "model.d_ff"}
# Axes whose products each device then computes whole. Compilers divide those of "kv_heads" by the
# width of a head, and fsdp divides rows, whatever it does to parameters.
REPEATED_AXES = ("vocab", "heads", "mlp")
MULTIPLE = 64  # of padded lengths, which products in 16 bits like


class UndividedAxis(NamedTuple):
    """An axis of parameters, its length, the axis of the mesh that would divide it (or several, as
    in "fsdp x context"), the number of devices along that, the parameters, and settings with which
    the mesh divides it."""

    axis: str
    length: int
    mesh_axis: str
    devices: int
    paths: tuple[str, ...]
    remedy: str


def undivided_axes(specs: Specs, mesh: AnyMesh, may_be_longer: bool = True) -> list[UndividedAxis]:
    """The axes that a mesh would divide and does not. `may_be_longer` says whether the model may
    have other sizes."""
    paths_of_axis: dict[tuple[str, int, str, int], list[str]] = {}
    for path, spec in rows(specs).items():
        for left in lengths_left(mesh, spec.shape, spec.axes):
            paths_of_axis.setdefault(left, []).append(path)
    return [
        UndividedAxis(*left, tuple(paths), _remedy(left, mesh, may_be_longer))
        for left, paths in paths_of_axis.items()
    ]


def _remedy(left: tuple[str, int, str, int], mesh: AnyMesh, may_be_longer: bool) -> str:
    """A longer axis where the model can have one, else fewer devices along that of the mesh."""
    axis, length, mesh_axis, devices = left
    if axis in PADDED and may_be_longer:
        multiple = math.lcm(MULTIPLE, devices)
        return f"--{PADDED[axis]} {-(-length // multiple) * multiple} is divided"
    names = mesh_axis.split(" x ")
    smaller = [
        [n for n in range(1, size + 1) if size % n == 0] for size in map(mesh.shape.get, names)
    ]
    dividing = [sizes for sizes in itertools.product(*smaller) if length % math.prod(sizes) == 0]
    largest = max(dividing, key=math.prod)
    settings = [f"--mesh.{name} {size}" for name, size in zip(names, largest, strict=True)]
    return f"{' '.join(settings)} divides it"


def sentence(one: UndividedAxis) -> str:
    """An axis in words."""
    paths = first_of(one.paths, 4, ", ")
    mesh_axis = one.mesh_axis.replace(" x ", " x mesh.")
    return (
        f"{one.axis} {one.length:,} by mesh.{mesh_axis} {one.devices}: each of these devices"
        f" has all of {paths}; {one.remedy}"
    )
