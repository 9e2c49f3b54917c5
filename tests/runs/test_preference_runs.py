"""Runs with preferences: the reference is the start of the run, whatever interrupts it, on any
mesh, and for every command."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_run import (
    assert_same_run,
    contents,
    copy,
    copy_until,
    figures,
    finish,
    fork,
    line,
    logged,
    params_of,
    train_here,
    write_text,
)

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.run import RunConfig
from jaxformer.report import read_metrics
from jaxformer.runs.config import load_config
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.tools.plan import make_plan
from jaxformer.tools.plan_memory import planned_run

pytestmark = pytest.mark.slow

STEPS = 6
CHANGES = {
    "data.objective": "dpo",
    "data.sequence_length": 32,
    "optimizer.decay_steps": STEPS,
    "optimizer.learning_rate": 5e-3,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 0,
    "train.checkpoint_every": 2,
    "train.eval_every": 2,
    "train.preference_beta": 0.3,
    "train.steps": STEPS,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a run to start from, "start", and pairs whose chosen completion has its
    words in order, and the rejected one in the opposite order."""
    folder = tmp_path_factory.mktemp("preferences")
    text = write_text(folder / "text.txt")
    few = dict.fromkeys(("train.eval_every", "train.checkpoint_every"), 0)
    few |= {"train.steps": 8}
    assert train_here(line(folder / "start", text, few | {"optimizer.decay_steps": 8})) == 0
    sentences = [words.split() for words in text.read_text().split("\n<|endoftext|>\n")]
    with (folder / "pairs.jsonl").open("w") as file:
        for words in sentences:
            pair = {"prompt": " ".join(words[:3])}
            completion = sorted(words[3:9])
            for side, told in (("chosen", completion), ("rejected", completion[::-1])):
                pair[side] = "".join(f" {word}" for word in told)
            file.write(json.dumps(pair) + "\n")
    return folder


def arguments(base, name, changes=None):
    start = {"run.init_from": base / "start"}
    return line(base / name, base / "pairs.jsonl", CHANGES | start | (changes or {}))


@pytest.fixture(scope="module")
def whole(base):
    assert train_here(arguments(base, "whole")) == 0
    return base / "whole"


