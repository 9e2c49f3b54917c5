"""The check of the kernel of experts before the first step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.layers.grouped import GROUPED_KERNELS
from jaxformer.layers.kernels import KERNELS
from jaxformer.runs import kernel_check
from jaxformer.runs.kernel_check import check_experts, prove_experts, with_proven_kernel
from jaxformer.runs.resolve import resolve_without_data

LOOP = GROUPED_KERNELS["loop"]
ROWS, WEIGHTS = 100, (5, 16, 24)


def resolved(kernel="auto", mesh=None, **changes):
    model = {
        "vocab_size": 64,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "d_ff": 64,
        "feed_forward": "experts",
        "experts.n": 4,
        "experts.per_token": 2,
        "experts.kernel": kernel,
    }
    run = jf.RunConfig(
        model=with_settings(ModelConfig(), model | changes),
        data=jf.config.DataConfig(sequence_length=32),
        train=jf.config.TrainConfig(batch_size=8),
    )
    return resolve_without_data(run, mesh or make_mesh(devices=jax.devices()[:1]))[0]


def a_wrong_product(x, w, sizes, transposed):
    return LOOP.product(x, w, sizes, transposed) * (0.99 if transposed else 1)


def a_wrong_outer(x, dy, sizes):
    """It reads the rows of no group."""
    return LOOP.outer(x, dy, sizes.at[-1].add(1))


def a_refused_product(x, w, sizes, transposed):
    raise NotImplementedError("Unsupported shape.\nMore of it.")


@pytest.fixture
def as_loop(monkeypatch):
    """Puts another row in the table; JAX keeps backward passes that it has traced."""

    def replace(row):
        monkeypatch.setitem(GROUPED_KERNELS, "loop", row)
        jax.clear_caches()

    yield replace
    jax.clear_caches()


WRONG = {
    "dx": (LOOP._replace(product=a_wrong_product), r"in float32: relative errors .*dx 1.0e-02"),
    "dw": (LOOP._replace(outer=a_wrong_outer), "dw inf, .*allowed 0.0002"),
    "refused": (LOOP._replace(product=a_refused_product), "Unsupported shape"),
}


@pytest.mark.parametrize("kernel", [name for name in GROUPED_KERNELS if name != "xla"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_every_kernel_passes(kernel, dtype):
    assert check_experts(kernel, ROWS, WEIGHTS, jnp.dtype(dtype)).startswith("error ")


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_fails(fault, as_loop):
    row, why = WRONG[fault]
    as_loop(row)
    with pytest.raises(RuntimeError, match=why):
        check_experts("loop", ROWS, WEIGHTS, jnp.float32)


def test_a_run_takes_the_next_kernels_where_its_own_fail_their_checks(as_loop, monkeypatch):
    """A kernel of attention that has failed is not taken again when that of experts fails."""
    lines, auto = [], resolved()
    assert auto.model.experts.kernel == "loop"
    assert with_proven_kernel(auto, lines.append) is auto
    assert lines.pop().startswith("The kernel of experts loop was checked against float32 on 512")
    attention = lines.pop()
    as_loop(WRONG["refused"][0])
    proven = with_proven_kernel(auto, lines.append)
    assert proven.model == with_settings(auto.model, {"experts.kernel": "xla"})
    assert proven.asked == auto.asked and lines[0] == attention
    assert "experts: xla (" in lines[1] and "\n" not in lines[1] and len(lines) == 2
    assert "; not loop: its check on this device failed: " in lines[1]
    with pytest.raises(RuntimeError, match="Unsupported shape"):
        with_proven_kernel(resolved("loop"), lines.append)

    def fails(q, k, v, mask):
        raise NotImplementedError("refused")

    monkeypatch.setitem(KERNELS, "blocked", dataclasses.replace(KERNELS["blocked"], run=fails))
    model = with_proven_kernel(auto, lines.append).model
    assert (model.attention.kernel, model.experts.kernel) == ("xla", "xla")


def test_two_runs_of_a_program_have_to_be_the_same(as_loop):
    runs = iter((0.0, 1e-6))

    def product(x, w, sizes, transposed):
        shift = jax.pure_callback(
            lambda: jnp.float32(0 if transposed else next(runs, 0.0)),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
        return LOOP.product(x, w, sizes, transposed) + shift

    as_loop(LOOP._replace(product=product))
    with pytest.raises(RuntimeError, match="two runs of one program differ"):
        check_experts("loop", ROWS, WEIGHTS, jnp.float32)


def test_the_check_has_the_shapes_of_a_device_and_less_where_they_are_large(monkeypatch):
    shapes = []

    def check(name, rows, weights, dtype):
        shapes.append((rows, *weights))
        return ""

    monkeypatch.setattr(kernel_check, "check_experts", check)
    prove_experts(resolved())
    monkeypatch.setattr(kernel_check, "REFERENCE_PRODUCTS", {"cpu": 4 * 32 * 64 * 100})
    prove_experts(resolved())
    monkeypatch.setattr(kernel_check, "WEIGHT_BYTES", 3 * 4 * 32 * 64)
    prove_experts(resolved())
    assert shapes == [(8 * 32 * 2, 4, 32, 64), (100, 4, 32, 64), (133, 3, 32, 64)]


def test_a_model_without_experts_and_the_reference_are_not_checked():
    assert prove_experts(resolved("xla")) == ""
    dense = resolved(feed_forward="ffn", **{"experts.n": 0, "experts.per_token": 2})
    assert prove_experts(dense) == ""
