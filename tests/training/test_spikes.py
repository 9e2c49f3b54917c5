"""Spikes: `skip_spikes` leaves out the updates that a plain rule in NumPy leaves out, and nothing
else of them remains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forced_devices import on_eight_devices
from spike_devices import RULE, SPIKES, Batches, loss, nats_by_row, params_of, trained

import jaxformer as jf
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.training.optimizers.run_optimizer import with_average
from jaxformer.training.spikes import SpikeLimit, SpikeState, skip_spikes
from jaxformer.training.step import make_step

pytestmark = pytest.mark.fast


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_limit_is_that_of_a_plain_rule():
    factor, window = 4.0, 8
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 0.5, 200).astype(np.float32)
    optimizer = skip_spikes(optax.sgd(1.0), factor, window)
    state, skipped, accepted = optimizer.init(jnp.zeros(1)), [], []
    update = jax.jit(lambda state, value: optimizer.update(jnp.ones(1), state, value=value))
    for number, value in enumerate(values):
        updates, state = update(state, value)
        last = np.array(accepted[-window:])
        limit = np.inf
        if len(last) >= window / 2:
            median = np.median(last)
            deviation = max(1.4826 * np.median(np.abs(last - median)), 0.01 * median)
            limit = median + factor * deviation
        np.testing.assert_allclose(state.loss_limit, limit, rtol=1e-5)
        if value > limit:
            skipped.append(number)
            assert updates[0] == 0
        else:
            accepted.append(value)
            assert updates[0] == -1
        assert int(state.skipped) == len(skipped)
    assert 3 < len(skipped) < 40


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_spike_leaves_no_trace(microbatches):
    spiked, seen = trained(Batches(SPIKES), microbatches=microbatches)
    assert [step - 1 for step, metrics in seen if metrics["spikes_in_a_row"]] == sorted(SPIKES)
    without = Batches(SPIKES, left_out=True)
    calm, _ = trained(without, microbatches=microbatches, steps=40 - len(SPIKES))
    assert_equal(spiked.params, calm.params)
    assert_equal(spiked.optimizer.inner, calm.optimizer.inner)
    assert_equal(spiked.optimizer.losses, calm.optimizer.losses)
    plain, _ = trained(without, optimizer=optax.adam(1e-2), steps=40 - len(SPIKES))
    if microbatches == 1:
        assert_equal(plain.params, calm.params)


def test_a_spike_has_no_part_in_an_average_of_the_weights():
    def averages(batches, steps):
        optimizer = skip_spikes(with_average(RULE, decay=0.9), factor=10.0, window=16)
        state, _ = trained(batches, optimizer=optimizer, steps=steps)
        return evaluation_weights(state.params, state.optimizer), state.params

    spiked, params = averages(Batches(SPIKES), 40)
    calm, _ = averages(Batches(SPIKES, left_out=True), 40 - len(SPIKES))
    assert_equal(spiked, calm)
    assert not np.array_equal(spiked["w"], params["w"])


def test_a_run_goes_on_bitwise_within_its_window(tmp_path):
    whole, seen = trained(Batches(SPIKES))
    _, first = trained(Batches(SPIKES), steps=20, checkpoints=jf.Checkpoints(tmp_path, every=10))
    state, later = trained(Batches(SPIKES), checkpoints=jf.Checkpoints(tmp_path, every=10))
    assert_equal(state, whole)
    assert [*first, *later] == seen


def test_a_gradient_alone_may_be_the_spike_and_a_step_that_is_not_finite_is_none():
    _, seen = trained(Batches({21}, slope=1e4))
    assert [step for step, metrics in seen if metrics["spikes_in_a_row"]] == [22]
    state, seen = trained(Batches({22}, factor=np.nan), hooks=[jf.SkipSteps()])
    assert not any(metrics["spikes_in_a_row"] for _, metrics in seen)
    assert int(state.optimizer.accepted) == 39 and int(state.step) == 40


def test_spikes_in_a_row_are_capped():
    with pytest.raises(jf.Diverged, match=r"step 24: it is a spike.* 3 steps in a row were"):
        trained(Batches(set(range(20, 30))), hooks=[SpikeLimit(3)])
    trained(Batches({20, 21, 22, 24, 25, 26}), hooks=[SpikeLimit(3)])


def test_a_step_of_another_optimizer_is_the_program_that_it_was():
    optimizer = optax.adam(1e-2)
    state, batch = jf.init_state(params_of(), optimizer), Batches()[0]
    _, metrics = make_step(loss, optimizer)(state, batch)
    assert set(metrics) == {"loss", "grad_norm"}
    watched = jf.init_state(params_of(), skip_spikes(optimizer))
    assert isinstance(watched.optimizer, SpikeState)
    assert jax.tree.structure(watched.optimizer.inner) == jax.tree.structure(state.optimizer)


def test_an_optimizer_with_extra_arguments_has_the_loss_of_the_step():
    def update(updates, state, params=None, *, value, **extra):
        return updates, value

    watching = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)
    optimizer = optax.chain(optax.sgd(1e-2), watching)
    state = jf.init_state(params_of(), optimizer)
    state, metrics = make_step(loss, optimizer)(state, Batches()[0])
    assert float(state.optimizer[1]) == float(metrics["loss"])


@pytest.mark.slow
def test_eight_devices_skip_what_one_skips_and_sum_the_nats_of_its_rows():
    _, seen = trained(Batches(SPIKES))
    report = on_eight_devices("spike_devices.py")
    assert report["devices"] == 8
    assert report["skipped"] == [step for step, metrics in seen if metrics["spikes_in_a_row"]]
    np.testing.assert_allclose(
        report["losses"], [metrics["loss"] for _, metrics in seen], rtol=1e-5
    )
    np.testing.assert_allclose(report["nats"], nats_by_row(), rtol=1e-5)
