"""`run.profile` and `jf.Profile`: a trace of some steps."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import line, train_here, write_text

import jaxformer as jf
from jaxformer.config.config_file import check
from jaxformer.config.run import RunSettings

OPTIMIZER = optax.sgd(0.1)


def step(state: Any, batch: Any) -> Any:
    params = {"w": state.params["w"] * 0.5 + batch["x"].sum()}
    return state.replace(step=state.step + 1, params=params), {"loss": jnp.sum(batch["x"])}


def traces(folder: Path) -> list[Path]:
    return [*folder.glob("plugins/profile/*/*.xplane.pb")]


def test_a_fit_with_a_profile_is_the_same_fit(tmp_path: Path) -> None:
    batches = [{"x": np.full(2, k, np.float32)} for k in range(6)]
    found = []
    for profiled in (True, False):
        used = jf.Profile(step, "3:5", tmp_path) if profiled else step
        state = jf.init_state({"w": jnp.ones(2)}, OPTIMIZER)
        found.append(jf.fit(used, state, batches, steps=6).params)
    jax.tree.map(np.testing.assert_array_equal, *found)
    (trace,) = traces(tmp_path)
    annotations = [
        dict(event.stats).get("step_num")
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for row in plane.lines
        for event in row.events
        if event.name.startswith("train")
    ]
    assert sorted(annotations) == [3, 4]


def test_a_trace_that_an_error_cuts_short_is_ended(tmp_path: Path) -> None:
    profile = jf.Profile(step, "1:9", tmp_path)
    profile(jf.init_state({"w": jnp.ones(2)}, OPTIMIZER), {"x": np.ones(2)})
    profile.close()
    profile.close()
    assert traces(tmp_path)


@pytest.mark.parametrize("steps", ["0:3", "3:3", "9:1", "ten", "5:", "1:2:3"])
def test_steps_that_are_none_are_refused(steps: str, tmp_path: Path) -> None:
    with pytest.raises(jf.ConfigError, match=r"run.profile=.* names no steps"):
        check(jf.RunConfig(run=RunSettings(profile=steps)))
    with pytest.raises(jf.ConfigError, match="names no steps"):
        jf.Profile(step, steps, tmp_path)


@pytest.mark.slow
def test_a_run_ends_with_the_command_that_opens_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, text = tmp_path / "run", write_text(tmp_path / "text.txt")
    changes = {"train.steps": 6, "train.eval_every": 0, "run.profile": "4:6"}
    assert train_here(line(run_dir, text, changes | {"run.profile": "4:8"})) == 2
    assert "run.profile='4:8' names step 7" in capsys.readouterr().err
    assert train_here(line(run_dir, text, changes)) == 0
    assert f"xprof --logdir {run_dir}/profile" in capsys.readouterr().out
    assert len(traces(run_dir / "profile")) == 1
