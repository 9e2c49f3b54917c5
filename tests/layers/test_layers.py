"""The layers alone, each against its formula written out in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import MODELS, model

import jaxformer as jf
from jaxformer import layers
from jaxformer.arrays.params import Spec, check_params, rows, unstack, zeros
from jaxformer.config.settings import with_settings
from jaxformer.layers.ffn import ACTIVATIONS, ffn
from jaxformer.models.transformer import specs

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def test_rms_norm_divides_by_the_root_mean_square():
    x, scale = array(3, 5, 8), array(8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    found = layers.rms_norm(jnp.array(x), jnp.array(scale))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_layer_norm_centres_and_divides_by_the_deviation():
    x, scale, bias = 3 + array(3, 5, 8), array(8), array(8)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    for learned, wanted in (((scale, bias), expected), ((scale,), expected - bias)):
        found = layers.layer_norm(*map(jnp.array, (x, *learned)))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
def test_a_norm_has_the_slopes_of_its_formula(center):
    """Of x, forward, backward and twice, and of what it learns."""
    learned = (array(8), array(8)) if center else (array(8),)

    def formula(x, scale, bias=0):
        x = x - x.mean(-1, keepdims=True) if center else x
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale + bias

    norm = layers.layer_norm if center else layers.rms_norm
    x, weights, tangent = 1 + array(3, 8), array(3, 8), array(3, 8)

    def slopes(function):
        def total(x, *learned):
            return (weights * function(x, *learned)).sum()

        @jax.jit
        def every(x, *learned):
            _, along = jax.jvp(lambda x: function(x, *learned), (x,), (tangent,))
            gradient = jax.grad(total, argnums=range(1 + len(learned)))(x, *learned)
            return gradient, (along, jax.hessian(total)(x, *learned))

        return every(x, *learned)

    (slope, of_x), (expected, expected_of_x) = slopes(norm), slopes(formula)
    for a, b in zip(slope, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(of_x, expected_of_x, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_statistics_of_a_layer_norm_are_computed_before_its_gradients():
    """A compiler for GPUs would otherwise compute them again in each kernel that reads them."""
    x, ones = jnp.ones((5, 8)), jnp.ones(8)

    def total(x, scale, bias):
        return jnp.square(layers.layer_norm(x, scale, bias)).sum()

    forward, backward = (
        str(jax.make_jaxpr(function)(x, ones, ones)) for function in (total, jax.grad(total))
    )
    assert "optimization_barrier" not in forward
    assert backward.count("optimization_barrier") == 1


@pytest.mark.parametrize("norm", [layers.rms_norm, layers.layer_norm])
def test_a_norm_of_bfloat16_is_computed_in_float32(norm):
    x = jnp.array(1000 + array(4, 64), jnp.bfloat16)
    exact = norm(x.astype(jnp.float32), jnp.ones(64))
    assert norm(x, jnp.ones(64)).dtype == jnp.bfloat16
    np.testing.assert_allclose(
        norm(x, jnp.ones(64)).astype(jnp.float32), exact, rtol=2**-8, atol=2**-8
    )


def erf(x):
    return np.vectorize(math.erf)(x)


FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "glu": lambda x: 1 / (1 + np.exp(-x)),
    "swiglu_clamped": lambda x: np.minimum(x, 7) / (1 + np.exp(-1.702 * np.minimum(x, 7))),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
FORMULAS |= {gated: FORMULAS[of] for gated, of in GATED.items()}


@pytest.mark.parametrize("on", ["cpu", "gpu"])
def test_gelu_tanh_and_its_slopes_are_the_formula_on_every_platform(on, monkeypatch):
    monkeypatch.setattr("jaxformer.layers.ffn.platform", lambda: on)
    x = np.linspace(-8, 8, 1001)
    formula, gelu_tanh = FORMULAS["gelu_tanh"], ACTIVATIONS["gelu_tanh"]
    slopes = jax.vmap(jax.grad(gelu_tanh))
    expected = (formula(x + 1e-5) - formula(x - 1e-5)) / 2e-5
    np.testing.assert_allclose(gelu_tanh(jnp.float32(x)), formula(x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slopes(jnp.float32(x)), expected, atol=1e-5)
    assert (" tanh " in str(jax.make_jaxpr(slopes)(x))) == (on == "cpu")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_feed_forward_is_its_formula(name):
    config = model("llama", activation=name)
    x, up, gate, down = array(2, 3, 32), array(32, 40), array(32, 40), array(40, 32)
    factor = np.clip(x @ up, -7, 7) + 1 if name == "swiglu_clamped" else x @ up
    hidden = FORMULAS[name](x @ gate) * factor if config.gated else FORMULAS[name](x @ up)
    params = {"up": up, "down": down} | ({"gate": gate} if config.gated else {})
    found = ffn(params, config, jnp.array(x))
    np.testing.assert_allclose(found, hidden @ down, rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_the_slope_of_its_formula(name):
    x = np.linspace(-6, 6, 41) + 0.013
    slope = (FORMULAS[name](x + 1e-5) - FORMULAS[name](x - 1e-5)) / 2e-5
    found = jax.vmap(jax.grad(ACTIVATIONS[name]))(jnp.array(x, jnp.float32))
    np.testing.assert_allclose(found, slope, atol=2e-4)


def test_swiglu_is_the_gated_feed_forward_of_any_leading_shape():
    x, gate, up, down = array(2, 3, 8), array(8, 12), array(8, 12), array(12, 8)
    expected = (FORMULAS["silu"](x @ gate) * (x @ up)) @ down
    for rows_of_x, wanted in ((x, expected), (x[0, 0], expected[0, 0])):
        found = layers.swiglu(*map(jnp.array, (rows_of_x, gate, up, down)))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_has_a_row_and_every_row_a_leaf(name):
    config = model(name)
    params = jf.init(config, jax.random.key(0))
    check_params(specs(config), params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    # A model whose layers differ has a stack for each kind of layer.
    first = "" if "attention" in params["blocks"] else "0."
    del (params["blocks"]["0"] if first else params["blocks"])["attention"]["q"]
    params["extra"] = jnp.zeros(3)
    params["embed"]["tokens"] = params["embed"]["tokens"][1:]
    with pytest.raises(jf.ConfigError) as error:
        check_params(specs(config), params)
    assert all(
        said in str(error.value)
        for said in (f"blocks.{first}attention.q: missing", "extra: (3,)", "embed.tokens: (60, 32)")
    )


def test_unstacked_layers_are_the_slices_and_their_gradient_is_stacked():
    stacked = {"w": jnp.array(array(3, 4, 5))}
    for i, layer in enumerate(unstack(stacked)):
        np.testing.assert_array_equal(layer["w"], stacked["w"][i])

    def weighted(stacked):
        return sum((i + 1) * layer["w"].sum() for i, layer in enumerate(unstack(stacked)))

    expected = np.broadcast_to(np.array([1, 2, 3])[:, None, None], (3, 4, 5))
    np.testing.assert_array_equal(jax.grad(weighted)(stacked)["w"], expected)


def test_gpt2_weights_have_deviation_002_and_residual_ones_are_scaled_by_depth():
    sizes = dict(vocab_size=500, d_model=128, n_layers=8, n_heads=4)
    config = with_settings(
        jf.ModelConfig(), {**sizes, "bias": "all", "norm": "layer", "activation": "gelu"}
    )
    params = jf.init(config, jax.random.key(0))
    for path, spec in rows(specs(config)).items():
        leaf = params
        for name in path.split("."):
            leaf = leaf[name]
        leaf = np.asarray(leaf)
        std = float(leaf.std())
        if not spec.is_matrix:
            assert (leaf == (1 if path.endswith("scale") else 0)).all(), path
        elif path.split(".")[-1] in ("down",) or path.endswith("attention.out"):
            assert abs(std - 0.02 / math.sqrt(16)) < 0.0005, path
        else:
            assert abs(std - 0.02) < 0.001, path


def test_truncated_normal_has_variance_2_over_the_sum_of_widths_and_is_cut_at_three_sigma():
    sizes = dict(vocab_size=500, d_model=96, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=200)
    config = with_settings(jf.ModelConfig(), {**sizes, "init": "truncated_normal"})
    blocks = jf.init(config, jax.random.key(0))["blocks"]
    widths = {"q": (96, 96), "k": (96, 48), "out": (96, 96)}
    for name, (d_in, d_out) in widths.items():
        leaf, std = np.asarray(blocks["attention"][name]), math.sqrt(2 / (d_in + d_out))
        # The cut takes 1.3 % of the deviation.
        assert abs(float(leaf.std()) / std - 0.9866) < 0.02, name
        assert 2.9 * std < float(np.abs(leaf).max()) <= 3 * std, name
    assert abs(float(np.asarray(blocks["ffn"]["down"]).std()) / math.sqrt(2 / 296) - 0.9866) < 0.02


def test_fan_in_is_named_by_axis_so_stacking_and_splitting_heads_change_nothing():
    flat = Spec((32, 64), ("embed", "mlp"), zeros, inputs=("embed",))
    heads = Spec(
        (5, 4, 8, 64), ("layers", "heads", "head_dim", "embed"), zeros, inputs=("heads", "head_dim")
    )
    assert (flat.fan_in, flat.fan_out) == (heads.fan_in, heads.fan_out) == (32, 64)


def test_a_leaf_starts_the_same_whatever_else_is_in_the_table():
    def start(activation, seed):
        config = model("llama", activation=activation)
        return np.asarray(jf.init(config, jax.random.key(seed))["blocks"]["attention"]["q"])

    np.testing.assert_array_equal(start("swiglu", 0), start("relu", 0))
    assert (start("swiglu", 1) != start("swiglu", 0)).all()
