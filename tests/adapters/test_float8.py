"""Products in 8 bits: the codes, the loss and gradient of a model beside its own dtype, the leaves
that take part, and what is refused."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from families import SIZES, params_of
from forced_devices import on_eight_devices
from shapes import model, strong, tokens
from tiny_run import PLAIN, line, train_here, write_text
from tiny_run import params_of as saved_params

import jaxformer as jf
from jaxformer.adapters.float8 import Float8, coded, in_8_bits, product
from jaxformer.adapters.low_rank import LowRank
from jaxformer.arrays.params import dotted, is_custom, rows
from jaxformer.config.settings import with_settings
from jaxformer.models.remat import recomputed
from jaxformer.runs.resolve import resolve_without_data

TOKENS = jnp.asarray(tokens(rows=4))
BATCH = {"tokens": TOKENS, "targets": TOKENS[:, ::-1], "weights": jnp.ones(TOKENS.shape)}


def slope(params, config, products, batch=BATCH):
    """The mean loss, and its gradient."""
    loss = jf.loss_of("causal", config, products=products)

    def mean(params):
        total, weight = loss(params, batch, jax.random.key(0))["loss"]
        return total / weight

    return jax.jit(jax.value_and_grad(mean))(params)


def apart(a, b):
    """The norm of the difference of two trees, as a fraction of that of the first."""
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(a))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [1.0, 3e-12, 7e11])
def test_codes_are_those_of_the_standard_with_the_power_of_two_that_just_holds_the_largest(
    dtype, size
):
    x = np.random.default_rng(1).standard_normal((32, 48)).astype(np.float32) * size
    codes, scale = jax.jit(coded, static_argnums=1)(x, dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    assert np.frexp(scale)[0] == 0.5
    assert largest / 2 <= np.abs(x).max() / scale <= largest
    np.testing.assert_array_equal(codes, (x / scale).astype(dtype))
    # Three or two bits of mantissa, where numbers are not so small that bits are missing.
    rounding = 2.0 ** -(4 if dtype == "float8_e4m3fn" else 3)
    large = np.abs(x) > np.abs(x).max() / 1000
    error = np.abs(np.asarray(codes, np.float32) * scale / x - 1)[large]
    assert rounding / 2 < error.max() <= rounding


def test_an_array_of_zeros_is_one_of_zeros_and_what_is_not_finite_stays_so():
    zeros = jnp.zeros((4, 4))
    assert not product("AB,BC->AC", zeros, zeros + 1).any()
    for bad in (jnp.inf, jnp.nan):
        found = product("AB,BC->AC", zeros.at[1, 2].set(bad), zeros + 1)
        assert not jnp.isfinite(found[1]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_and_both_of_its_gradients_are_those_of_the_rounded_arrays(dtype):
    rng = np.random.default_rng(2)
    x, w, g = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((2, 8, 16), (16, 4, 6), (2, 8, 4, 6))
    )

    def rounded(array, codes="float8_e4m3fn"):
        codes, scale = coded(array, codes)
        return np.asarray(codes, np.float32) * np.asarray(scale)

    y, transposed = jax.vjp(lambda x, w: product("BTD,DNH->BTNH", x, w), x, w)
    gradient = rounded(g, "float8_e5m2")
    expected = (
        np.einsum("BTD,DNH->BTNH", rounded(x), rounded(w)),
        np.einsum("BTNH,DNH->BTD", gradient, rounded(w)),
        np.einsum("BTD,BTNH->DNH", rounded(x), gradient),
    )
    for found, wanted in zip((y, *transposed(g)), expected, strict=True):
        assert found.dtype == dtype
        tolerance = 1e-6 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(
            np.asarray(found, np.float32), wanted, atol=tolerance * np.abs(wanted).max(), rtol=0
        )


@pytest.mark.parametrize(("remat", "maxima"), [("none", 4), ("full", 5)])
def test_the_backward_pass_reads_the_codes_of_the_forward_pass(remat, maxima):
    """An array is coded once, by one maximum; again only where a layer does not keep its codes,
    which of weights it keeps on a GPU alone."""
    x, w = jnp.ones((8, 16)), jnp.ones((16, 4))

    def total(x, w):
        return product("TD,DF->TF", x, w).sum()

    layer = recomputed(total, model("gpt2", remat=remat), scanned=False)
    for run, expected in ((total, 3), (layer, maxima)):
        program = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(x, w))
        assert program.count("= reduce_max[") == expected


RECURRENT = "recurrent layers"
NEAR = ["llama", "gpt2", "experts in groups after a dense layer", RECURRENT]


@pytest.mark.parametrize("name", NEAR)
def test_the_loss_and_the_gradient_are_near_those_of_the_dtype_and_the_same_in_each_loop(name):
    config = model("llama", layer_pattern="dm") if name == RECURRENT else model(name)
    params = strong(jf.init(config, jax.random.key(0)), size=0.05)
    loss, gradient = slope(params, config, "dtype")
    rounded_loss, rounded_gradient = slope(params, config, "fp8")
    assert 0 < abs(loss - rounded_loss) < 0.01
    assert 0.01 < apart(gradient, rounded_gradient) < 0.2
    # The loops and what they store are those of any model.
    for changes in ({"layer_loop": "scan"}, {"remat": "full"}, {"remat": "dots"}):
        if name != "gpt2":
            break
        again = slope(params, with_settings(config, changes), "fp8")
        # A number at the border of two codes may be rounded to either.
        assert abs(again[0] - rounded_loss) < 1e-4
        assert apart(rounded_gradient, again[1]) < 0.01
    sixteen = with_settings(config, {"dtype": "bfloat16"})
    plain, short = slope(params, sixteen, "dtype"), slope(params, sixteen, "fp8")
    assert 0 < abs(plain[0] - short[0]) < 0.01
    assert 0.01 < apart(plain[1], short[1]) < 0.2


def test_the_matrices_of_the_layers_take_part_and_nothing_else():
    config = model("experts in groups after a dense layer")
    params = in_8_bits(jf.init(config, jax.random.key(0)), jf.specs(config))
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_custom)
    inside = {dotted(path) for path, leaf in leaves if isinstance(leaf, Float8)}
    specs = rows(jf.specs(config))
    outside = {path.split(".")[-1] for path, spec in specs.items() if path not in inside}
    matrices = {path for path, spec in specs.items() if spec.is_matrix}
    of_experts = {path for path in matrices if "experts" in specs[path].axes}
    assert of_experts and outside >= {"router", "tokens"}
    left = {path for path in matrices - inside - of_experts if "layers" in specs[path].axes}
    assert {path.split(".")[-1] for path in left} == {"router"}


def test_below_an_adapter_it_is_the_frozen_matrix_and_the_factors_learn():
    config = model("llama")
    params = strong(jf.init(config, jax.random.key(0)), size=0.05)
    lora = jf.LoRA(rank=2, targets=("attention", "ffn"))
    adapted = jf.adapt(params, config, lora, jax.random.key(1))
    mask = jf.adapter_mask(adapted)
    adapted = jax.tree.map(lambda learns, leaf: leaf + 0.01 if learns else leaf, mask, adapted)
    leaf = in_8_bits(adapted, jf.specs(config))["blocks"]["attention"]["q"]
    assert isinstance(leaf, LowRank) and isinstance(leaf.weight, Float8)
    (loss, plain), (rounded, found) = (
        slope(adapted, config, products) for products in ("dtype", "fp8")
    )
    assert 0 < abs(loss - rounded) < 0.01
    learned = [
        [leaf for leaf, learns in zip(*map(jax.tree.leaves, (each, mask)), strict=True) if learns]
        for each in (plain, found)
    ]
    assert 0.005 < apart(*learned) < 0.2
    optimizer = optax.sgd(0.1)
    state = jf.init_state(adapted, optimizer, trainable=mask)
    step = jf.make_step(
        jf.loss_of("causal", config, products="fp8"), optimizer, trainable=mask, microbatches=2
    )
    after, metrics = step(state, BATCH)
    assert jnp.isfinite(metrics["loss"]) and after.frozen


def test_a_product_has_a_second_derivative_as_sophia_asks_for():
    w = jax.random.normal(jax.random.key(0), (6, 6))

    def energy(w, product=product):
        return jnp.sum(jnp.tanh(product("AB,BC->AC", w, w)) ** 2)

    def exact(w):
        return energy(w, lambda equation, x, w: jnp.einsum(equation, x, w))

    def curvature(f):
        return jax.vjp(jax.grad(f), w)[1](w)[0]

    assert apart(curvature(exact), curvature(energy)) < 0.2


def test_what_cannot_be_is_refused_by_name():
    config = with_settings(jf.ModelConfig(), SIZES)
    params = params_of(config)
    for products, objective, message in (
        ("fp9", "causal", r"products='fp9' is not one of dtype, fp8"),
        ("fp8", "dpo", r"train\.products=fp8: the objective 'dpo' compares .* set it to dtype"),
    ):
        with pytest.raises(jf.ConfigError, match=message):
            jf.loss_of(objective, config, products=products)
    with pytest.raises(jf.ConfigError, match=r"fp8: the layers have no matrix .* set it to dtype"):
        in_8_bits(jf.quantize(params, "nf4"), jf.specs(config))
    axes = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axes,))
    with jax.set_mesh(mesh), pytest.raises(jf.ConfigError, match="axes are automatic"):
        jf.loss_of("causal", config, products="fp8")(
            params, BATCH | {"tokens": TOKENS % 37, "targets": TOKENS % 37}, None
        )


@pytest.mark.slow
def test_a_run_trains_by_it_evaluates_without_and_continues_bitwise(tmp_path: Path):
    text = write_text(tmp_path / "text.txt")
    changes = PLAIN | {"train.products": "fp8", "train.steps": 8, "optimizer.decay_steps": 8}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_here(line(whole, text, changes)) == 0
    assert train_here(line(parts, text, changes | {"train.steps": 4})) == 0
    assert train_here(line(parts, text, changes)) == 0
    for resumed, uninterrupted in zip(saved_params(parts), saved_params(whole), strict=True):
        np.testing.assert_array_equal(resumed, uninterrupted)
    run = jf.load_config(Path("configs/gpt2_124m.py"), ["train.products=fp8", "model.n_layers=2"])
    resolved, batch = resolve_without_data(run, jf.make_mesh())
    assert "f8_e4m3fn" in str(jax.make_jaxpr(resolved.loss)(resolved.target.params, batch, None))
    assert "products" not in resolved.loss_options


@pytest.mark.xdist_group("eight devices")
def test_a_step_on_a_mesh_is_that_of_one_device():
    for case, found in on_eight_devices("float8_devices.py").items():
        # Sums in another order may send a number at the border of two codes to the other.
        assert found["loss"] < 1e-4, case
        assert found["change"] < 1e-3, case
