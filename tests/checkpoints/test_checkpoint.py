"""What lies on disk is what was trained, and nothing else is ever taken for it."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import EVERY, STEPS, contents, copy, line, params_of, reference

import jaxformer as jf
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.files import ConfigError
from jaxformer.training.state import TrainState


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)[0]


def test_a_run_loads_as_the_model_it_trained(trained: Path) -> None:
    loaded = jf.load(trained)
    config = jf.load_config(trained / "config.json").model
    assert loaded.config == config and config.vocab_size == 300
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(
        jnp.shape, jf.init(config, jax.random.key(0))
    )
    assert loaded.tokenizer is not None and loaded.tokenizer.vocab_size == 300
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the cat sees")) == "the cat sees"
    logits = jf.forward(
        loaded.params, loaded.config, jnp.array([loaded.tokenizer.encode("the cat sees the")])
    )
    assert bool(jnp.isfinite(logits).all())


def test_a_step_is_loaded_by_its_number_and_the_newest_without_one(trained: Path) -> None:
    newest, last, first = params_of(trained), params_of(trained, STEPS), params_of(trained, EVERY)
    assert all(np.array_equal(a, b) for a, b in zip(newest, last, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(newest, first, strict=True))


def test_what_is_no_run_or_has_no_such_step_says_so(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give the run\.dir"):
        jf.load(tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        jf.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"no checkpoint of step 3: it holds steps \[{EVERY}, "):
        jf.load(trained, step=3)
    shutil.copy(trained / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint: training has not saved one yet"):
        jf.load(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json"]


def test_a_checkpoint_of_another_shape_is_refused_before_an_array_is_read(
    trained: Path, tmp_path: Path
) -> None:
    run_dir = copy(trained, tmp_path / "run")
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    config["model"] |= {"n_layers": 3, "tied_head": False}
    path.write_text(json.dumps(config))
    for entry in run_dir.glob("checkpoints/*/state"):
        shutil.rmtree(entry)
    with pytest.raises(ConfigError) as raised:
        jf.load(run_dir)
    message = str(raised.value)
    assert (
        "params.blocks.attention.q: float32[2, 32, 2, 16] in the checkpoint, float32[3, 32, 2, 16]"
        " in the model" in message
    )
    assert (
        "params.head.weight: not in the checkpoint" in message
        or "params.head: not in the checkpoint" in message
    )


def test_a_state_of_another_optimizer_is_refused_with_both_sides_named(
    trained: Path, tmp_path: Path
) -> None:
    run_dir = copy(trained, tmp_path / "run")
    before = contents(run_dir / "checkpoints")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), jf.load(run_dir).params
    )
    target = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=here), params, {"velocity": params}
    )  # type: ignore[arg-type]
    with Checkpoints(run_dir) as checkpoints, pytest.raises(ConfigError) as raised:
        checkpoints.restore(target, print)
    assert "optimizer.velocity.embed.tokens: not in the checkpoint" in str(raised.value)
    assert "only in the checkpoint" in str(raised.value)
    assert contents(run_dir / "checkpoints") == before


def test_a_pipe_in_a_checkpoint_is_damage_and_not_waited_for(trained: Path, tmp_path: Path) -> None:
    for name in ("manifest.ocdbt", "_METADATA", "metadata"):
        run_dir = copy(trained, tmp_path / name)
        path = next((run_dir / "checkpoints" / str(STEPS)).rglob(name))
        path.unlink()
        os.mkfifo(path)
        with pytest.warns(UserWarning, match=f"{name} is no regular file"):
            jf.load(run_dir)


def test_a_save_is_untouched_by_the_steps_that_reuse_its_buffers(tmp_path: Path) -> None:
    advance = jax.jit(
        lambda state: TrainState(
            state.step + 1, {"w": state.params["w"] * 0.5 + 1}, {"m": state.optimizer["m"] + 1}
        ),
        donate_argnums=0,
    )
    w = np.random.default_rng(0).standard_normal((1024, 2048)).astype(np.float32)
    state = TrainState(jnp.int32(0), {"w": jnp.asarray(w)}, {"m": jnp.zeros((1024, 2048))})
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), state)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(1, 7):
            donated = state
            state = advance(donated)
            # JAX reuses all buffers but those that are being saved.
            if step % 2:
                assert donated.params["w"].is_deleted()
                checkpoints.save(state, step)
    for step in (5, 3, 1):
        with Checkpoints(tmp_path, keep=9) as checkpoints:
            restored = checkpoints.restore(target, print)
        assert restored is not None and int(restored.step) == step
        expected = w
        for _ in range(step):
            expected = expected * np.float32(0.5) + np.float32(1)
        np.testing.assert_array_equal(restored.params["w"], expected)
        np.testing.assert_array_equal(restored.optimizer["m"], np.full_like(w, step))
        shutil.rmtree(tmp_path / "checkpoints" / str(step))


def test_train_in_python_is_the_job_of_the_command(trained: Path, tmp_path: Path) -> None:
    text = trained.parent / "reference.txt"
    config, *rest = line(copy(trained, tmp_path / "run"), text, {"run.progress": "none"})
    overrides = [
        f"{name.removeprefix('--')}={value}"
        for name, value in zip(rest[::2], rest[1::2], strict=True)
    ]
    result = jf.train(jf.load_config(config, overrides))
    assert result.run_dir == tmp_path / "run" and result.metrics[-1]["step"] == STEPS
    for a, b in zip(jax.tree.leaves(result.params), params_of(trained), strict=True):
        np.testing.assert_array_equal(a, b)
