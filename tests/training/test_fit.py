"""The open loop: any loss, model, data and optax optimizer through `make_step`, `init_state` and
`fit`."""

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf

pytestmark = pytest.mark.fast

STEPS, EVERY = 12, 4
OPTIMIZER = optax.adamw(1e-2)


class Points:
    """`batches[k]` is the batch of step k, with rows of unequal weight; those of some steps are
    `bad`: no numbers."""

    def __init__(self, bad=()):
        self.bad = bad

    def __getitem__(self, step):
        rng = np.random.default_rng(step)
        x = rng.standard_normal((8, 4)).astype(np.float32)
        y = x[:, :1] ** 2 * (np.nan if step in self.bad else 1)
        return {"x": x, "y": y, "weights": rng.integers(0, 3, (8, 1)).astype(np.float32)}


def params_of(seed=0):
    """A pytree that is no nested dict."""
    first, second = jax.random.split(jax.random.key(seed))
    return [
        {"w": jax.random.normal(first, (4, 16))},
        (jax.random.normal(second, (16, 1)), jnp.zeros(1)),
    ]


def loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params[0]["w"])
    if key is not None:  # noise that depends on the seed and the step alone
        hidden = hidden + 0.01 * jax.random.normal(key, hidden.shape)
    error = (hidden @ params[1][0] + params[1][1] - batch["y"]) ** 2
    weight = batch["weights"].sum()
    return {
        "loss": ((error * batch["weights"]).sum(), weight),
        "largest": (error.max() * weight, weight),
    }


def trained(steps=STEPS, directory=None, batches=None, **options):
    seen = []
    initial = {name: options.pop(name) for name in ("mesh",) if name in options}
    if "trainable" in options:
        initial["trainable"] = options["trainable"]
    state = jf.fit(
        jf.make_step(loss, OPTIMIZER, **options),
        jf.init_state(params_of(), OPTIMIZER, **initial),
        batches if batches is not None else Points(),
        steps=steps,
        checkpoints=None if directory is None else jf.Checkpoints(directory, every=EVERY),
        hooks=[
            lambda step, state, metrics: seen.append(
                (step, float(metrics["loss"]), float(metrics["largest"]))
            )
        ],
    )
    return state, seen


whole = functools.cache(trained)  # what nothing interrupts


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_mean_of_the_loss_is_what_plain_jax_gives():
    state, seen = trained(steps=3)
    params = params_of()
    moments = OPTIMIZER.init(params)
    for step in range(3):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), 0)

        def mean(params, step=step, key=key):
            total, weight = loss(params, Points()[step], key)["loss"]
            return total / weight

        value, grads = jax.jit(jax.value_and_grad(mean))(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(seen[step][1], value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, params
    )


def test_a_resumed_fit_is_bitwise_the_one_never_interrupted(tmp_path):
    expected, seen = whole()
    _, first = trained(steps=STEPS // 2, directory=tmp_path)
    state, rest = trained(directory=tmp_path)
    assert_equal(state, expected)
    assert [step for step, *_ in seen] == list(range(1, STEPS + 1))  # hooks: once a step, in order
    assert first + rest == seen and first and rest
    again, nothing = trained(directory=tmp_path)  # all steps are done
    assert_equal(again, expected)
    assert not nothing


def test_a_signal_saves_and_the_same_line_goes_on_bitwise(tmp_path):
    class Stopping(Points):
        def __getitem__(self, step):
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(step)

    with pytest.raises(jf.Interrupted, match="saved; the same command continues"):
        trained(directory=tmp_path, batches=Stopping())
    state, rest = trained(directory=tmp_path)
    assert_equal(state, whole()[0])
    assert 5 <= rest[0][0] <= 8


def test_a_mesh_of_one_device_changes_nothing():
    other, _ = trained(mesh=jf.make_mesh())
    assert_equal(other.params, whole()[0].params)


def test_params_that_were_given_outlive_the_steps():
    params = params_of()
    state = jf.init_state(params, OPTIMIZER)
    jf.make_step(loss, OPTIMIZER)(state, Points()[0])
    assert not params[0]["w"].is_deleted() and state.params[0]["w"].is_deleted()


@pytest.mark.parametrize(
    "trainable",
    [lambda path, leaf: path.startswith("1"), [{"w": False}, True]],
    ids=["function", "branches"],
)
def test_leaves_that_do_not_learn_stay_and_have_no_moments(trainable):
    state, _ = trained(steps=3, trainable=trainable)
    assert state.frozen == ("0.w",)
    assert_equal(state.params[0], params_of()[0])
    assert not np.array_equal(state.params[1][0], params_of()[1][0])
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.optimizer)}
    assert (4, 16) not in shapes and (16, 1) in shapes


