"""Invariants of learning: what a step computes, whatever its pieces, and what an update moves."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_steps import a_batch, a_run, loss_for, step_of
from products import slow_but
from shapes import VOCABULARY, made, model

from jaxformer.arrays.mesh import MESH_AXES, make_mesh
from jaxformer.arrays.params import map_specs, rows
from jaxformer.config.config_file import check
from jaxformer.config.run import RunConfig
from jaxformer.config.train import OptimizerConfig, TrainConfig
from jaxformer.models import transformer
from jaxformer.training.optimizers.groups import group_sizes, leaf_groups
from jaxformer.training.optimizers.run_optimizer import OPTIMIZERS, make_optimizer
from jaxformer.training.optimizers.schedules import SCHEDULES, make_schedule, schedule_text
from jaxformer.training.state import TrainState, init_state, state_shardings
from jaxformer.training.step import gradients, make_step

pytestmark = pytest.mark.fast


def table_of_schedules():
    """The rows of the table of rates in docs/training.md, as texts."""
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    table = page.partition("| step | 0 | 1 | W - 1 | W |")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


@functools.partial(jax.jit, static_argnums=1)
def gradient(params, run, batch):
    state = TrainState(jnp.int32(0), params, ())
    key, pieces = jax.random.key(0), run.train.n_microbatches
    grads, means = gradients(loss_for(run), state, batch, key, pieces)
    return grads, means.get("nats", means["loss"])


@pytest.mark.parametrize(
    "pieces, extras",
    [(4, {}), (2, {"label_smoothing": 0.1, "z_loss": 1e-2})],
    ids=["plain", "smoothed"],
)
def test_an_accumulated_step_equals_one_big_batch_with_unequal_weights(pieces, extras):
    params = made(model("llama"))
    whole, loss = gradient(params, a_run(train=extras), a_batch())
    split, loss_split = gradient(params, a_run(train=extras | {"microbatches": pieces}), a_batch())
    np.testing.assert_allclose(loss_split, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max())),
        split,
        whole,
    )


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_loss_is_traced_once_whatever_the_pieces(pieces):
    traced = []

    def loss(params, batch, key):
        traced.append(batch["x"].shape)
        return {"loss": ((params["w"] * batch["x"]).sum(), batch["x"].shape[0])}

    optimizer = optax.sgd(0.5)
    params = {"w": jnp.ones(3)}
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    state, _ = make_step(loss, optimizer, microbatches=pieces)(state, {"x": x})
    assert traced == [(8 // pieces, 3)]
    np.testing.assert_allclose(state.params["w"], 1 - 0.5 * x.mean(axis=0), rtol=1e-6)


def test_a_batch_without_weight_moves_nothing_and_gives_no_nan():
    run, batch = a_run(), a_batch()
    batch["weights"] = np.zeros_like(batch["weights"])
    grads, loss = gradient(made(run.model), run, batch)
    assert loss == 0 and all((leaf == 0).all() for leaf in jax.tree.leaves(grads))


def start(run):
    specs, schedule = transformer.specs(run.model), make_schedule(run.optimizer, run.train.steps)
    optimizer = make_optimizer(run.optimizer, schedule, specs)
    state = init_state(specs, optimizer, mesh=make_mesh(), seed=run.run.seed)
    return state, step_of(run, optimizer, schedule)


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "adamw", "muon"))
def test_one_batch_can_be_learnt_by_heart(name):
    rate = {"sgd": 0.3, "lion": 5e-3}.get(name, 1e-2)
    settings = {"name": name, "learning_rate": rate, "weight_decay": 0.01}
    run = a_run("gpt2", n_layers=1, optimizer=settings | {"schedule": "constant"})
    state, step = start(run)
    batch, losses = a_batch(uneven=False), []
    for _ in range(run.train.steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - np.log(VOCABULARY)) < 0.1
    assert losses[-1] < (2.5 if name == "sgd" else 0.7) and np.isfinite(losses).all()


DECAYS = [("adamw", "all"), *((name, "matrices") for name in OPTIMIZERS)]


@pytest.mark.parametrize(
    "name, decay", slow_but(DECAYS, DECAYS[0], ("muon", "matrices"), ("schedule_free", "matrices"))
)
def test_decay_shrinks_the_masked_leaves_and_no_other(name, decay):
    rates = {"learning_rate": 0.1, "warmup_steps": 0, "schedule": "constant"}
    config = OptimizerConfig(name=name, decay=decay, weight_decay=0.5, **rates)
    specs = transformer.specs(model("gpt2", n_layers=1))
    optimizer = make_optimizer(config, make_schedule(config, 10), specs)
    optimizer = optax.with_extra_args_support(optimizer)
    params = map_specs(lambda _, spec: np.ones(spec.shape, np.float32), specs)
    nothing = jax.tree.map(np.zeros_like, params)
    of_step = {"hessian_product": jax.tree.leaves, "key": jax.random.key(0)}

    def update(gradient, params):
        return optimizer.update(gradient, optimizer.init(params), params, **of_step)

    updates, _ = jax.jit(update)(nothing, params)
    moved = jax.tree.map(lambda update: float(jnp.abs(update).max()), updates)
    expected = jax.tree.map(lambda group: 0.05 if group.decay else 0.0, leaf_groups(config, specs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), moved, expected)


def test_only_matrices_decay_by_default_and_the_groups_count_every_parameter():
    specs = transformer.specs(model("gpt2"))
    matrices = ("q", "k", "v", "out", "up", "down", "tokens", "positions")
    for path, spec in rows(specs).items():
        assert spec.is_matrix == (path.split(".")[-1] in matrices), path
    groups = group_sizes(OptimizerConfig(), specs)
    leaves = rows(specs).values()
    assert sum(map(sum, groups.values())) == sum(math.prod(x.shape) for x in leaves)
    assert sum(map(len, groups.values())) == len(leaves)


def test_the_docs_have_a_row_for_each_schedule():
    assert [name for name, *_ in table_of_schedules()] == list(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("w, e, share", [(0, 10, 0.01), (3, 10, 0.2), (3, 8, 0.99)])
def test_the_rate_of_each_step_is_that_of_the_table_in_the_docs(name, w, e, share):
    f, steps = 0.1, 10
    ends = {"warmup_steps": w, "decay_steps": e, "wsd_decay_fraction": share}
    config = OptimizerConfig(schedule=name, learning_rate=1.0, final_fraction=f, **ends)
    d = max(round(share * (e - w)), 1)

    def line(k, first, length):
        return 1 + (f - 1) * min(max(k - first, 0) / length, 1)

    after = {
        "constant": lambda k: 1.0,
        "linear": lambda k: line(k, w + 1, e - w),
        "cosine": lambda k: f + (1 - f) * (1 + np.cos(np.pi * min((k - w - 1) / (e - w), 1))) / 2,
        "wsd": lambda k: line(k, e - d, d),
        "inverse_sqrt": lambda k: (w / (k - 1)) ** 0.5 if w else k**-0.5,
    }[name]
    expected = [k / (w + 1) if k <= w else after(k) for k in range(1, steps + 1)]
    schedule = make_schedule(config, steps)
    np.testing.assert_allclose([schedule(k - 1) for k in range(1, steps + 1)], expected, rtol=1e-5)
    assert schedule_text(config, steps).endswith(f"{expected[-1]:.3g} in the last step")


@pytest.mark.parametrize("row", table_of_schedules(), ids=lambda row: row[0])
def test_the_table_of_the_docs_has_the_rates_of_a_run(row):
    name, *rates = row
    config = OptimizerConfig(schedule=name, learning_rate=1.0, warmup_steps=10, final_fraction=0.1)
    schedule = make_schedule(config, 100)
    steps = (0, 1, 9, 10, 98, 99, 100)
    assert [f"{float(schedule(step)):.4f}" for step in steps] == rates


def test_a_run_may_end_within_its_warm_up_and_then_says_so():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=20)
    assert schedule_text(config, 10).startswith("0.476 in the last step")
    assert "never reaches its peak, 1" in schedule_text(config, 10)
    longer = OptimizerConfig(warmup_steps=10, decay_steps=100)
    check(RunConfig(optimizer=longer, train=TrainConfig(steps=5)))


def test_gradients_are_clipped_by_their_global_norm():
    settings = {"name": "sgd", "b1": 0.0, "clip_norm": 0.01, "weight_decay": 0.0}
    settings |= {"warmup_steps": 0, "learning_rate": 1.0, "schedule": "constant"}
    state, step = start(a_run(n_layers=1, optimizer=settings))
    before = jax.tree.map(np.array, state.params)
    state, metrics = step(state, a_batch())
    assert metrics["grad_norm"] > 0.1
    moved = jax.tree.map(lambda a, b: np.square(np.asarray(a) - b).sum(), state.params, before)
    np.testing.assert_allclose(sum(jax.tree.leaves(moved)) ** 0.5, 0.01, rtol=1e-3)


def test_dropout_depends_on_seed_and_step_alone():
    run = a_run(n_layers=1, dropout=0.2)
    state, step = start(run)
    again, _ = start(run)
    first, metrics = step(state, a_batch())
    second, metrics_again = step(again, a_batch())
    assert metrics["loss"] == metrics_again["loss"]
    jax.tree.map(np.testing.assert_array_equal, first, second)
    later, _ = start(run)
    _, metrics_later = step(later.replace(step=later.step + 5), a_batch())
    assert metrics_later["loss"] != metrics["loss"]


def test_moments_are_sharded_as_their_parameters():
    run = a_run(optimizer={"name": "muon"})
    specs, schedule = transformer.specs(run.model), make_schedule(run.optimizer, 10)
    optimizer = make_optimizer(run.optimizer, schedule, specs)
    mesh = jax.sharding.AbstractMesh((1, 2, 1, 1, 1), MESH_AXES)
    placed = state_shardings(specs, optimizer, mesh, ())
    divided = sum("fsdp" in str(place.spec) for place in jax.tree.leaves(placed.optimizer))
    assert divided >= sum(spec.is_matrix for spec in rows(specs).values())
