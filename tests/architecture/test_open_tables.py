"""Tables of names are open: a row added from outside the package is a value of its setting."""

import importlib
import typing
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import ROOT

import jaxformer as jf
from jaxformer.arrays.params import Spec, ones
from jaxformer.config import model as config_model
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig, from_json, to_json
from jaxformer.config.settings import Table, TableAt, choices, hints
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.layers.ffn import ACTIVATIONS
from jaxformer.layers.norm import NORMS, NormRow
from jaxformer.runs.config import parse_arguments
from jaxformer.training.optimizers.run_optimizer import OPTIMIZERS, make_optimizer
from jaxformer.training.optimizers.schedules import SCHEDULES, make_schedule
from jaxformer.training.optimizers.update_rule import UpdateRule

TINY = {"vocab_size": 32, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_length": 16}
CONFIG_FILE = """
import jax.numpy as jnp

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig
from jaxformer.layers.ffn import ACTIVATIONS

ACTIVATIONS["cubed"] = lambda x: x**3
config = RunConfig(model=ModelConfig(activation="cubed"))
"""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    ACTIVATIONS.pop("cubed", None)


def tables() -> dict[str, tuple[object, str]]:
    """Every setting that a row can be added to: its type, and where its table is."""
    found = {}
    for name, hint in hints(RunConfig).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, TableAt):
                found[name] = (hint, extra.path)
    return found


def learned(config: jf.ModelConfig) -> float:
    """By how much one step of SGD lowers the loss of a model on one batch."""
    params = jf.init(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 32, (4, 12))

    def loss(params):
        nats = optax.softmax_cross_entropy_with_integer_labels
        return nats(jf.forward(params, config, tokens[:, :-1]), tokens[:, 1:]).mean()

    @jax.jit
    def lowered(params):
        before, gradient = jax.value_and_grad(loss)(params)
        return before - loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))

    return float(lowered(params))


@pytest.mark.parametrize("setting", tables())
def test_a_row_added_to_a_table_is_a_value_of_its_setting(setting: str) -> None:
    hint, path = tables()[setting]
    module, _, name = path.rpartition(".")
    table = getattr(importlib.import_module(module), name)
    assert isinstance(table, Table) and "mine" not in choices(hint)
    table["mine"] = next(iter(table.values()))
    assert choices(hint)[-1] == "mine"
    del table["mine"]
    assert "mine" not in choices(hint)


def test_the_tables_that_the_readme_names_are_open() -> None:
    names = {path.rpartition(".")[2] for _, path in tables().values()}
    assert names == {
        *("ACTIVATIONS", "NORMS", "INITIALIZERS", "FREQUENCIES", "KERNELS"),
        *("GROUPED_KERNELS", "PARAMETRIZATIONS"),
        *("MIXERS", "FEED_FORWARDS", "EMBEDDINGS", "HEADS"),
        *("OPTIMIZERS", "STORES", "SCHEDULES", "OBJECTIVES", "TRACKERS"),
    }


def test_an_added_activation_may_be_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    ACTIVATIONS["cubed"] = lambda x: x**3
    monkeypatch.setattr(config_model, "GATED", {*config_model.GATED, "cubed"})
    gated = jf.ModelConfig(**TINY, activation="cubed", d_ff=32)
    assert "gate" in jf.init(gated, jax.random.key(0))["blocks"]["ffn"]
    assert learned(gated) > 0.001


def test_an_added_norm_brings_its_own_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(params, config, x):
        return x / jnp.abs(x).max(-1, keepdims=True)

    monkeypatch.setitem(NORMS, "max", NormRow(lambda config: {}, run))
    config = jf.ModelConfig(**TINY, norm="max")
    assert not jf.init(config, jax.random.key(0))["blocks"]["ffn_norm"]
    assert learned(config) > 0.001


def test_an_added_optimizer_and_schedule_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "signs", UpdateRule(lambda c, specs: optax.scale_by_sign()))
    monkeypatch.setitem(SCHEDULES, "half", lambda c, steps: lambda step: c.learning_rate / 2)
    rates = {"learning_rate": 0.5, "warmup_steps": 0, "weight_decay": 0}
    config = OptimizerConfig(name="signs", schedule="half", **rates)
    schedule = make_schedule(config, 10)
    optimizer = make_optimizer(config, schedule, {"w": Spec((2,), ("norm",), ones)})
    assert float(schedule(3)) == 0.25
    weights, gradients = {"w": jnp.ones(2)}, {"w": jnp.array([3.0, -7.0])}
    updates, _ = optimizer.update(gradients, optimizer.init(weights), weights)
    np.testing.assert_allclose(updates["w"], [-0.25, 0.25])


@pytest.mark.filterwarnings("error:The field")
def test_an_added_name_passes_through_json_config_files_and_the_command_line(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CONFIG_FILE)
    config = jf.load_config(file)
    assert config.model.activation == "cubed"
    assert from_json(to_json(config), "here") == config
    (tmp_path / "config.json").write_text(to_json(config))
    assert jf.load_config(tmp_path / "config.json") == config
    with pytest.raises(ConfigError, match="'squared'"):
        jf.load_config(file, ["model.activation=squared"])
    assert jf.load_config(file, ["model.activation=gelu"]).model.activation == "gelu"
    plain = read_config(ROOT / "configs/quickstart.py")
    found = parse_arguments(plain, ["--model.activation", "cubed"], program="train.py")
    assert found.model.activation == "cubed"


def test_a_name_that_nothing_added_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        jf.ModelConfig(activation="cubed")
    said = str(raised.value)
    assert "model.activation='cubed' is not one of 'swiglu'" in said
    assert "layers.ffn.ACTIVATIONS" in said
    ACTIVATIONS["cubed"] = lambda x: x**3
    written = to_json(RunConfig(model=jf.ModelConfig(activation="cubed")))
    with pytest.raises(ConfigError, match="'cubed'"):
        jf.ModelConfig(activation="squared")
    del ACTIVATIONS["cubed"]
    with pytest.raises(ConfigError, match=r"run/config.json.*cubed.*layers.ffn.ACTIVATIONS"):
        from_json(written, "run/config.json")
    with pytest.raises(ConfigError, match=r"'cubed' for argument '--model.activation'"):
        jf.load_config(ROOT / "configs/quickstart.py", ["model.activation=cubed"])


def test_a_setting_without_a_table_is_closed() -> None:
    with pytest.raises(ConfigError, match=r"'decoder', 'encoder', 'encoder_decoder'\.$"):
        jf.ModelConfig(family="other")


def test_a_table_has_a_row_for_each_value_of_its_setting() -> None:
    names = typing.Literal["auto", "a", "b"]
    assert Table(names, {"a": 1, "b": 2}, besides=("auto",))["b"] == 2
    with pytest.raises(ConfigError, match="'b'"):
        Table(names, {"a": 1}, besides=("auto",))
    with pytest.raises(ConfigError, match="'c'"):
        Table(names, {"a": 1, "b": 2, "c": 3}, besides=("auto",))