def test_leaves_that_do_not_learn_are_neither_copied_nor_donated():
    params, batch = params_of(), Points()[0]
    first = jf.init_state(params, OPTIMIZER, trainable=[{"w": False}, True])
    step = jf.make_step(loss, OPTIMIZER)
    compiled = step.lower(first, batch).compile()
    after, _ = step(first, batch)
    again, _ = compiled(after, batch)
    where = params[0]["w"].unsafe_buffer_pointer()
    assert [state.params[0]["w"].unsafe_buffer_pointer() for state in (first, again)] == [where] * 2
    assert first.params[1][0].is_deleted() and after.params[1][0].is_deleted()
    expected, _ = step(step(jf.init_state(params, OPTIMIZER), batch)[0], batch)
    assert_equal(again.params[0], params[0])
    assert not np.array_equal(expected.params[0]["w"], params[0]["w"])


def test_evaluation_divides_sums_by_weights_and_comes_to_the_hooks_at_its_steps():
    batches = [Points()[100 + k] for k in range(3)]
    evaluate = jf.make_evaluate(loss, batches)
    found = evaluate(params_of())
    sums = [loss(params_of(), batch, None)["loss"] for batch in batches]
    expected = sum(float(total) for total, _ in sums) / sum(float(weight) for _, weight in sums)
    assert found.keys() == {"val_loss", "val_largest"}
    assert found["val_loss"] == pytest.approx(expected, rel=1e-6)
    seen = []

    def note(step, state, metrics):
        if "val_loss" in metrics:
            seen.append(step)

    step, state = jf.make_step(loss, OPTIMIZER), jf.init_state(params_of(), OPTIMIZER)
    jf.fit(step, state, Points(), steps=5, evaluate=evaluate, evaluate_every=2, hooks=[note])
    assert seen == [2, 4, 5]


def refused(match, **changes):
    options = {"steps": 3, "batches": Points()} | changes
    with pytest.raises(jf.ConfigError, match=match):
        trained(**options)


def test_what_cannot_be_trained_is_refused_in_one_message(tmp_path):
    refused(r"batches end before step 1 .*steps=3: give more", batches=[Points()[0]])
    refused(r"batches end before step 2", batches=iter([Points()[0], Points()[1]]))
    refused(
        r"batch\['weights'\] of shape \[8, 1\] does not divide into microbatches=3", microbatches=3
    )
    refused("trainable does not fit the parameters", trainable={"w": True})
    refused("of type int give no batch", batches=7)
    trained(steps=2, directory=tmp_path)
    refused(
        "continues after step 2, and batches is a plain iterable",
        directory=tmp_path,
        batches=iter([Points()[0]]),
    )


