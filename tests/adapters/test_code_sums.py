"""Products of few rows from the codes of a quantized weight: those of its array but for rounding,
without making it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import params_of
from products import slow_but

import jaxformer as jf
from jaxformer.adapters import code_sums, quantized
from jaxformer.adapters.code_sums import MOST_ROWS
from jaxformer.adapters.output_major_codes import Int8Head, OutputMajorNF4
from jaxformer.adapters.quantized import to_int8, to_nf4
from jaxformer.arrays.params import Spec, contract, zeros
from jaxformer.config.settings import with_settings
from jaxformer.generation import weights

MAKERS = {"int8": to_int8, "nf4": to_nf4, "nf4_double": functools.partial(to_nf4, double=True)}
HEAD = Spec((50, 32), ("vocab", "embed"), zeros, inputs=("embed",))
each_kind = pytest.mark.parametrize("kind", MAKERS)


def normal(*shape, seed=1, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def leaf_of(kind, *shape, inputs=1):
    spec = Spec(shape, tuple("abc"[: len(shape)]), zeros, inputs=tuple("abc"[:inputs]))
    return MAKERS[kind](normal(*shape, seed=0), spec)


def products(pattern, x, leaf):
    """That with a leaf and that with its array, of a program for the platform of this moment."""
    return jax.jit(
        lambda x, leaf: (contract(pattern, x, leaf), contract(pattern, x, leaf.array()))
    )(x, leaf)


@each_kind
@pytest.mark.parametrize("rows", [1, MOST_ROWS])
def test_the_sums_are_those_of_the_array(kind, rows):
    found, expected = products("BTD,DNH->BTNH", normal(rows, 1, 32), leaf_of(kind, 32, 2, 64))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    leaf = leaf_of(kind, 2, 32, 64, inputs=2)
    found, expected = products("BTNH,NHD->BTD", normal(rows, 1, 2, 32), leaf)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@each_kind
def test_no_array_is_made_and_more_rows_make_one(kind):
    leaf = leaf_of(kind, 512, 512)

    def temporary(rows):
        product = jax.jit(lambda x, leaf: contract("BD,DF->BF", x, leaf))
        program = product.lower(jnp.ones((rows, 512)), leaf).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(1) < 512 * 512 < 4 * 512 * 512 <= temporary(MOST_ROWS + 1)


def total(x, w):
    return jnp.sin(contract("BD,DF->BF", x, w).astype(jnp.float32)).sum()


def of_both(derivative, x, leaf):
    """A derivative for a leaf, and for its array."""
    return jax.jit(lambda x, leaf: (derivative(x, leaf), derivative(x, leaf.array())))(x, leaf)


@each_kind
@pytest.mark.parametrize("derivative", [jax.grad(total), jax.hessian(total), jax.jacfwd(total)])
def test_derivatives_are_those_of_the_product_with_the_array(kind, derivative):
    found, expected = of_both(derivative, normal(2, 32), leaf_of(kind, 32, 64))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@each_kind
def test_derivatives_in_16_bits_have_the_dtype_of_the_sums(kind, accelerator):
    leaf = leaf_of(kind, 32, 64).astype(jnp.bfloat16)
    found, expected = of_both(jax.grad(total), normal(2, 32, dtype=jnp.bfloat16), leaf)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.2)


@pytest.mark.parametrize("rows", [1, MOST_ROWS])
def test_a_gpu_multiplies_int8_codes_exactly_beside_16_bits(rows, monkeypatch):
    monkeypatch.setattr(code_sums, "platform", lambda: "gpu")
    leaf = leaf_of("int8", 32, 64).astype(jnp.bfloat16)
    x = normal(rows, 32, dtype=jnp.bfloat16)
    found = jax.jit(lambda x, leaf: contract("BD,DF->BF", x, leaf, dtype=jnp.float32))(x, leaf)
    exact = np.asarray(x, np.float64) @ (np.float64(leaf.codes) * np.float64(leaf.scale))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)


@pytest.fixture(params=["gpu", "tpu"])
def accelerator(request, monkeypatch):
    """The products of an accelerator, made by this CPU."""
    monkeypatch.setattr(code_sums, "platform", lambda: request.param)
    monkeypatch.setattr(weights, "platform", lambda: request.param)
    return request.param


@each_kind
def test_an_accelerator_reads_the_codes_with_the_inputs_last(accelerator, kind):
    leaf = leaf_of(kind, 32, 2, 64)
    if kind != "int8":
        turned = OutputMajorNF4.of(leaf, 1)
        assert turned.codes.shape == (2, 32, 32) and turned.shape == leaf.shape
        np.testing.assert_array_equal(turned.array(), leaf.array())
        leaf = turned
    x = normal(2, 1, 32)
    np.testing.assert_allclose(*products("BTD,DNH->BTNH", x, leaf), atol=2e-5)
    many = np.tile(x, (4, 1, 1))
    np.testing.assert_array_equal(*products("BTD,DNH->BTNH", many, leaf))


def test_a_head_of_int8_is_multiplied_from_codes_with_the_inputs_first():
    """Of 50 tokens, which are filled up to 64; rows are looked up as they are."""
    table = to_int8(normal(50, 32), HEAD)
    leaf = Int8Head.of(table)
    assert leaf.turned.shape == (32, 64) and leaf.shape == (50, 32)
    for rows in (1, 4, 9):
        x = normal(rows, 1, 32, seed=rows)
        found = jax.jit(lambda x, leaf: contract("BTD,VD->BTV", x, leaf))(x, leaf)
        np.testing.assert_allclose(found, x @ np.asarray(table.array()).T, atol=2e-5)
    index = np.array([[3, 49]])
    whole = ("batch", "sequence", None)
    np.testing.assert_array_equal(leaf.lookup(index, whole), np.asarray(table.array())[index])


def test_a_gpu_reads_the_codes_of_a_head(monkeypatch):
    monkeypatch.setattr(code_sums, "platform", lambda: "gpu")
    monkeypatch.setattr(quantized, "platform", lambda: "gpu")
    table, x = to_int8(normal(50, 32), HEAD), normal(2, 1, 32)
    found, _ = products("BTD,VD->BTV", x, table)
    np.testing.assert_allclose(found, x @ np.asarray(table.array()).T, atol=2e-5)
    program = str(jax.make_jaxpr(lambda x: contract("BTD,VD->BTV", x, table))(x))
    assert "dot_general" not in program


SIZES = {"vocab_size": 50, "d_model": 64, "n_heads": 2, "d_ff": 128, "max_length": 32}
PROMPT = np.arange(6).reshape(2, 3)


@pytest.mark.parametrize("tied_head, layer_loop", [(True, "unroll"), (False, "scan")])
def test_generation_reads_the_codes_of_the_head(tied_head, layer_loop):
    """And writes the tokens that `jf.forward` ranks first."""
    config = with_settings(
        jf.ModelConfig(), {"n_layers": 2, "tied_head": tied_head, "layer_loop": layer_loop, **SIZES}
    )
    params = jf.quantize(params_of(config), "int8")
    head = weights.prepared(params, config)[("head", "embed")[tied_head]]
    assert isinstance(head[("weight", "tokens")[tied_head]], Int8Head)
    written = jf.generate(params, config, PROMPT, 8, temperature=0)
    text = np.concatenate([PROMPT, written], axis=1)
    logits = jax.jit(lambda params: jf.forward(params, config, text))(params)
    np.testing.assert_array_equal(written, logits[:, 2:-1].argmax(-1))


def test_int8_blocks_leaves_the_tables_of_tokens_and_a_head_of_classes_stays():
    sizes = SIZES | {"n_layers": 1}
    params = params_of(with_settings(jf.ModelConfig(), {"tied_head": False, **sizes}))
    blocks = jf.quantize(params, "int8_blocks")
    assert blocks["embed"]["tokens"] is params["embed"]["tokens"]
    assert blocks["head"]["weight"] is params["head"]["weight"]
    params = params_of(
        with_settings(jf.ModelConfig(), {"head.kind": "classes", "head.n_classes": 3, **sizes})
    )
    assert jf.quantize(params, "int8")["head"]["weight"] is params["head"]["weight"]


def test_outputs_that_are_no_number_of_blocks_stay_as_they_are():
    leaf = leaf_of("nf4", 32, 48)
    assert OutputMajorNF4.of(leaf, 1) is leaf


@each_kind
def test_the_values_of_codes_are_the_same_on_an_accelerator(kind, monkeypatch):
    leaf = leaf_of(kind, 32, 64)
    expected = leaf.array()
    monkeypatch.setattr(code_sums, "platform", lambda: "tpu")
    np.testing.assert_array_equal(leaf.array(), expected)


@pytest.mark.parametrize(
    "accelerator, kind",
    slow_but([("gpu", "int8"), ("tpu", "nf4"), ("gpu", "nf4_double")], ("tpu", "nf4")),
    indirect=["accelerator"],
)
def test_generation_on_an_accelerator_writes_what_a_cpu_writes(kind, accelerator, monkeypatch):
    config = with_settings(jf.ModelConfig(), {"n_layers": 1, **SIZES})
    params = jf.quantize(params_of(config), kind)
    jax.clear_caches()
    written = jf.generate(params, config, PROMPT, 8, temperature=0)
    leaves = jax.tree.leaves(
        weights.prepared(params, config), is_leaf=lambda leaf: isinstance(leaf, OutputMajorNF4)
    )
    turned = [leaf for leaf in leaves if isinstance(leaf, OutputMajorNF4)]
    assert bool(turned) == (kind != "int8")
    monkeypatch.undo()
    jax.clear_caches()
    weights._LAST.clear()
    np.testing.assert_array_equal(jf.generate(params, config, PROMPT, 8, temperature=0), written)
