"""The weights that the decode loop reads are made once for the same params, and freed with them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES, alone

import jaxformer as jf
from jaxformer.generation import prepare
from jaxformer.generation.prepare import prepared

CONFIG = jf.ModelConfig(**SIZES | {"dtype": "bfloat16"})


@pytest.fixture
def calls(monkeypatch):
    """One entry for every time that weights are made."""
    made, make = [], prepare._prepare
    monkeypatch.setattr(
        prepare, "_prepare", lambda params, config: made.append(config) or make(params, config)
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
    found = prepared(params, jf.ModelConfig(**SIZES | {"dtype": "float32"}))
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
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(prepare._LAST.__dict__)
    )
