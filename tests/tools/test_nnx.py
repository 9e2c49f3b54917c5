"""A model lives inside Flax code as an nnx.Module."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shapes import VOCABULARY, model, tokens

import jaxformer as jf
from jaxformer.tools.nnx import Transformer


class ErrorHandler(nnx.Module):
    """Somebody's module with a model in it and a layer of their own."""

    def __init__(self, config: jf.ModelConfig, rngs: nnx.Rngs) -> None:
        self.trunk = Transformer(config, rngs=rngs)
        self.score = nnx.Linear(VOCABULARY, 1, rngs=rngs)

    def __call__(self, row: jax.Array) -> jax.Array:
        return self.score(self.trunk(row).mean(1))[:, 0]


def test_a_module_gives_the_logits_of_forward():
    config = model("llama")
    params = jf.init(config, jax.random.key(3))
    module = Transformer(config, params)
    np.testing.assert_array_equal(
        nnx.jit(module)(tokens()), jax.jit(jf.forward, static_argnums=1)(params, config, tokens())
    )
    jax.tree.map(np.testing.assert_array_equal, module.params, params)


def test_every_leaf_is_an_nnx_param_in_the_nesting_of_the_params():
    config = model("gpt2")
    state = nnx.state(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param)
    found = {path[1:] for path, _ in nnx.to_flat_state(state)}
    expected = {
        tuple(key.key for key in path)
        for path, _ in jax.tree.leaves_with_path(jf.init(config, jax.random.key(0)))
    }
    assert found == expected


def test_a_module_inside_another_trains():
    handler = ErrorHandler(model("llama"), nnx.Rngs(0))
    optimizer = nnx.Optimizer(handler, optax.adam(3e-3), wrt=nnx.Param)
    rows, wanted = tokens(rows=8), jnp.arange(8) % 2

    @nnx.jit
    def step(handler, optimizer):
        def loss(handler):
            return optax.sigmoid_binary_cross_entropy(handler(rows), wanted).mean()

        value, gradient = nnx.value_and_grad(loss)(handler)
        optimizer.update(handler, gradient)
        return value

    before = handler.trunk.params
    losses = [float(step(handler, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, handler.trunk.params)
    assert all(jax.tree.leaves(moved))


def test_params_of_another_model_are_refused():
    params = jf.init(model("gpt2"), jax.random.key(0))
    with pytest.raises(jf.ConfigError, match="do not fit the config"):
        Transformer(model("llama"), params)
