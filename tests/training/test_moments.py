"""Moments in fewer bits: how they are rounded, what they take, and that they train; and that
optimizers continue bitwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_variants import VARIANTS
from products import slow_but

import jaxformer as jf
from jaxformer.arrays.params import Spec, normal, ones
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.moments import STORES, block_length, code_book, restored
from jaxformer.training.optimizers.run_optimizer import make_optimizer

MATRIX = Spec((8, 64), ("embed", "mlp"), normal(0.1), inputs=("embed",))
TABLE = {
    "matrix": MATRIX,
    "vector": Spec((8,), ("norm",), ones),
    "still": dataclasses.replace(MATRIX, trainable=False),
}
OUT = np.random.default_rng(0).normal(size=(64, 1)).astype("f") / 8


def through(kind, moment, has_sign, count):
    """A moment after it was stored and read, with so many keys."""
    spec = Spec(moment.shape, ("embed", "mlp"), normal(1.0), inputs=("embed",))

    def once(key):
        return restored(STORES[kind](key, jnp.asarray(moment), spec, has_sign))

    return np.asarray(jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(0), count)))


@pytest.mark.parametrize("has_sign", [True, False])
@pytest.mark.parametrize("kind", STORES)
def test_a_moment_is_rounded_to_a_neighbor_and_keeps_its_mean(kind, has_sign):
    rng = np.random.default_rng(0)
    moment = (rng.normal(size=(4, 64)) * 10.0 ** rng.integers(-2, 2, (4, 1))).astype("f")
    moment = moment if has_sign else moment**2
    many = through(kind, moment, has_sign, 400)
    largest = np.abs(moment).max(1, keepdims=True)
    # Neighbors are a 128th of a number apart in bfloat16, up to a 64th of the largest in 8 bits.
    apart = np.abs(moment) / 128 if kind == "bfloat16" else np.broadcast_to(largest / 50, (4, 64))
    assert (np.abs(many - moment) <= apart * 1.01).all()
    assert (np.abs(many.mean(0) - moment) <= 0.25 * apart).all() and many.std(0).max() > 0


@pytest.mark.parametrize("kind", STORES)
def test_zeros_stay_and_a_second_moment_above_zero_does_not_become_it(kind):
    moment = np.zeros((2, 64), "f")
    np.testing.assert_array_equal(through(kind, moment, False, 1)[0], moment)
    moment[0, :2] = 1, 1e-12
    assert (through(kind, moment, False, 50)[:, 0, 1] > 0).all()


def test_the_code_book_has_256_numbers_over_seven_powers_of_ten():
    for has_sign in (True, False):
        book = code_book(has_sign)
        assert len(np.unique(book)) == 256 and 0 in book and book[-1] == 1
        assert book[book > 0].min() < 1e-6 and np.diff(book[-32:]).max() < 0.016
    np.testing.assert_array_equal(-code_book(True)[:127][::-1], code_book(True)[128:255])


@pytest.mark.parametrize("length, block", [(256, 256), (768, 256), (64, 64), (300, 150), (7, 7)])
def test_a_block_divides_its_axis(length, block):
    assert block_length(length) == block


@pytest.mark.parametrize("kind, per_number", [("float32", 8), ("bfloat16", 4), ("int8", 2)])
def test_moments_take_the_bytes_of_their_kind(kind, per_number):
    optimizer = make_optimizer(OptimizerConfig(moments=kind), lambda step: 0.1, TABLE)
    state = jax.eval_shape(lambda: jf.init_state(TABLE, optimizer).optimizer)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    scales = 2 * 8 * 4 if kind == "int8" else 0  # of one block a row
    assert sum(sizes) == per_number * 8 * 64 + scales


def test_moments_of_a_rule_that_has_none_are_refused():
    config = OptimizerConfig(name="adafactor", moments="int8")
    with pytest.raises(ConfigError, match=r"moments='int8' .* choose one of adamw, lion"):
        make_optimizer(config, lambda step: 0.1, TABLE)


def loss(params, batch, key):
    error = jnp.tanh(batch @ (params["matrix"] + params["still"])) @ OUT - batch[:, :1]
    return {"loss": ((error**2).sum() + (params["vector"] ** 2).sum(), len(batch))}


@functools.cache
def optimizer_and_step(config, seed):
    optimizer = make_optimizer(config, lambda step: 0.02, TABLE, seed)
    return optimizer, jf.make_step(loss, optimizer)


def state_after(config, steps, start=None, seed=0):
    """The state and the losses of a run of so many steps, which may begin with a state."""
    optimizer, step = optimizer_and_step(config, seed)
    state, losses = start or jf.init_state(TABLE, optimizer), []
    for number in range(int(state.step), steps):
        batch = np.random.default_rng(number).normal(size=(16, 8)).astype("f")
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("kind", STORES)
def test_rounded_moments_learn_as_those_of_float32(kind):
    exact, rounded = (
        state_after(OptimizerConfig(moments=m, weight_decay=0), 60)[1] for m in ("float32", kind)
    )
    assert abs(rounded[-1] - exact[-1]) < 0.1 * exact[0] and rounded[-1] < 0.5 * rounded[0]


def test_the_random_bits_are_those_of_the_seed():
    config = OptimizerConfig(moments="bfloat16")
    first, second, third = (state_after(config, 2, seed=seed)[0] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    pairs = zip(*map(jax.tree.leaves, (first.optimizer, third.optimizer)), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


@pytest.mark.parametrize("name", slow_but(VARIANTS, "muon", "soap in int8"))
def test_an_optimizer_of_each_kind_of_state_continues_bitwise_from_a_checkpoint(name, tmp_path):
    config = OptimizerConfig(**VARIANTS[name])
    half, _ = state_after(config, 2)
    with jf.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(half, 2)
    expected, _ = state_after(config, 4, half)
    optimizer, _ = optimizer_and_step(config, 0)
    with jf.Checkpoints(tmp_path) as checkpoints:
        restored_state = checkpoints.newest(jf.init_state(TABLE, optimizer))
    assert int(restored_state.step) == 2
    continued, _ = state_after(config, 4, restored_state)
    jax.tree.map(np.testing.assert_array_equal, continued, expected)
