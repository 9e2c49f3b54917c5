"""The refusal of a mesh that splits nothing."""

import math

from jaxformer.arrays.mesh import AnyMesh, parameter_sharding, undivided
from jaxformer.arrays.params import Specs, rows
from jaxformer.config.format import human_bytes
from jaxformer.files import ConfigError


def check_split(specs: Specs, mesh: AnyMesh) -> list[str]:
    """A line for each parameter that the mesh should split but cannot, because none of its axes is
    divisible, with its bytes.

    Raises ConfigError where mesh.fsdp or mesh.tensor was given and splits no parameter at all.
    """
    used, whole = set[str](), dict[str, list[str]]()
    for path, spec in rows(specs).items():
        if found := undivided(mesh, spec.shape, spec.axes):
            whole[path] = found
        for entry in parameter_sharding(mesh, spec.shape, spec.axes).spec:
            used |= {entry} if isinstance(entry, str) else {*(entry or ())}
    for name in ("fsdp", "tensor"):
        if mesh.shape[name] > 1 and name not in used:
            reasons = [f"{path}: {', '.join(found)}" for path, found in whole.items()]
            listed = "\n  ".join(reasons[:8])
            raise ConfigError(
                f"mesh.{name}={mesh.shape[name]} splits no parameter of this model, because it"
                " divides none of their axes; every device would hold all of them:\n "
                f" {listed}\nChoose a mesh.{name} that divides them, or leave it at 1."
            )
    sizes = {path: human_bytes(4 * math.prod(spec.shape)) for path, spec in rows(specs).items()}
    return [
        f"{path}, {sizes[path]}, is not split along {', '.join(found)}"
        for path, found in whole.items()
    ]
