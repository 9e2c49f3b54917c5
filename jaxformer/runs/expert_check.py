"""The check of the kernel of experts: its products and gradients on the devices of a run, against
float32."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxformer.arrays.sharding import ACTIVATION_RULES, free_axes, platform
from jaxformer.layers.grouped import GROUPED_KERNELS, GroupedRows
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.resolve import Resolved
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import on_mesh

# The check takes fewer experts where their weights in float32 would exceed this, and fewer rows
# where the reference, which multiplies all rows by all experts, would add up more products.
WEIGHT_BYTES = 2**31
REFERENCE_PRODUCTS = {"cpu": 2**32, "gpu": 2**40, "tpu": 2**40}
# The largest error of a kernel, relative to the largest element of the reference. Only a CPU
# multiplies float32 without rounding by default.
FLOAT32, ROUNDED = 2e-4, 3e-2
OF_PRODUCT = ("output", "dx", "dw")


class ExpertShape(NamedTuple):
    """Rows [M, D], and matrices [E, D, F]."""

    rows: int
    depth: int
    width: int
    experts: int


def prove_experts(resolved: Resolved) -> str:
    """Checks the kernel of the experts that a run takes, on its mesh and on the shapes of a device.
    Returns a sentence about it, empty for the reference and a model without experts. Raises
    RuntimeError if the kernel is wrong."""
    model = resolved.model
    name = model.expert_kernel
    if model.feed_forward != "experts" or name == "xla":
        return ""
    shape = checked_shape(resolved)
    with on_mesh(resolved.mesh):
        errors = check_experts(name, shape, compute_dtype(model))
    rows = f"{shape.rows:,} rows"
    return f"The kernel of experts {name} was checked against float32 on {rows}: {errors}."


def checked_shape(resolved: Resolved) -> ExpertShape:
    """The shape of the products of a device in a step, made smaller where the reference would be
    too large."""
    model, train, sizes = resolved.model, resolved.run.train, resolved.mesh.shape
    experts, depth, width = model.n_experts, model.d_model, model.expert_width
    experts //= sizes["expert"] if experts % sizes["expert"] == 0 else 1
    width //= sizes["tensor"] if width % sizes["tensor"] == 0 else 1
    tokens = train.batch_size // train.n_microbatches * resolved.length
    for axis in (*ACTIVATION_RULES["batch"], *ACTIVATION_RULES["sequence"]):
        tokens = -(-tokens // sizes[axis])
    rows = tokens * model.experts_per_token
    experts = min(experts, max(WEIGHT_BYTES // (4 * depth * width), 2))
    most_rows = REFERENCE_PRODUCTS[platform(resolved.mesh)] // (experts * depth * width)
    return ExpertShape(min(rows, max(most_rows, 8 * experts)), depth, width, experts)


def uneven_sizes(rows: int, experts: int) -> np.ndarray:
    """Sizes int32 [E] of groups that grow, the middle one empty, and an eighth of the rows in
    none."""
    shares = np.arange(1, experts + 1)
    if experts > 1:
        shares[experts // 2] = 0
    return ((rows - -(-rows // 8)) * shares // shares.sum()).astype(np.int32)


def check_experts(name: str, shape: ExpertShape, dtype: Any) -> str:
    """Compares the products of a kernel with the reference, forward and backward, into the hidden
    width and out of it, on every device of the current mesh; returns the largest errors as text.

    Rows of no group are NaN. The program runs twice, since a compiler may schedule the first run of
    one wrongly. Raises RuntimeError where the errors exceed what the rounding of the dtype
    explains, or where the two runs differ.
    """
    worst = dict.fromkeys(OF_PRODUCT, 0.0)
    for case in (shape, shape._replace(depth=shape.width, width=shape.depth)):
        arrays = _on_each_device(functools.partial(_inputs, case, dtype))()
        compute = _on_each_device(functools.partial(_with_gradients, name))
        first, second = compute(*arrays), compute(*arrays)
        errors, differ = jax.device_get(_on_each_device(_errors)(first, second, *arrays))
        if differ:
            raise RuntimeError(
                f"expert kernel {name!r} is wrong on this device: two runs of one program differ."
                " Choose model.expert_kernel=xla, and report it."
            )
        # A NaN is kept.
        worst |= {key: float(np.maximum(worst[key], errors[key])) for key in errors}
    dtype = jnp.dtype(dtype)
    exact = dtype == jnp.float32 and platform() == "cpu"
    allowed = FLOAT32 if exact else ROUNDED
    if not all(error <= allowed for error in worst.values()):  # a NaN fails too
        stated = ", ".join(f"{key} {error:.1e}" for key, error in worst.items())
        raise RuntimeError(
            f"expert kernel {name!r} is wrong on this device for {shape.rows} rows of {shape.depth}"
            f" and {shape.experts} experts of {shape.width} in {dtype}: relative errors {stated},"
            f" allowed {allowed:g}. Choose model.expert_kernel=xla, and report it."
        )
    return f"error {worst['output']:.0e} forward, {max(worst['dx'], worst['dw']):.0e} backward"


def _on_each_device(function: Any) -> Any:
    """The function compiled, with every device of the mesh computing all of it: a compiler cannot
    divide a Pallas kernel."""
    if axes := free_axes():
        spec = PartitionSpec()
        function = jax.shard_map(
            function, in_specs=spec, out_specs=spec, axis_names={*axes}, check_vma=False
        )
    return jax.jit(function, compiler_options=compiler_options())


def _inputs(shape: ExpertShape, dtype: Any) -> tuple[jax.Array, ...]:
    """Random rows [M, D], matrices [E, D, F] and a cotangent [M, F], and the sizes of groups."""
    rows, depth, width, experts = shape
    sizes = uneven_sizes(rows, experts)
    shapes = ((rows, depth), (experts, depth, width), (rows, width))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    x, w, dy = (jax.random.normal(key, one, dtype) for key, one in pairs)
    of_group = (jnp.arange(rows) < sizes.sum())[:, None]
    x, dy = (jnp.where(of_group, array, jnp.nan) for array in (x, dy))
    return x, w, dy, jnp.asarray(sizes)


def _with_gradients(
    name: str, x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array
) -> dict[str, jax.Array]:
    """The product and its gradients, by the names in OF_PRODUCT."""
    y, back = jax.vjp(GroupedRows(sizes, name).product, x, w)
    return dict(zip(OF_PRODUCT, (y, *back(dy)), strict=True))


def _errors(
    first: dict[str, jax.Array],
    second: dict[str, jax.Array],
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The errors by the names in OF_PRODUCT, each relative to the largest element of the reference,
    and whether two runs differ; the worst of all devices."""
    reference = GROUPED_KERNELS["xla"]
    with jax.default_matmul_precision("highest"):
        x, w, dy = (array.astype(jnp.float32) for array in (x, w, dy))
        outputs = (
            reference.product(x, w, sizes, False),
            reference.product(dy, w, sizes, True),
            reference.outer(x, dy, sizes),
        )
    errors = {
        key: largest(first[key].astype(jnp.float32) - b) / largest(b)
        for key, b in zip(OF_PRODUCT, outputs, strict=True)
    }
    same = [jnp.array_equal(first[key], second[key], equal_nan=True) for key in OF_PRODUCT]
    differ = 1 - jnp.stack(same).all().astype(jnp.int32)
    for axis in free_axes():
        errors, differ = jax.lax.pmax((errors, differ), axis)
    return errors, differ


def largest(x: jax.Array) -> jax.Array:
    """The largest magnitude, infinite where one is no number, which the maximum of a CPU skips."""
    return jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)))
