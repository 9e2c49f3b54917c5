"""The weights that the decode loop reads are made once for the same params, and freed with them."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES, alone
from products import slow_but

import jaxformer as jf
from jaxformer.arrays.params import contract
from jaxformer.config.settings import with_settings
from jaxformer.generation import weights
from jaxformer.generation.weights import OutputMajor, prepared
from jaxformer.models import stack

CONFIG = with_settings(jf.ModelConfig(), SIZES | {"dtype": "bfloat16"})


@pytest.fixture
def calls(monkeypatch):
    """One entry for every time that weights are made."""
    made, make = [], weights._prepare
    monkeypatch.setattr(
        weights, "_prepare", lambda params, config: made.append(config) or make(params, config)
    )
    return made


def fresh(seed=0):
    return jf.init(CONFIG, jax.random.key(seed))


def test_a_second_call_with_the_same_params_makes_nothing(calls):
    params, prompt = fresh(), alone(CONFIG)["tokens"][:2]
    first = jf.generate(params, CONFIG, prompt, 3, temperature=0)
    second = jf.generate(params, CONFIG, prompt, 3, temperature=0)
    np.testing.assert_array_equal(first, second)
    assert len(calls) == 1
    again = jax.tree.map(lambda leaf: leaf, params)  # other containers of the same arrays
    prepared(again, CONFIG)
    assert len(calls) == 1


def test_params_of_which_one_leaf_changed_are_made_anew(calls):
    params = fresh()
    old = prepared(params, CONFIG)
    params["final_norm"]["scale"] = params["final_norm"]["scale"] + 1
    new = prepared(params, CONFIG)
    assert len(calls) == 2
    assert (new["final_norm"]["scale"] == old["final_norm"]["scale"] + 1).all()


def test_another_dtype_is_made_anew(calls):
    params = fresh()
    prepared(params, CONFIG)
    found = prepared(params, with_settings(jf.ModelConfig(), SIZES | {"dtype": "float32"}))
    assert len(calls) == 2 and found["embed"]["tokens"].dtype == jnp.float32


def test_the_weights_are_freed_with_the_params():
    params = fresh()
    weights = prepared(params, CONFIG)
    kept = weakref.ref(weights["embed"]["tokens"])
    del weights
    gc.collect()
    assert kept() is not None
    del params
    gc.collect()
    assert kept() is None


def test_nothing_is_kept_of_what_is_traced(calls):
    params = fresh()
    jax.eval_shape(lambda p: prepared(p, CONFIG)["embed"]["tokens"], params)
    jax.eval_shape(lambda p: prepared(p, CONFIG)["embed"]["tokens"], params)
    assert len(calls) == 2 and not any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(weights._LAST)
    )


def test_one_program_arranges_all_layers_and_one_trace_reads_them(monkeypatch):
    """The start of a command: neither is repeated for each layer."""
    config = with_settings(jf.ModelConfig(), SIZES | {"dtype": "float32", "n_layers": 5})
    params = jf.init(config, jax.random.key(3))
    traced, block = [], stack.block
    monkeypatch.setattr(stack, "block", lambda *args: traced.append(1) or block(*args))
    before = weights._layer._cache_size()
    assert len(prepared(params, config)["blocks"]) == 5
    assert weights._layer._cache_size() == before + 1
    jf.generate(params, config, alone(config)["tokens"][:2], 3, temperature=0)
    assert len(traced) == 2  # the prompt, and a step


@pytest.mark.parametrize("rows", slow_but([1, 2, 3], 1))
def test_weights_with_their_outputs_first_are_those_of_the_params(rows):
    """On a CPU all matrices of a layer are stored so; each stands for what the params have."""
    config = with_settings(jf.ModelConfig(), SIZES | {"dtype": "float32"})
    params = fresh()
    layers = prepared(params, config)["blocks"]
    turned = 0
    for number, layer in enumerate(layers):
        for part, name in itertools.product(("attention", "ffn"), ("q", "out", "up", "down")):
            if name not in layer[part]:
                continue
            leaf, weight = layer[part][name], params["blocks"][part][name][number]
            assert isinstance(leaf, OutputMajor) and leaf.shape == weight.shape
            np.testing.assert_array_equal(leaf.array(), weight)
            inputs, outputs = "DE"[: leaf.inputs], "HK"[: weight.ndim - leaf.inputs]
            equation = f"BT{inputs},{inputs}{outputs}->BT{outputs}"
            x = jax.random.normal(jax.random.key(1), (rows, 1, *weight.shape[: leaf.inputs]))
            found, expected = (contract(equation, x, w) for w in (leaf, weight))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
            index = np.array([0, weight.shape[0] - 1])
            places = ("batch",) + (None,) * (weight.ndim - 1)
            if weight.ndim == 2:
                np.testing.assert_array_equal(leaf.lookup(index, places), weight[index])
            turned += 1
    assert turned == 4 * config.n_layers
