"""Grouped products: every kernel is plain NumPy, forward and backward, on every device that can be
had here. Kernels of Pallas are interpreted on a CPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from products import fewest, slow_but

from jaxformer.files import ConfigError
from jaxformer.layers import grouped_pallas
from jaxformer.layers.grouped import GROUPED_KERNELS, PREFERRED_KERNELS, GroupedRows
from jaxformer.layers.kernels import Needs, missing
from jaxformer.runs.kernel_check import uneven_sizes
from jaxformer.runs.resolve import kernel_of_experts

# Rows, depth, width, and the sizes of groups: odd ones, empty groups first, last and between, rows
# of no group, one group, fewer rows than a tile, no row in a group, more groups than rows, and
# groups that begin and end within tiles of 128 rows.
CASES = {
    "odd": (37, 20, 36, (5, 0, 11, 9)),
    "over tiles": (300, 130, 70, (0, 150, 1, 100, 0)),
    "one group": (16, 8, 8, (16,)),
    "few rows": (5, 16, 16, (0, 3)),
    "full": (260, 40, 200, (130, 130)),
    "all empty": (40, 16, 16, (0, 0)),
    "many groups": (12, 8, 24, (1,) * 7 + (0,) * 9 + (2,) * 2),
}
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def expected(x, w, dy, sizes):
    """The product and the gradients of x and w, group by group."""
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows] = x[rows] @ w[group], dy[rows] @ w[group].T
        dw[group] = x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


def arrays_of(m, depth, width, sizes, seed=0):
    """x, w and dy, whose rows of no group are NaN."""
    rng = np.random.default_rng(seed)
    shapes = ((m, depth), (len(sizes), depth, width), (m, width))
    x, w, dy = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan
    return x, w, dy


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(kernel, x, w, dy, sizes):
    y, back = jax.vjp(GroupedRows(jnp.asarray(sizes, jnp.int32), kernel).product, x, w)
    return y, *back(dy)


def assert_close(computed, reference, tolerance):
    for a, b in zip(computed, reference, strict=True):
        a = np.asarray(a, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))


PRODUCTS = [
    (kernel, case, dtype)
    for kernel in GROUPED_KERNELS
    for case, dtype in (*((case, jnp.float32) for case in CASES), ("over tiles", jnp.bfloat16))
]
MOST_USED = fewest(PRODUCTS, 1)
PALLAS = [row for row in PRODUCTS if row[0] in ("gpu", "tpu") and row not in MOST_USED]


@pytest.mark.parametrize("kernel, case, dtype", [*MOST_USED, *slow_but(PALLAS)])
def test_a_kernel_is_plain_numpy_and_gives_0_for_rows_of_no_group(kernel, case, dtype):
    *_, sizes = CASES[case]
    x, w, dy = arrays_of(*CASES[case])
    cast = (jnp.asarray(array, dtype) for array in (x, w, dy))
    computed = with_gradients(kernel, *cast, np.array(sizes))
    assert all(array.dtype == dtype for array in computed)
    assert_close(computed, expected(x, w, dy, sizes), TOLERANCES[dtype])
    for rows in computed[:2]:
        assert not np.asarray(rows[sum(sizes) :]).any()
    for group in np.flatnonzero(np.asarray(sizes) == 0):
        assert not np.asarray(computed[2][group]).any()


@pytest.mark.parametrize("kernel", slow_but(GROUPED_KERNELS, "loop", "tpu"))
def test_vmap_over_gradients(kernel):
    m, depth, width, sizes = CASES["odd"]
    both_sizes = np.array([sizes, (0, 30, 0, 2)], np.int32)
    cases = [arrays_of(m, depth, width, one, seed) for seed, one in enumerate(both_sizes)]
    x, w, dy = (np.stack(arrays) for arrays in zip(*cases, strict=True))
    computed = jax.jit(jax.vmap(functools.partial(with_gradients, kernel)))(x, w, dy, both_sizes)
    for index, one in enumerate(both_sizes):
        reference = expected(*cases[index], one)
        assert_close([array[index] for array in computed], reference, 1e-5)


def test_the_reference_has_forward_mode_derivatives():
    *_, sizes = CASES["odd"]
    x, w, dy = (jnp.nan_to_num(array) for array in arrays_of(*CASES["odd"]))
    groups = GroupedRows(jnp.asarray(sizes), "xla")
    y, dy_of = jax.jvp(groups.product, (x, w), (2 * x, w))
    np.testing.assert_allclose(dy_of, 3 * y, rtol=1e-5, atol=1e-5)
    second = jax.jvp(jax.grad(lambda x: jnp.vdot(dy, groups.product(x, w))), (x,), (x,))[1]
    assert not np.asarray(second).any()


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_blocks_that_do_not_divide_an_axis(kernel, monkeypatch):
    """Several blocks along the depth and the width, the last of them partly outside."""
    monkeypatch.setattr(grouped_pallas, "VECTOR_MEMORY", 700_000)
    monkeypatch.setattr(grouped_pallas, "TILES_OF_GROUP", 1)
    sizes = (100, 0, 57, 90)
    x, w, dy = arrays_of(261, 300, 310, sizes)
    computed = with_gradients(kernel, x, w, dy, np.array(sizes))
    assert_close(computed, expected(x, w, dy, sizes), 1e-5)


def test_blocks_of_a_tpu_fit_and_read_a_matrix_once_where_they_can():
    shapes = itertools.product((64, 4096, 131_072), (100, 2048, 7168), (64, 1408, 14_336), (1, 64))
    for m, k, n, groups in shapes:
        for itemsize, tiles_of in itertools.product(
            (2, 4), (grouped_pallas.product_tiles, grouped_pallas.outer_tiles)
        ):
            rows, depth, width = tiles_of(m, k, n, groups, itemsize)
            assert rows % 16 == 0 and 16 <= rows <= 512
            assert all(a % 128 == 0 or a == b for a, b in ((depth, k), (width, n)))
            assert itemsize * (rows * depth + depth * width) <= grouped_pallas.VECTOR_MEMORY
    rows, depth, width = grouped_pallas.product_tiles(32_768, 2048, 5632, 8, 2)
    assert depth == 2048 and 5632 % width == 0
    # At the borders of groups a tile is computed twice.
    assert 8 * rows <= 0.1 * 32_768


@pytest.mark.parametrize(
    "kernel, target, call, device",
    [
        (
            "gpu",
            "cuda",
            "__gpu$xla.gpu.triton",
            AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu"),
        ),
        ("tpu", "tpu", "tpu_custom_call", AbstractDevice("TPU v5 lite", 1, platform="tpu")),
    ],
)
def test_a_kernel_lowers_for_its_platform(kernel, target, call, device):
    """Three products, without a device."""
    m, depth, width, sizes = CASES["over tiles"]
    shapes = ((m, depth), (len(sizes), depth, width), (m, width))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    groups = jax.ShapeDtypeStruct((len(sizes),), jnp.int32)
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(functools.partial(with_gradients, kernel))
        lowered = step.trace(*arrays, groups).lower(lowering_platforms=(target,))
    assert lowered.as_text().count(f"@{call}") == 3


def test_auto_takes_the_first_kernel_that_runs_and_says_why_not_another():
    every = {
        platform: kernel_of_experts("auto", Needs(platform))[0] for platform in PREFERRED_KERNELS
    }
    assert every == {"cpu": "loop", "gpu": "gpu", "tpu": "tpu"}
    name, text = kernel_of_experts("auto", Needs("gpu", (7, 5)))
    assert name == "loop"
    assert text.endswith("; not gpu: it needs compute capability 8.0, and this device has 7.5")
    failed = {"tpu": "its check failed", "ragged": "so did its"}
    name, text = kernel_of_experts("auto", Needs("tpu"), failed)
    assert name == "loop"
    assert text.endswith("; not tpu: its check failed; not ragged: so did its")
    failed = dict.fromkeys(GROUPED_KERNELS, "failed")
    with pytest.raises(ConfigError, match=r"experts\.kernel.*no kernel runs here"):
        kernel_of_experts("auto", Needs("cpu"), failed)
    assert kernel_of_experts("auto", Needs("cpu"), {"loop": "failed"})[0] == "xla"


def test_a_kernel_of_another_platform_is_one_message():
    with pytest.raises(ConfigError) as caught:
        kernel_of_experts("tpu", Needs("cpu"))
    assert str(caught.value) == (
        "model.experts.kernel='tpu' cannot run here: it needs a TPU, and this device is a cpu."
        " Choose 'auto' or 'xla' or 'loop' or 'ragged'."
    )
    assert kernel_of_experts("ragged", Needs("cpu")) == (
        "ragged",
        "ragged (XLA's ragged product), as asked",
    )


def test_every_platform_prefers_rows_of_the_table_that_it_can_run():
    for platform, names in PREFERRED_KERNELS.items():
        assert not any(missing(GROUPED_KERNELS[name].lacks, Needs(platform)) for name in names)


def test_sizes_of_the_check_are_uneven_with_an_empty_group_and_rows_of_none():
    for rows, experts in itertools.product((64, 1000), (1, 2, 8)):
        sizes = uneven_sizes(rows, experts)
        assert len(sizes) == experts and rows // 2 < sizes.sum() <= rows - rows // 8
        if experts > 1:
            assert (sizes == 0).sum() >= 1
    assert len({*uneven_sizes(1000, 8)}) == 8
