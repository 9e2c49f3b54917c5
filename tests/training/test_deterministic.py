"""train.deterministic gives XLA its flag before the backend starts, or says what to do."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.config.run import RunConfig, RunSettings
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.runs import train_run as runs
from jaxformer.tools.plan import compiled
from jaxformer.training import deterministic
from jaxformer.training.deterministic import FLAG, OPTION, require_deterministic

ROOT = Path(__file__).parents[2]
# jf.train up to its first program, which XLA writes down with the options that it has.
FIRST_PROGRAM = """
import os
import jaxformer as jf
from jax._src.xla_bridge import backends_are_initialized
from jaxformer.config.run import RunConfig, RunSettings
from jaxformer.config.train import TrainConfig
from jaxformer.runs import train_run as runs

def first_program(config, begin):
    print("started:", backends_are_initialized())
    import jax
    jax.jit(lambda x: x + 1)(1.0).block_until_ready()

runs._train = first_program
jf.train(RunConfig(train=TrainConfig(deterministic=DETERMINISTIC), run=RunSettings(dir="nowhere")))
"""


@pytest.mark.parametrize("on", [True, False])
def test_the_flag_reaches_the_compiler_before_the_backend_starts(on: bool, tmp_path: Path) -> None:
    flags = f"--xla_backend_optimization_level=0 --xla_dump_to={tmp_path}"
    changes = {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PROGRAM.replace("DETERMINISTIC", str(on))],
        env=os.environ | changes | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "started: False" in done.stdout
    options = [file.read_text() for file in tmp_path.glob("*debug_options*")]
    assert options
    assert all(("xla_gpu_deterministic_ops: true" in text) == on for text in options)


def test_the_flag_is_added_once_to_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    for _ in range(2):
        require_deterministic()
        assert os.environ["XLA_FLAGS"] == f"--xla_gpu_autotune_level=0 {FLAG}"


def test_a_gpu_that_was_started_without_the_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = "--xla_gpu_autotune_level=0"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(deterministic, "_gpu_has_started", lambda: True)
    monkeypatch.setattr(runs, "_train", lambda run, begin: "trained")
    place = RunSettings(dir=str(tmp_path / "run"), progress="none")
    asked = RunConfig(train=TrainConfig(deterministic=True), run=place)
    with pytest.raises(ConfigError, match=r"(?s)train.deterministic needs.*Start the process anew"):
        jf.train(asked)
    assert os.environ["XLA_FLAGS"] == flags and not (tmp_path / "run").exists()
    without = TrainConfig(deterministic=False)
    assert jf.train(dataclasses.replace(asked, train=without)) == "trained"
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    assert jf.train(asked) == "trained"


def test_a_flag_that_says_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"{OPTION}=false")
    with pytest.raises(ConfigError, match=rf"XLA_FLAGS has {OPTION}=false: leave that out"):
        require_deterministic()


@pytest.mark.parametrize("on", [True, False])
def test_a_plan_compiles_with_the_flag_of_the_run(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(command: list[str], env: dict[str, str], **_: object) -> None:
        raise ConfigError(f"flags: {env['XLA_FLAGS']!r}")

    monkeypatch.setattr(compiled, "require_compiler", lambda platform: None)
    monkeypatch.setattr(compiled.subprocess, "run", stopped)
    with pytest.raises(ConfigError, match=f"^flags: {FLAG if on else ''!r}$"):
        compiled.compiled_report(RunConfig(train=TrainConfig(deterministic=on)), "h100:1x1")
