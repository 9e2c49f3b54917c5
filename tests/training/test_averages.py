"""Averages of weights: their arithmetic, that training does not depend on them, that a run keeps
them to the bit, and that every command reads them."""

import json
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import PLAIN, assert_same_run, copy_until, line, logged, train_here, write_text

import jaxformer as jf
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cli import main
from jaxformer.cli.arguments import parse
from jaxformer.config.train import Weights
from jaxformer.files import ConfigError
from jaxformer.runs.loading import SavedWeights, reader_of
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.training.optimizers.run_optimizer import with_average

STEPS = 8
CHANGES = PLAIN | {
    "optimizer.decay_steps": STEPS,
    "run.tracker": "none",
    "train.checkpoint_every": 1,
    "train.ema": 0.9,
    "train.eval_every": 4,
    "train.steps": STEPS,
}
Capture = pytest.CaptureFixture[str]


def mean(weights, decay, start):
    """Of the weights after each step from `start` + 1 on, by the definition, in float64."""
    kept = np.asarray(weights[start:] or weights[-1:], np.float64)
    shares = decay ** np.arange(len(kept))[::-1]
    return np.tensordot(shares / shares.sum(), kept, 1)


@pytest.mark.parametrize(("decay", "start"), [(0.9, 0), (0.9999, 3), (1, 0), (1, 7)])
def test_the_average_is_that_of_its_definition(decay, start):
    optimizer = with_average(optax.sgd(0.5, momentum=0.9), decay, start)
    rng = np.random.default_rng(0)
    params = {"a": jnp.ones((3, 2)), "b": None, "c": jnp.arange(4.0)}
    state, weights = optimizer.init(params), {"a": [], "c": []}
    for name in weights:  # before the first step, the initial weights
        np.testing.assert_array_equal(evaluation_weights(params, state)[name], params[name])
    for step in range(30):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name, trail in weights.items():
            trail.append(np.asarray(params[name]))
            average = evaluation_weights(params, state)[name]
            np.testing.assert_allclose(average, mean(trail, decay, start), rtol=1e-5, atol=1e-6)
            if step < max(start, 1):
                np.testing.assert_array_equal(average, params[name])


def loss(params, batch, key):
    error = jnp.square(batch["x"] @ params["w"] - batch["y"])
    return {"loss": (error.sum(), jnp.float32(error.size))}


def batch_of(step, y=1.0):
    x = np.random.default_rng(step).standard_normal((8, 4)).astype(np.float32)
    return {"x": x, "y": np.full((8, 3), y, np.float32)}


def test_training_is_the_same_with_an_average_and_a_step_left_out_is_not_averaged():
    first, plain = {"w": jnp.ones((4, 3))}, optax.adamw(1e-2)
    batches = [batch_of(step, np.nan if step == 5 else 1.0) for step in range(12)]
    seen = []
    results = {}
    for name, optimizer in (("plain", plain), ("average", with_average(plain, 0.9))):
        state = jf.fit(
            jf.make_step(loss, optimizer, microbatches=2),
            jf.init_state(first, optimizer),
            batches,
            steps=12,
            evaluate=lambda params: seen.append(params["w"]) or {},
            hooks=[jf.SkipSteps()],
        )
        results[name] = state
    np.testing.assert_array_equal(results["plain"].params["w"], results["average"].params["w"])
    state = results["average"]
    assert int(state.optimizer[1].steps) == 11
    np.testing.assert_array_equal(seen[0], results["plain"].params["w"])
    np.testing.assert_array_equal(seen[1], state.optimizer[1].average["w"])
    assert np.abs(seen[0] - seen[1]).max() > 1e-3