def test_the_margin_rises_from_zero_and_is_logged(whole):
    lines = [entry for entry in read_metrics(whole) if "loss" in entry]
    assert lines[0]["reward_margin"] == 0  # the dropout of the model is left out
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    evaluations = [entry for entry in read_metrics(whole) if "val_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 4, 6]
    assert evaluations[-1]["val_reward_margin"] > 0.05
    assert evaluations[-1]["val_reward_accuracy"] > 0.9
    assert evaluations[-1]["val_loss"] < np.log(2) - 0.02
    names = ("reward_margin", "reward_accuracy", "log_prob_chosen", "log_prob_rejected", "kl")
    assert all(f"val_{name}" in evaluations[-1] and name in lines[0] for name in names)
    assert lines[-1]["tokens"] == STEPS * 8 * 2 * 32  # both sides of eight pairs


def test_a_dropout_that_is_left_out_is_said_once(base, capsys):
    one = {"train.steps": 1, "train.eval_every": 0}
    of_weights = {"model.dropout": 0.0, "model.attention.dropout": 0.2}
    for name, changes, left_out in (
        ("said", {}, "model.dropout=0.1"),
        ("weights", of_weights, "model.attention.dropout=0.2"),
        ("none", {"model.dropout": 0.0}, ""),
    ):
        assert train_here(arguments(base, name, one | changes)) == 0
        out = " ".join(capsys.readouterr().out.split())
        told = f"dpo does not apply {left_out}"
        assert out.count("does not apply") == bool(left_out), out
        assert not left_out or told in out
    names = ("said", "weights", "none")
    losses = {name: logged(base / name)[0]["loss"] for name in names}
    assert losses["said"] == losses["weights"] == losses["none"]


def test_commands_compare_with_the_same_reference(base, whole, capsys):
    last = [entry for entry in read_metrics(whole) if "val_loss" in entry][-1]
    found = evaluate_run(whole)
    assert found == pytest.approx({name: last[name] for name in found}, rel=1e-5, abs=1e-6)
    capsys.readouterr()
    assert main(["evaluate", str(whole)]) == 0
    told = capsys.readouterr().out
    assert f"loss {last['val_loss']:.4f} per pair" in told and "reward accuracy" in told


def test_the_reference_is_in_no_checkpoint_and_held_once(whole):
    record = json.loads((whole / "reference.json").read_text())
    assert len(record["fingerprint"]) == 16
    size = sum(path.stat().st_size for path in (whole / "checkpoints/6").rglob("*"))
    assert size < 3.5 * 4 * sum(leaf.size for leaf in params_of(whole))


def test_another_start_than_that_of_the_run_is_refused(base, whole, tmp_path, capsys):
    copied = copy(base / "start", tmp_path / "start")
    run_dir = tmp_path / "run"
    own = {"run.dir": run_dir, "run.init_from": copied}
    assert train_here(arguments(base, "x", own | {"train.steps": 2})) == 0
    other = jf.load(base / "whole")
    shutil.rmtree(copied / "checkpoints")
    with jf.Checkpoints(copied) as checkpoints:
        checkpoints.save({"params": other.params}, 8)
    before = contents(run_dir)
    assert train_here(arguments(base, "x", own)) == 2
    error = capsys.readouterr().err
    assert "is not the model that this run began with" in error and "reference.json" in error
    assert contents(run_dir) == before
    with pytest.raises(jf.ConfigError, match="is not the model that this run began with"):
        evaluate_run(run_dir)
    shutil.rmtree(copied)
    with pytest.raises(jf.ConfigError, match=r"with which the loss compares .* no config"):
        evaluate_run(run_dir)


@pytest.mark.parametrize("objective", ["dpo", "ipo"])
def test_without_a_start_there_is_nothing_to_compare_with(objective, base, capsys):
    changes = {"run.init_from": "", "data.objective": objective}
    assert train_here(arguments(base, "never", changes)) == 2
    error = capsys.readouterr().err
    assert f"data.objective={objective} compares the model with the one" in error
    assert "run.init_from is empty" in error and not (base / "never").exists()


def test_eight_devices_equal_one(base):
    """On replicas, shards and tensor parallelism at once, in two microbatches. Plain SGD, because
    Adam divides a gradient that is nothing but rounding by its own size."""
    alike = {"model.dropout": 0.0, "train.steps": 2, "train.eval_every": 0}
    alike |= {"optimizer.name": "sgd", "optimizer.learning_rate": 0.5}
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2}
    eight = fork(arguments(base, "eight", alike | mesh), XLA_FLAGS=flags)
    finish(fork(arguments(base, "one", alike)))
    out, _ = finish(eight)
    assert "data 2, fsdp 2, expert 1, context 1, tensor 2" in out
    found, expected = figures(base / "eight"), figures(base / "one")
    for entry in (found[0], expected[0]):
        del entry["reward_accuracy"]  # of margins of 0, which rounding decides
    assert found == [pytest.approx(entry, rel=1e-4, abs=1e-5) for entry in expected]
    assert abs(expected[-1]["val_reward_margin"]) > 1e-3
    for a, b in zip(params_of(base / "eight"), params_of(base / "one"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_reference_of_an_adapter_is_the_model_below_it(base):
    adapter = {"adapter.kind": "lora", "adapter.rank": 2, "model.dropout": 0.0}
    assert train_here(arguments(base, "lora", adapter)) == 0
    assert not (base / "lora" / "reference.json").exists()
    lines = read_metrics(base / "lora")
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert lines[0]["kl"] == lines[0]["reward_margin"] == 0
    last = [entry for entry in lines if "val_loss" in entry][-1]
    assert last["val_reward_margin"] > 0 and last["val_loss"] < np.log(2)
    found = evaluate_run(base / "lora")
    assert found == pytest.approx({name: last[name] for name in found}, rel=1e-5, abs=1e-5)


def test_kto_learns_from_unpaired_records_and_resumes(base, capsys):
    records = []
    for i, text in enumerate((base / "pairs.jsonl").read_text().splitlines()):
        pair = json.loads(text)
        side = ("chosen", "rejected")[i % 2]
        records.append({"prompt": pair["prompt"], "completion": pair[side], "label": i % 2 == 0})
    (base / "unpaired.jsonl").write_text("\n".join(map(json.dumps, records)))
    changes = {"data.objective": "kto", "data.train": base / "unpaired.jsonl"}
    assert train_here(arguments(base, "kto", changes | {"train.microbatches": "auto"})) == 0
    lines = [entry for entry in read_metrics(base / "kto") if "loss" in entry]
    assert lines[0]["loss"] == pytest.approx(0.5, rel=1e-5) and lines[0]["kl"] == 0
    last = [entry for entry in read_metrics(base / "kto") if "val_loss" in entry][-1]
    assert last["val_reward_desirable"] > last["val_reward_undesirable"]
    resumed = copy_until(2, base / "kto", base / "kto resumed")
    assert train_here(arguments(base, resumed.name, changes | {"train.microbatches": "auto"})) == 0
    assert_same_run(resumed, base / "kto")

    (base / "unpaired.jsonl").write_text(json.dumps(records[0] | {"label": "good"}))
    assert train_here(arguments(base, "never", changes)) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "'good' has to be one of true, 1, false, 0" in error and "line 1" in error


def test_orpo_needs_no_start(base):
    changes = {"run.init_from": "", "data.objective": "orpo", "tokenizer.path": base / "start"}
    assert train_here(arguments(base, "orpo", changes)) == 0
    last = [entry for entry in read_metrics(base / "orpo") if "val_loss" in entry][-1]
    assert "val_kl" not in last and not (base / "orpo" / "reference.json").exists()


def test_a_plan_counts_both_sides_and_the_reference():
    def plan(objective) -> tuple[RunConfig, object]:
        asked = [f"data.objective={objective}", "tokenizer.vocab_size=512"]
        config = load_config(Path(__file__).parents[2] / "configs/finetune.py", asked)
        return make_plan(planned_run(config, "h100", 1))

    causal, simpo, dpo = map(plan, ("causal", "simpo", "dpo"))
    assert simpo.products.model == 2 * causal.products.model
    assert dpo.products.model == pytest.approx(4 / 3 * simpo.products.model, rel=1e-6)
    held = [{line.name: line.bytes for line in found.memory.held} for found in (simpo, dpo)]
    assert held[1]["parameters of the reference"] == held[1]["parameters"] == held[0]["parameters"]
    assert "parameters of the reference" not in held[0]
    assert simpo.memory.temporary > 1.5 * causal.memory.temporary
