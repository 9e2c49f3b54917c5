"""How experts and their routers are moved: each expert's matrix by itself, and a balanced bias of a
router by a step of one size against its load, whatever the optimizer."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning_steps import a_batch, a_run, step_of
from test_optimizers import newton_schulz

import jaxformer as jf
from jaxformer.arrays.params import Spec, dotted, rows
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.layers.experts import BALANCED_RATE
from jaxformer.models import transformer
from jaxformer.models.adapt import adapted_table
from jaxformer.training.optimizers.groups import Group, group_sizes, leaf_groups
from jaxformer.training.optimizers.run_optimizer import OPTIMIZERS, make_optimizer
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.state import init_state

EXPERTS = {
    "feed_forward": "experts",
    "experts.n": 4,
    "experts.per_token": 2,
    "experts.d_ff": 12,
    "experts.router_bias": "balanced",
    "n_layers": 1,
}
BIAS = "blocks.experts.router_bias"


def expert_run(optimizer, pieces=1, **changes):
    """A run with what could move a bias otherwise: decay of all leaves, and strong clipping."""
    settings = {"name": optimizer, "weight_decay": 0.5, "decay": "all", "clip_norm": 1e-3}
    return a_run("llama", train={"microbatches": pieces}, optimizer=settings, **EXPERTS | changes)


def start(run, table=None):
    table = table or transformer.specs(run.model)
    schedule = make_schedule(run.optimizer, run.train.steps)
    optimizer = make_optimizer(run.optimizer, schedule, table)
    return init_state(table, optimizer), step_of(run, optimizer, schedule)


def batch_of(seed):
    """Rows that all have one half of the tokens, so that the experts have unequal loads."""
    return a_batch(seed=seed, uneven=False)


def bias_of(state):
    return np.asarray(state.params["blocks"]["experts"]["router_bias"])[0]


@pytest.mark.parametrize(
    "name, pieces",
    [("adamw", 4), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("muon", "sophia"))],
)
def test_a_balanced_bias_moves_by_its_rate_towards_equal_loads(name, pieces):
    """By the load of the whole batch, also where it is computed in microbatches."""
    run = expert_run(name, pieces, **{"experts.kernel": "xla" if name == "sophia" else "auto"})
    state, step = start(run)
    for seed in range(5):
        before = bias_of(state)
        state, metrics = step(state, batch_of(seed))
        loads = np.array([metrics[f"expert_load_{e}"] for e in range(4)])
        np.testing.assert_allclose(loads.mean(), 1, atol=1e-6)
        # A load that is the mean may differ from it by the rounding of the sum over microbatches.
        apart = np.abs(loads - 1) > 1e-4
        assert apart.any()
        moved = np.float32(BALANCED_RATE) * np.sign(1 - loads)
        np.testing.assert_allclose((bias_of(state) - before)[apart], moved[apart], atol=1e-7)


def test_a_kernel_without_a_hessian_is_refused_by_the_optimizer_that_needs_it():
    state, step = start(expert_run("sophia"))
    with pytest.raises(ConfigError, match=r"Hessian, .* model.experts.kernel=xla"):
        step(state, batch_of(0))


def test_a_balanced_bias_has_no_moments_and_does_not_decay():
    run = expert_run("adamw")
    table = transformer.specs(run.model)
    assert not leaf_groups(run.optimizer, table)["blocks"]["experts"]["router_bias"].decay
    assert group_sizes(run.optimizer, table)[Group(decay=0.0)] == [4]
    learned = transformer.specs(with_settings(run.model, {"experts.router_bias": "learned"}))
    assert leaf_groups(run.optimizer, learned)["blocks"]["experts"]["router_bias"].decay
    state, _ = start(run)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.optimizer)]
    assert (1, 4) not in shapes and (1, 4, 32, 12) in shapes


@pytest.mark.slow
def test_an_adapter_leaves_a_balanced_bias_as_it_is():
    run = expert_run("muon")
    adapter = AdapterConfig(kind="lora", targets="experts", rank=2)
    state, step = start(run, adapted_table(run.model, adapter))
    after = state
    for seed in range(2):
        after, _ = step(after, batch_of(seed))
    np.testing.assert_array_equal(bias_of(after), 0)
    first, last = (
        s.params["blocks"]["experts"]["up"]
        for s in (start(run, adapted_table(run.model, adapter))[0], after)
    )
    np.testing.assert_array_equal(last.weight, first.weight)
    assert jnp.any(last.b != first.b)


@pytest.mark.slow
def test_a_frozen_balanced_bias_stays():
    frozen, run = "router_bias", expert_run("adamw")
    table, schedule = transformer.specs(run.model), make_schedule(run.optimizer, 60)
    optimizer = make_optimizer(run.optimizer, schedule, table)

    def learns(path, leaf):
        return frozen not in path

    state = init_state(table, optimizer, trainable=learns)
    before = jax.tree.map(np.asarray, state.params)
    step = jf.make_step(jf.loss_of("causal", run.model), optimizer, trainable=learns)
    state, _ = step(state, batch_of(0))
    for path, leaf in jax.tree.leaves_with_path(state.params):
        old = functools.reduce(lambda tree, key: tree[key.key], path, before)
        assert bool(jnp.any(leaf != old)) == learns(dotted(path), leaf), dotted(path)


def table_of(config_changes, **sizes):
    run = a_run("llama", **EXPERTS | {"n_layers": 2, "bias": "all"} | config_changes)
    return run, transformer.specs(run.model)


def test_muon_takes_the_matrix_of_each_layer_and_expert_by_itself():
    run, table = table_of({"experts.shared_ff": 8, "d_model": 16})
    rule = OPTIMIZERS["muon"].rule(replace(run.optimizer, name="muon"), table)
    # Of very different sizes, which would show in what is orthogonalized together.
    numbers = iter(range(1000))

    def gradient(spec):
        noise = np.random.default_rng(next(numbers)).standard_normal(spec.shape)
        scale = 10.0 ** np.arange(np.prod(spec.shape[:2])).clip(max=7)
        if "experts" in spec.axes:
            noise *= scale.reshape(*spec.shape[:2], *[1] * (noise.ndim - 2)) / 1e3
        return noise.astype(np.float32)

    gradients = jax.tree.map(gradient, table, is_leaf=lambda node: isinstance(node, Spec))
    params = jax.tree.map(np.zeros_like, gradients)
    updates, _ = jax.jit(lambda g: rule.update(g, rule.init(params), params))(gradients)
    found, given = updates["blocks"]["experts"], gradients["blocks"]["experts"]
    matrices = [*itertools.product(("gate", "up", "down"), range(2), range(4))]
    for name, *place in (*matrices, ("router", 0), ("router", 1)):
        matrix = np.float64(given[name][tuple(place)])
        wanted = 0.2 * np.sqrt(max(matrix.shape)) * newton_schulz(matrix)
        np.testing.assert_allclose(found[name][tuple(place)], wanted, atol=2e-3)
    # A bias of each expert is no matrix: the first step of Adam is the sign of the gradient.
    by_adam = found["up_bias"] / np.sign(given["up_bias"])
    np.testing.assert_allclose(by_adam, by_adam.mean(), rtol=1e-3)


def test_the_matrices_of_experts_decay_and_their_biases_do_not():
    run, table = table_of({})
    groups = leaf_groups(replace(run.optimizer, decay="matrices"), table)["blocks"]["experts"]
    names = {name for name, group in groups.items() if group.decay}
    assert names == {"router", "gate", "up", "down"} and "up_bias" in groups
    assert rows(table)[BIAS].sign_rate == BALANCED_RATE
