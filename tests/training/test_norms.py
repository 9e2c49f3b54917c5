"""Norms by layer: those that NumPy gives, in their steps alone, and no other bit changes."""

import jax
import numpy as np
import optax
import pytest
from learning_steps import a_batch, a_run, step_of

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.training.norms import layered_paths, numbers_of, watch_norms

pytestmark = pytest.mark.fast


def steps_of(step, run, optimizer):
    """Before, after and the metrics of four steps, on the host."""
    state, seen = jf.init_state(jf.specs(run.model), optimizer), []
    for number in range(4):
        before = jax.tree.map(np.array, state.params)
        state, metrics = step(state, a_batch(seed=number))
        seen.append((before, jax.tree.map(np.array, state.params), jax.device_get(metrics)))
    return seen


def test_norms_are_those_of_numpy_in_every_second_step():
    run, optimizer = a_run(), optax.sgd(0.5)
    specs = jf.specs(run.model)
    plain = step_of(run, optimizer, lambda step: 0.5)
    seen = steps_of(plain.observing(watch_norms(2, layered_paths(specs))), run, optimizer)
    for number, (before, after, metrics) in enumerate(seen):
        numbers = {name: value for name, value in numbers_of(metrics).items() if "/" in name}
        if number % 2 == 0:
            assert not numbers
            continue
        expected = {}
        for path, spec in rows(specs).items():
            old, new = before, after
            for name in path.split("."):
                old, new = old[name], new[name]
            moved = (new - old).astype(np.float64) ** 2
            kind = path.rpartition(".")[0]
            layers = enumerate(moved) if spec.is_stacked else [("", moved)]
            for layer, square in layers:
                name = f"{kind}.{layer}".rstrip(".")
                expected[name] = expected.get(name, 0.0) + square.sum()
        assert {name.partition("/")[2] for name in numbers} == set(expected)
        for name, square in expected.items():
            np.testing.assert_allclose(numbers[f"update_norm/{name}"], square**0.5, rtol=1e-3)
            # Plain gradient descent with a rate of 0.5.
            np.testing.assert_allclose(numbers[f"grad_norm/{name}"], 2 * square**0.5, rtol=1e-3)


def test_a_step_that_computes_norms_changes_no_other_bit():
    run, optimizer = a_run(train={"microbatches": 2}), optax.adam(1e-2)
    plain = step_of(run, optimizer, lambda step: 0.5)
    watched = plain.observing(watch_norms(2))
    pairs = zip(steps_of(plain, run, optimizer), steps_of(watched, run, optimizer), strict=True)
    for (_, params, metrics), (_, same_params, same_metrics) in pairs:
        jax.tree.map(np.testing.assert_array_equal, params, same_params)
        assert all(metrics[name] == same_metrics[name] for name in metrics)


def test_norms_are_in_logged_lines_alone():
    with pytest.raises(ConfigError, match=r"norms_every=15 is no multiple of train\.log_every=10"):
        TrainConfig(norms_every=15)
    TrainConfig(norms_every=20)
