"""An objective from outside the package may bring parameters: they are initialized, trained, saved,
resumed, evaluated, counted by plan and sharded as those of the model."""

from dataclasses import replace

import jax
import numpy as np
import own_objective
import pytest
from own_objective import NAME
from own_sublayer import SIZES, batch
from tiny_run import PLAIN, assert_same_run, copy_until, line, logged, saved, train_here, write_text

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.cli import main
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.run import DataConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import TrainConfig
from jaxformer.runs.objectives import OBJECTIVES, objective_specs
from jaxformer.runs.resolve import run_specs
from jaxformer.tools.plan import make_plan
from jaxformer.tools.plan_memory import planned_run

PATH = f"objective.{NAME}.weight"
CHANGES = PLAIN | {
    "data.objective": NAME,
    "optimizer.decay_steps": 12,
    "train.steps": 12,
    "train.eval_every": 6,
    "train.checkpoint_every": 6,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, NAME, own_objective.ROW)


def test_a_run_trains_saves_resumes_and_evaluates_its_parameter(tmp_path, capsys) -> None:
    text = write_text(tmp_path / "text.txt")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_here(line(whole, text, CHANGES)) == 0
    copy_until(6, whole, parts)
    assert train_here(line(parts, text, CHANGES)) == 0
    assert_same_run(parts, whole)
    assert saved(whole) == [6, 12]
    before, after = (jf.load(whole, step) for step in saved(whole))
    weights = [loaded.params["objective"][NAME]["weight"] for loaded in (before, after)]
    assert weights[0].shape == (after.config.vocab_size, 32)
    assert np.abs(weights[1] - weights[0]).max() > 1e-4
    evaluations = [entry for entry in logged(whole) if "val_loss" in entry]
    assert evaluations[-1]["val_later"] < evaluations[0]["val_later"]
    capsys.readouterr()
    assert main(["evaluate", str(whole)]) == 0
    assert f"{evaluations[-1]['val_loss']:.4f}" in capsys.readouterr().out
    # The model itself reads no parameter of the objective.
    tokens = np.array([[1, 2, 3]])
    below = {name: branch for name, branch in after.params.items() if name != "objective"}
    expected = jf.forward(below, after.config, tokens)
    np.testing.assert_array_equal(jf.forward(after.params, after.config, tokens), expected)
    adapted = jf.adapt(after.params, after.config, jf.LoRA(rank=2), jax.random.key(0))
    np.testing.assert_array_equal(jf.forward(adapted, after.config, tokens), expected)
    jf.save_pretrained(tmp_path / "hf", after.params, after.config)
    assert not (tmp_path / "hf/config.json").read_text().count(NAME)


@pytest.mark.slow
def test_a_run_may_begin_from_one_without_the_parameter_and_the_reverse(tmp_path) -> None:
    text = write_text(tmp_path / "text.txt")

    def trained(name: str, origin: str = "", **changes: object) -> set[str]:
        """The parameters of a run that begins from another."""
        settings = CHANGES | {"run.init_from": origin and tmp_path / origin, "train.steps": 2}
        arguments = line(tmp_path / name, text, settings | changes)
        assert train_here(arguments) == 0
        return rows_of(jf.load(tmp_path / name).params)

    causal = {"data.objective": "causal"}
    assert PATH not in trained("plain", **causal)
    assert PATH in trained("begun", "plain")
    assert PATH in trained("begun", "plain", **{"train.steps": 4})
    assert PATH in trained("adapted", "plain", **{"adapter.kind": "lora", "adapter.rank": 2})
    assert PATH in trained("again", "adapted")
    assert PATH not in trained("back", "again", **causal)


def rows_of(params: dict) -> set[str]:
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves}


def test_its_loss_refuses_params_without_its_parameter() -> None:
    config = with_settings(jf.ModelConfig(), SIZES)
    loss = jf.loss_of(NAME, config)
    with pytest.raises(
        jf.ConfigError, match=rf"'{NAME}' has parameters of its own.*objective_spec"
    ):
        loss(jf.init(config, jax.random.key(0)), batch(0), None)


def test_the_objectives_of_the_package_bring_no_parameters() -> None:
    """As `jf.load` assumes where their table has not been imported."""
    assert [name for name, row in OBJECTIVES.items() if row.specs] == [NAME]


def test_the_leaves_of_the_model_start_as_without_it() -> None:
    table = jf.specs(with_settings(jf.ModelConfig(), SIZES))
    extended = table | objective_specs(NAME, with_settings(jf.ModelConfig(), SIZES))
    assert rows(extended) == rows(table) | {PATH: rows(extended)[PATH]}


def test_plan_counts_its_parameter_and_an_adapter_leaves_it_trainable() -> None:
    data, train = DataConfig(sequence_length=32), TrainConfig(batch_size=8)
    run = jf.RunConfig(model=with_settings(jf.ModelConfig(), SIZES), data=data, train=train)
    own = replace(run, data=replace(data, objective=NAME))
    plans = [make_plan(planned_run(one, "h100", 2, packed=False)) for one in (run, own)]
    assert plans[1].products.per_token - plans[0].products.per_token == 6 * 61 * 32
    held = [plan.memory.held[0] for plan in plans]
    assert held[0].name == "parameters" and held[1].bytes - held[0].bytes == 4 * 61 * 32
    adapted = replace(own, adapter=AdapterConfig(kind="lora", rank=2))
    table = run_specs(adapted.data.objective, adapted.model, adapted.adapter)
    learning = {path for path, spec in rows(table).items() if spec.trainable}
    assert PATH in learning and "head.weight" not in learning
