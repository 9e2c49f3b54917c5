"""A step that is observed: the norms of its gradient and its update, and no other bit changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_steps import a_batch, a_run, step_of

import jaxformer as jf
from jaxformer.arrays.params import dotted

pytestmark = pytest.mark.fast


def norms(step, gradient, update):
    trees = {"grad_norm": gradient, "update_norm": update}
    return {
        f"{name}/{dotted(path)}": jnp.sqrt(jnp.square(leaf).sum())
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_a_step_that_is_observed_has_norms_of_its_leaves_and_the_same_numbers():
    run, optimizer = a_run(n_layers=1, train={"microbatches": 2}), optax.sgd(0.5)
    plain = step_of(run, optimizer, lambda step: 0.5)
    states = []
    for step in (plain, plain.observing(norms)):
        state = jf.init_state(jf.specs(run.model), optimizer)
        states.append(step(state, a_batch()))
    (state, metrics), (same_state, same_metrics) = states
    jax.tree.map(np.testing.assert_array_equal, state.params, same_state.params)
    assert all(metrics[name] == same_metrics[name] for name in metrics)
    of_leaves = {name: float(value) for name, value in same_metrics.items() if "norm/" in name}
    assert "grad_norm/blocks.attention.q" in of_leaves
    for name, value in of_leaves.items():
        # Plain gradient descent with a rate of 0.5.
        gradient = of_leaves[name.replace("update_norm", "grad_norm")]
        expected = gradient if name.startswith("grad_norm") else gradient / 2
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    total = sum(value**2 for name, value in of_leaves.items() if name.startswith("grad_norm/"))
    np.testing.assert_allclose(total**0.5, metrics["grad_norm"], rtol=1e-5)
