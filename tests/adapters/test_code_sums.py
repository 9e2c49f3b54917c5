"""Products of few rows from the codes of a quantized weight: those of its array but for rounding,
without making it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.adapters import code_sums, quantized
from jaxformer.adapters.code_sums import MOST_ROWS
from jaxformer.adapters.output_major_codes import Int8Head, OutputMajorNF4
from jaxformer.adapters.quantized import to_int8, to_nf4
from jaxformer.arrays.params import Spec, contract, zeros
from jaxformer.generation import weights

MAKERS = {"int8": to_int8, "nf4": to_nf4, "nf4_double": functools.partial(to_nf4, double=True)}
HEAD = Spec((50, 32), ("vocab", "embed"), zeros, inputs=("embed",))
each_kind = pytest.mark.parametrize("kind", MAKERS)


def leaf_of(kind, *shape, inputs=1):
    spec = Spec(shape, tuple("abc"[: len(shape)]), zeros, inputs=tuple("abc"[:inputs]))
    return MAKERS[kind](jax.random.normal(jax.random.key(0), shape), spec)


@each_kind
@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS])
def test_the_sums_are_those_of_the_array(kind, rows):
    x = jax.random.normal(jax.random.key(1), (rows, 1, 32))
    leaf = leaf_of(kind, 32, 2, 64)
    found = contract("BTD,DNH->BTNH", x, leaf)
    np.testing.assert_allclose(found, jnp.einsum("BTD,DNH->BTNH", x, leaf.array()), atol=2e-5)
    leaf = leaf_of(kind, 2, 32, 64, inputs=2)
    x = jax.random.normal(jax.random.key(2), (rows, 1, 2, 32))
    found = contract("BTNH,NHD->BTD", x, leaf)
    np.testing.assert_allclose(found, jnp.einsum("BTNH,NHD->BTD", x, leaf.array()), atol=2e-5)


@each_kind
def test_no_array_is_made_and_more_rows_make_one(kind):
    leaf = leaf_of(kind, 512, 512)

    def temporary(rows):
        product = jax.jit(lambda x, leaf: contract("BD,DF->BF", x, leaf))
        program = product.lower(jnp.ones((rows, 512)), leaf).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(1) < 512 * 512 < 4 * 512 * 512 <= temporary(MOST_ROWS + 1)


@each_kind
def test_derivatives_are_those_of_the_product_with_the_array(kind):
    leaf, x = leaf_of(kind, 32, 64), jax.random.normal(jax.random.key(1), (2, 32))

    def total(x, w):
        return jnp.sin(contract("BD,DF->BF", x, w)).sum()

    for derivative in (jax.grad(total), jax.hessian(total), jax.jacfwd(total)):
        np.testing.assert_allclose(derivative(x, leaf), derivative(x, leaf.array()), atol=1e-4)


@each_kind
def test_derivatives_in_16_bits_have_the_dtype_of_the_sums(kind, accelerator):
    leaf = leaf_of(kind, 32, 64).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (2, 32), jnp.bfloat16)

    def total(x, w):
        return jnp.sin(contract("BD,DF->BF", x, w).astype(jnp.float32)).sum()

    found, expected = jax.grad(total)(x, leaf), jax.grad(total)(x, leaf.array())
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.2)


@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS])
def test_a_gpu_multiplies_int8_codes_exactly_beside_16_bits(rows, monkeypatch):
    monkeypatch.setattr(code_sums, "platform", lambda: "gpu")
    leaf = leaf_of("int8", 32, 64).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, 32), jnp.bfloat16)
    found = contract("BD,DF->BF", x, leaf, dtype=jnp.float32)
    exact = np.asarray(x, np.float64) @ (np.float64(leaf.codes) * np.float64(leaf.scale))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)


@pytest.fixture(params=["gpu", "tpu"])
def accelerator(request, monkeypatch):
    """The products of an accelerator, made by this CPU."""
    monkeypatch.setattr(code_sums, "platform", lambda: request.param)
    monkeypatch.setattr(weights, "platform", lambda: request.param)
    yield request.param
    jax.clear_caches()


@each_kind
def test_an_accelerator_reads_the_codes_with_the_inputs_last(accelerator, kind):
    x = jax.random.normal(jax.random.key(1), (2, 1, 32))
    leaf = leaf_of(kind, 32, 2, 64)
    if kind != "int8":
        turned = OutputMajorNF4.of(leaf, 1)
        assert turned.codes.shape == (2, 32, 32) and turned.shape == leaf.shape
        np.testing.assert_array_equal(turned.array(), leaf.array())
        leaf = turned
    found = contract("BTD,DNH->BTNH", x, leaf)
    np.testing.assert_allclose(found, jnp.einsum("BTD,DNH->BTNH", x, leaf.array()), atol=2e-5)
    many = jnp.tile(x, (4, 1, 1))
    np.testing.assert_array_equal(
        contract("BTD,DNH->BTNH", many, leaf), contract("BTD,DNH->BTNH", many, leaf.array())
    )


def test_a_head_of_int8_is_multiplied_from_codes_with_the_inputs_first():
    """Of 50 tokens, which are filled up to 64; rows are looked up as they are."""
    table = to_int8(jax.random.normal(jax.random.key(0), (50, 32)), HEAD)
    leaf = Int8Head.of(table)
    assert leaf.turned.shape == (32, 64) and leaf.shape == (50, 32)
    for rows in (1, 4, 9):
        x = jax.random.normal(jax.random.key(rows), (rows, 1, 32))
        expected = jnp.einsum("BTD,VD->BTV", x, table.array())
        np.testing.assert_allclose(contract("BTD,VD->BTV", x, leaf), expected, atol=2e-5)
    index = jnp.array([[3, 49]])
    whole = ("batch", "sequence", None)
    np.testing.assert_array_equal(leaf.lookup(index, whole), table.array()[index])


def test_a_gpu_reads_the_codes_of_a_head(monkeypatch):
    monkeypatch.setattr(code_sums, "platform", lambda: "gpu")
    monkeypatch.setattr(quantized, "platform", lambda: "gpu")
    table = to_int8(jax.random.normal(jax.random.key(0), (50, 32)), HEAD)
    x = jax.random.normal(jax.random.key(1), (2, 1, 32))
    expected = jnp.einsum("BTD,VD->BTV", x, table.array())
    np.testing.assert_allclose(contract("BTD,VD->BTV", x, table), expected, atol=2e-5)
    program = str(jax.make_jaxpr(lambda x: contract("BTD,VD->BTV", x, table))(x))
    assert "dot_general" not in program
    jax.clear_caches()


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("layer_loop", ["unroll", "scan"])
def test_generation_reads_the_codes_of_the_head(tied_head, layer_loop):
    """And writes the tokens that `jf.forward` ranks first."""
    sizes = {"vocab_size": 50, "d_model": 64, "n_heads": 2, "d_ff": 128, "max_length": 32}
    config = jf.ModelConfig(n_layers=2, tied_head=tied_head, layer_loop=layer_loop, **sizes)
    params = jf.quantize(jf.init(config, jax.random.key(0)), "int8")
    head = weights.prepared(params, config)[("head", "embed")[tied_head]]
    assert isinstance(head[("weight", "tokens")[tied_head]], Int8Head)
    prompt = jnp.arange(6).reshape(2, 3)
    written = jf.generate(params, config, prompt, 8, temperature=0)
    text = jnp.concatenate([prompt, written], axis=1)
    ranked = jf.forward(params, config, text)[:, 2:-1].argmax(-1)
    np.testing.assert_array_equal(written, ranked)


def test_int8_blocks_leaves_the_tables_of_tokens_and_a_head_of_classes_stays():
    sizes = {"vocab_size": 50, "d_model": 64, "n_heads": 2, "d_ff": 128, "n_layers": 1}
    params = jf.init(jf.ModelConfig(tied_head=False, **sizes), jax.random.key(0))
    blocks = jf.quantize(params, "int8_blocks")
    assert blocks["embed"]["tokens"] is params["embed"]["tokens"]
    assert blocks["head"]["weight"] is params["head"]["weight"]
    classes = jf.ModelConfig(head="classes", n_classes=3, **sizes)
    params = jf.init(classes, jax.random.key(0))
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


@each_kind
def test_generation_on_an_accelerator_writes_what_a_cpu_writes(kind, accelerator, monkeypatch):
    sizes = {"vocab_size": 50, "d_model": 64, "n_heads": 2, "d_ff": 128, "max_length": 32}
    config = jf.ModelConfig(n_layers=2, **sizes)
    params = jf.quantize(jf.init(config, jax.random.key(0)), kind)
    prompt = jnp.arange(6).reshape(2, 3)
    written = jf.generate(params, config, prompt, 8, temperature=0)
    leaves = jax.tree.leaves(
        weights.prepared(params, config), is_leaf=lambda leaf: isinstance(leaf, OutputMajorNF4)
    )
    turned = [leaf for leaf in leaves if isinstance(leaf, OutputMajorNF4)]
    assert bool(turned) == (kind != "int8")
    monkeypatch.undo()
    jax.clear_caches()
    weights._CACHE._forget()
    np.testing.assert_array_equal(jf.generate(params, config, prompt, 8, temperature=0), written)