def test_schedule_free_weights_are_those_of_optax_and_are_read_from_a_checkpoint(tmp_path):
    optimizer = optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2)
    step, state = (
        jf.make_step(loss, optimizer),
        jf.init_state({"still": jnp.ones(2), "w": jnp.ones((4, 3))}, optimizer),
    )
    for number in range(5):
        state, _ = step(state, batch_of(number))
    expected = optax.contrib.schedule_free_eval_params(state.optimizer, state.params)
    weights = evaluation_weights(state.params, state.optimizer)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    assert np.abs(weights["w"] - state.params["w"]).max() > 1e-3
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 5)
    shapes = {
        f"params.{name}": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in state.params.items()
    }
    for choice, leaves in {"auto": weights, "trained": state.params}.items():
        read = reader_of(SavedWeights(tmp_path, 5, choice, {}), 5)(shapes)
        for name, leaf in leaves.items():
            np.testing.assert_allclose(read[f"params.{name}"], leaf, rtol=1e-6)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with an average, a checkpoint after each step, and its text."""
    folder = tmp_path_factory.mktemp("averaged")
    text = write_text(folder / "text.txt")
    assert train_here(line(folder / "run", text, CHANGES)) == 0
    return folder / "run", text


def leaves_of(path: Path, step: int | None = None, **options) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jf.load(path, step, **options).params)]


def test_the_average_of_a_run_is_that_of_its_checkpoints(averaged: tuple[Path, Path]) -> None:
    trained = [leaves_of(averaged[0], step, weights="trained") for step in range(1, STEPS + 1)]
    for step in (1, STEPS):
        average = leaves_of(averaged[0], step)
        for leaf, *trail in zip(average, *trained[:step], strict=True):
            np.testing.assert_allclose(leaf, mean(trail, 0.9, 0), rtol=1e-5, atol=1e-6)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(average, trained[-1], strict=True))


@pytest.mark.slow
def test_a_schedule_free_run_is_evaluated_at_its_average_and_continues_bitwise(
    averaged: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    changes = CHANGES | {"train.ema": 0, "optimizer.name": "schedule_free"}
    changes |= {"optimizer.schedule": "constant", "optimizer.decay_steps": 0}
    run_dir = tmp_path / "run"
    assert train_here(line(run_dir, averaged[1], changes)) == 0
    last = [entry["val_loss"] for entry in logged(run_dir) if "val_loss" in entry][-1]
    found = {name: evaluate_run(run_dir, weights=name)["val_loss"] for name in get_args(Weights)}
    assert found["auto"] == found["average"] == pytest.approx(last, rel=1e-5)
    assert abs(found["trained"] - last) > 1e-3
    again = copy_until(3, run_dir, tmp_path / "again")
    assert train_here(line(again, averaged[1], changes)) == 0
    assert_same_run(again, run_dir)
    capsys.readouterr()
    assert train_here(line(tmp_path / "both", averaged[1], changes | {"train.ema": 0.9})) == 2
    assert "does so by itself: set train.ema to 0" in capsys.readouterr().err


@pytest.mark.slow
def test_of_a_run_with_an_adapter_its_leaves_are_averaged(
    averaged: tuple[Path, Path], tmp_path: Path
) -> None:
    changes = CHANGES | {"adapter.kind": "lora", "adapter.rank": 4, "run.init_from": averaged[0]}
    changes |= {"train.ema": 1, "train.average_from": 5, "optimizer.learning_rate": 0.05}
    assert train_here(line(tmp_path / "run", averaged[1], changes)) == 0
    trained = [leaves_of(tmp_path / "run", step, weights="trained") for step in (6, 7, STEPS)]
    average, moved = leaves_of(tmp_path / "run"), 0
    for leaf, *trail in zip(average, *trained, strict=True):
        np.testing.assert_allclose(leaf, mean(trail, 1, 0), rtol=1e-5, atol=1e-6)
        moved += bool(np.abs(leaf - trail[-1]).max() > 1e-3)
    assert 0 < moved < len(average)


def test_evaluations_are_of_the_average(averaged: tuple[Path, Path], capsys: Capture) -> None:
    run_dir = averaged[0]
    lines = [entry for entry in logged(run_dir) if "val_loss" in entry]
    assert [entry["step"] for entry in lines] == [4, STEPS]
    for entry in lines:
        again = evaluate_run(run_dir, step=entry["step"])
        assert again["val_loss"] == pytest.approx(entry["val_loss"], rel=1e-5)
    trained = evaluate_run(run_dir, weights="trained")["val_loss"]
    assert abs(trained - lines[-1]["val_loss"]) > 1e-3
    assert main(["evaluate", str(run_dir), "--weights", "trained"]) == 0
    assert f"{trained:.4f}" in capsys.readouterr().out


def test_converted_weights_are_the_average_or_those_trained(
    averaged: tuple[Path, Path], tmp_path: Path
) -> None:
    for choice in ("auto", "trained"):
        target = tmp_path / choice
        assert main(["convert", str(averaged[0]), str(target), "--weights", choice]) == 0
        expected = leaves_of(averaged[0], weights=choice)
        for a, b in zip(leaves_of(target), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="keeps no average of its weights: leave out"):
        jf.load(target, weights="average")


@pytest.mark.parametrize(
    "command", [("sample",), ("evaluate",), ("attention", "--prompt", "a"), ("convert", "target")]
)
def test_every_command_that_reads_a_model_says_which_weights(command: tuple[str, ...]) -> None:
    name, *rest = command
    assert parse(name, ["run", *rest, "--weights", "trained"])[0].weights == "trained"
    assert parse(name, ["run", *rest])[0].weights == "auto"


def test_a_run_without_an_average_says_so(whole: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"reference keeps no average of its weights: leave out"):
        jf.load(whole[0], weights="average")
    trained = leaves_of(whole[0], weights="trained")
    for a, b in zip(leaves_of(whole[0]), trained, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="weights='ema' is not one of auto, trained, average"):
        jf.load(whole[0], weights="ema")


def test_a_run_that_was_begun_without_an_average_is_not_continued_with_one(
    averaged: tuple[Path, Path], capsys: Capture
) -> None:
    before = json.loads((averaged[0] / "config.json").read_text())
    assert train_here(line(*averaged, CHANGES | {"train.ema": 0.5})) == 2
    assert "train.ema" in capsys.readouterr().err
    assert json.loads((averaged[0] / "config.json").read_text()) == before