@pytest.mark.parametrize(
    "wrong, match",
    [
        (lambda params, batch, key: jnp.float32(1), "and must return"),
        (lambda params, batch, key: {"nats": (jnp.float32(1), 1)}, r"returned \{'nats': "),
        (lambda params, batch, key: {"loss": (batch["x"], 1)}, r"'loss': \(\(8, 4\), \(\)\)"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(wrong, match):
    with pytest.raises(jf.ConfigError, match=match):
        jf.make_step(wrong, OPTIMIZER)(jf.init_state(params_of(), OPTIMIZER), Points()[0])


def test_two_ideas_of_what_learns_are_refused():
    state = jf.init_state(params_of(), OPTIMIZER)
    step = jf.make_step(loss, OPTIMIZER, trainable=lambda path, leaf: path == "0.w")
    with pytest.raises(jf.ConfigError, match=r"differ at 1\.0, 1\.1: give both the same"):
        step(state, Points()[0])


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(jf.Diverged, match="step 6: loss nan"):
        trained(directory=tmp_path, batches=Points(bad=range(5, STEPS)))
    assert jf.Checkpoints(tmp_path).steps() == [EVERY]


def test_a_step_that_is_not_finite_changes_only_the_number_of_the_step():
    step, state = jf.make_step(loss, OPTIMIZER), jf.init_state(params_of(), OPTIMIZER)
    state, _ = step(state, Points()[0])
    before = jax.tree.map(np.array, state)
    for bad in (np.nan, np.inf):
        state, metrics = step(state, Points()[1] | {"y": Points()[1]["y"] * bad})
        assert not np.isfinite(metrics["grad_norm"])
        assert_equal((state.params, state.optimizer), (before.params, before.optimizer))
    assert int(state.step) == 3
    state, _ = step(state, Points()[3])
    assert not np.array_equal(state.params[0]["w"], before.params[0]["w"])


def test_steps_that_are_not_finite_are_skipped_up_to_a_limit():
    def run(skips):
        step, state = jf.make_step(loss, OPTIMIZER), jf.init_state(params_of(), OPTIMIZER)
        return jf.fit(step, state, Points(bad=(2, 5, 7)), steps=9, hooks=[skips])

    skips = jf.SkipSteps(limit=3)
    state = run(skips)
    assert skips.skipped == 3 and int(state.step) == 9
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    with pytest.raises(jf.Diverged, match=r"step 8: .*2 steps were skipped before"):
        run(jf.SkipSteps(limit=2))


def test_parameters_that_are_not_finite_are_neither_saved_nor_returned(tmp_path):
    def poison(updates, count, params=None):
        factor = jnp.where(count == 5, jnp.inf, 1.0)
        return jax.tree.map(lambda leaf: leaf * factor, updates), count + 1

    whole = optax.GradientTransformation(lambda params: jnp.int32(0), poison)
    optimizer = optax.chain(OPTIMIZER, whole)
    for directory in (tmp_path, None):
        with pytest.raises(jf.Diverged, match="step 6: its parameters are not finite"):
            jf.fit(
                jf.make_step(loss, optimizer),
                jf.init_state(params_of(), optimizer),
                Points(),
                steps=6,
                checkpoints=directory and jf.Checkpoints(directory, every=EVERY),
            )
    assert jf.Checkpoints(tmp_path).steps() == [EVERY]


def test_a_learning_rate_by_step_is_logged_and_moments_follow_another_optimizer():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    step = jf.make_step(
        loss, optax.sgd(schedule, momentum=0.9), schedules={"learning_rate": schedule}
    )
    state = jf.init_state(params_of(), optax.sgd(schedule, momentum=0.9), mesh=jf.make_mesh())
    for number in range(3):
        state, metrics = step(state, Points()[number])
        assert metrics["learning_rate"] == pytest.approx(1 - number / 10)


def test_labels_smoothed_or_not_are_options_of_a_loss_and_others_are_refused():
    config = jf.ModelConfig(vocab_size=11, d_model=8, n_heads=2, n_layers=1)
    params = jf.init(config, jax.random.key(0))
    tokens = jnp.ones((2, 4), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones((2, 4))}
    plain = jf.loss_of("causal", config, label_smoothing=0.0)(params, batch, None)
    smoothed = jf.loss_of("causal", config, label_smoothing=0.1)(params, batch, None)
    assert set(plain) == {"loss"} and smoothed["nats"][0] == plain["loss"][0] != smoothed["loss"][0]
    with pytest.raises(jf.ConfigError, match="takes no temperature"):
        jf.loss_of("causal", config, temperature=2.0)
    with pytest.raises(jf.ConfigError, match="'casual' is not one of 'causal'"):
        jf.loss_of("casual", config)
