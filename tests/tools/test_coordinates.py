"""The change of each activation in the first steps keeps its size as a model widens in muP
(arXiv:2203.03466, appendix D.1), and grows in the standard parametrization."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config.train import OptimizerConfig
from jaxformer.tools.inspect import inspect
from jaxformer.training.optimizers.run_optimizer import make_optimizer

STEPS, SEEDS, RATE = 4, 2, 3e-3
WIDE = jf.ModelConfig(
    vocab_size=32,
    d_model=128,
    n_layers=2,
    n_heads=8,
    d_ff=256,
    parametrization="mup",
    mup_base="d_model=32 n_heads=2 d_ff=64",
)
NARROW = dataclasses.replace(WIDE, d_model=32, n_heads=2, d_ff=64)
CAPTURED = ("residual", "attention_out", "mlp_out")


def a_batch():
    rng = np.random.default_rng(0)
    rows = np.minimum(rng.integers(0, 32, (4, 17)), rng.integers(0, 32, (4, 17))).astype(np.int32)
    weights = np.ones((4, 16), np.float32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def changes_of(model, optimizer):
    """The root mean square of the change of each activation in a few steps; two seeds' mean."""
    batch = {name: jnp.asarray(array) for name, array in a_batch().items()}
    loss = jf.loss_of("causal", model)
    rule = make_optimizer(optimizer, lambda step: optimizer.learning_rate, jf.specs(model))

    def mean_loss(params):
        total, weight = loss(params, batch, None)["loss"]
        return total / weight

    def advance(carry, _):
        params, moments = carry
        updates, moments = rule.update(jax.grad(mean_loss)(params), moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), None

    def activations(params):
        found = inspect(params, model, batch["tokens"], CAPTURED)
        return {**found.values, "logits": found.logits}

    @jax.jit
    def change(seed):
        params = jf.init(model, jax.random.key(seed))
        (after, _), _ = jax.lax.scan(advance, (params, rule.init(params)), None, STEPS)
        difference = jax.tree.map(jnp.subtract, activations(after), activations(params))
        return jax.tree.map(lambda d: jnp.sqrt(jnp.mean(jnp.square(d))), difference)

    of_seeds = [jax.device_get(change(seed)) for seed in range(SEEDS)]
    return {name: sum(found[name] for found in of_seeds) / SEEDS for name in of_seeds[0]}


def growth_of(name="adamw", **settings):
    """The exponent of the width by which the change of each activation grows."""
    narrow, wide = (
        changes_of(dataclasses.replace(model, **settings), OptimizerConfig(name, RATE))
        for model in (NARROW, WIDE)
    )
    return {path: math.log(wide[path] / narrow[path]) / math.log(128 / 32) for path in narrow}


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("muon", "normuon", "lion")),
    ],
)
def test_changes_keep_their_size_in_mup(name):
    growth = growth_of(name)
    assert {*growth} == {
        "logits",
        *(f"decoder.{layer}.{what}" for layer in range(2) for what in CAPTURED),
    }
    assert all(abs(exponent) <= 0.5 for exponent in growth.values()), growth


@pytest.mark.slow
def test_changes_grow_with_the_width_in_the_standard_parametrization():
    growth = growth_of(parametrization="standard", mup_base="")
    assert growth["logits"] > 0.5 and growth["decoder.1.residual"] > 0.5
