"""Runs that learn from rewards of their own answers: what answers are drawn, that nothing which
interrupts a run changes them, on any mesh, with adapters, and what is refused."""

import importlib.util
import json
import os
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from tiny_run import assert_same_run, copy_until, figures, finish, fork, line, train_here

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config import DataConfig, GRPOConfig, RunSettings, TrainConfig, with_settings
from jaxformer.generation.sampling import Sampling, draw
from jaxformer.losses.policy import grpo_loss
from jaxformer.report import read_metrics
from jaxformer.runs.resolve import resolve
from jaxformer.runs.rollouts import Rollouts
from jaxformer.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
# Of this file, as a module that a run finds in the current directory.
SOURCE = """
def length_of(prompts, answers, targets):
    return [len(answer) / 10 for answer in answers]

def too_few(prompts, answers, targets):
    return [1.0]

def unknown(prompts, answers, targets):
    return [float("nan")] * len(answers)

def near_target(prompts, answers, targets):
    open("seen.txt", "a").write(repr([prompts, targets]) + "\\n")
    return [float(target in answer) for answer, target in zip(answers, targets, strict=True)]

number = 1
"""
MODEL = jf.ModelConfig(vocab_size=257, d_model=32, n_layers=1, n_heads=2, max_length=32)
RUN = jf.RunConfig(
    run=RunSettings(seed=3),
    model=MODEL,
    data=DataConfig(objective="grpo", source_length=16, sequence_length=24),
    grpo=GRPOConfig(reward="scoring:length_of", group=4, new_tokens=8, temperature=0.9, kl=0.1),
    train=TrainConfig(batch_size=8, microbatches=1),
)
TEXTS = ["a", "some text"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "scoring.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sharp_params(model):
    """Sharper than initial values."""
    return jax.tree.map(lambda leaf: 3 * leaf, jf.init(model, jax.random.key(0)))


@pytest.fixture(scope="module")
def params():
    return sharp_params(MODEL)


def rollouts_of(**changes):
    run = with_settings(RUN, {f"grpo.{name}": value for name, value in changes.items()})
    mesh = jf.make_mesh(devices=jax.devices()[:1])
    return Rollouts(resolve(run, mesh, 1), byte_tokenizer())


def prompts_of(*texts):
    """A batch of prompts, as `PromptTemplate` makes them."""
    batch = {name: np.zeros((len(texts), 16), np.int32) for name in ("tokens", "segment_ids")}
    for row, text in enumerate(texts):
        ids = byte_tokenizer().encode(text)
        batch["tokens"][row, : len(ids)] = ids
        batch["segment_ids"][row, : len(ids)] = 1
    return batch | {"expected": np.zeros((len(texts), 24), np.int32)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ffn", "experts"])
def test_with_exact_sums_the_sampler_and_the_step_agree_to_the_bit(folder, kind):
    settings = {"model.feed_forward": kind, "model.experts.n": 4 if kind == "experts" else 0}
    run = with_settings(RUN, {"model.exact": True} | settings)
    params = sharp_params(run.model)
    mesh = jf.make_mesh(devices=jax.devices()[:1])
    rollouts = Rollouts(resolve(run, mesh, 1), byte_tokenizer())
    batch = rollouts(prompts_of(*TEXTS), params, params, 5)
    sums = grpo_loss(params, run.model, batch, grpo=run.grpo)
    assert float(sums["mismatch_kl"][0]) == 0 and float(sums["mismatch_kl"][1]) > 0


def test_the_probabilities_of_the_sampler_are_those_of_the_step(folder, params):
    """Each answer is drawn again, from the logits of the forward pass of the step."""
    start = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    rollouts = rollouts_of()
    batch = rollouts(prompts_of(*TEXTS), params, start, 5)
    sums = grpo_loss(params, MODEL, batch, grpo=RUN.grpo)
    mismatch = float(sums["mismatch_kl"][0] / sums["mismatch_kl"][1])
    assert 0 < abs(mismatch) < 1e-6
    assert float(sums["clipped"][0]) == 0 and float(sums["kl"][0]) > 0
    rules = Sampling(temperature=0.9, vocab_size=257)
    logits = jf.forward(params, MODEL, batch["tokens"], segment_ids=batch["segment_ids"])
    key = jax.random.fold_in(jax.random.key(3), 5)
    lengths = []
    for row, (targets, weights) in enumerate(zip(batch["targets"], batch["weights"], strict=True)):
        places = np.flatnonzero(weights)
        lengths.append(len(places))
        assert 1 <= len(places) <= 8
        for count, place in enumerate(places):
            of_token = jax.random.fold_in(jax.random.fold_in(key, row), count)
            assert draw(logits[row, place][None], of_token, rules)[0] == targets[place]
    # Each answer is that of its prompt, four to each.
    for row, (tokens, real) in enumerate(zip(batch["tokens"], batch["segment_ids"], strict=True)):
        text = byte_tokenizer().decode(np.asarray(tokens)[np.asarray(real) > 0])
        assert text.startswith(TEXTS[row // 4])
    groups = np.asarray(batch["advantages"]).reshape(2, 4)
    np.testing.assert_allclose(groups.sum(axis=1), 0, atol=1e-5)
    # Other draws for another step, and none for rows of zeros.
    other = rollouts(prompts_of(*TEXTS), params, start, 6)
    assert (np.asarray(other["targets"]) != np.asarray(batch["targets"])).any()
    filled = rollouts(prompts_of(TEXTS[0], ""), params, start, 5)
    for name, array in filled.items():
        np.testing.assert_array_equal(array[:4], batch[name][:4], err_msg=name)
        assert not np.asarray(array[4:]).any() or "log_probs" in name


def test_a_step_in_microbatches_is_the_whole_one(folder, params):
    batch = rollouts_of()(prompts_of(*TEXTS), params, params, 0)
    after = []
    for microbatches in (1, 2):
        step = jf.make_step(
            lambda p, b, key: grpo_loss(p, MODEL, b, grpo=RUN.grpo),
            optax.sgd(0.1),
            microbatches=microbatches,
            rowwise=True,
        )
        after.append(step(jf.init_state(params, optax.sgd(0.1)), batch)[0].params)
    for a, b in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("", "grpo.reward='' cannot be used"),
        ("scoring:nothing", "has no attribute 'nothing'.*name a function as module:function"),
        ("no_rewards:length_of", "No module named 'no_rewards'"),
        ("scoring:number", "it is of type int"),
        ("scoring:too_few", r"an array \[1\]: it must return a finite number for each of the 8"),
        ("scoring:unknown", "a finite number for each of"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused(reward, message, folder, params):
    with pytest.raises(jf.ConfigError, match=message):
        rollouts_of(reward=reward)(prompts_of(*TEXTS), params, params, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpo.group": 3}, "train.batch_size=8 answers do not divide into groups of grpo.group=3"),
        ({"grpo.new_tokens": 9}, "data.source_length=16 tokens and an answer of grpo.new_tokens=9"),
        ({"data.source_length": 0}, "a prompt of data.source_length=24 tokens"),
        ({"data.objective": "causal"}, "grpo.reward='scoring:length_of' and the other settings"),
        ({"data.packing": "best_fit"}, "data.packing=best_fit cannot be had"),
        ({"train.products": "fp8"}, "train.products=fp8: the objective 'grpo' compares"),
        ({"train.z_loss": 0.1}, "the loss of the objective 'grpo' takes no z_loss"),
        ({}, "data.objective=grpo compares the model with the one that the run starts from"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message, folder):
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 20)
    run = with_settings(RUN, {"run.dir": "run", "data.train": "prompts.jsonl"})
    run = with_settings(run, {"tokenizer.kind": "bytes", "data.target_field": ""} | changes)
    if "products" in message or "z_loss" in message:
        run = with_settings(run, {"grpo.kl": 0.0})
    with pytest.raises(jf.ConfigError, match=message):
        jf.train(run)


def test_several_processes_are_refused(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(jf.ConfigError, match="answers are written by one process"):
        rollouts_of()


# Whole runs, from a run whose words are learned, on the prompts of examples/grpo.py.
STEPS = 6
CHANGES = {
    "data.objective": "grpo",
    "data.packing": "stream",
    "data.source_length": 32,
    "data.sequence_length": 48,
    "data.target_field": "",
    "grpo.group": 4,
    "grpo.kl": 0.02,
    "grpo.lengths": "tokens",
    "grpo.new_tokens": 8,
    "grpo.reward": "examples.grpo:rewards_of",
    "model.dropout": 0.0,
    "model.n_layers": 1,
    "optimizer.decay_steps": STEPS,
    "optimizer.learning_rate": 5e-3,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 0,
    "train.batch_size": 16,
    "train.checkpoint_every": 2,
    "train.eval_every": 3,
    "train.microbatches": 1,
    "train.steps": STEPS,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    spec = importlib.util.spec_from_file_location("prompts", ROOT / "examples" / "grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    records = [json.dumps({"prompt": text}) for text in module.BEGINNINGS]
    (folder / "brackets.jsonl").write_text("\n".join(records))
    few = {"model.n_layers": 1, "optimizer.name": "adamw", "train.eval_every": 0}
    few |= {"train.steps": 40, "optimizer.decay_steps": 40, "train.checkpoint_every": 0}
    assert train_here(line(folder / "start", ROOT / "examples" / "*.py", few)) == 0
    return folder


def arguments(base, name, changes=None):
    start = {"run.init_from": base / "start"}
    return line(base / name, base / "brackets.jsonl", CHANGES | start | (changes or {}))


@pytest.fixture(scope="module")
def whole(base):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert train_here(arguments(base, "whole")) == 0
    return base / "whole"


@pytest.mark.slow
def test_the_log_has_what_was_written_and_the_held_out_prompts_are_answered(whole):
    lines = read_metrics(whole)
    steps = [entry for entry in lines if "loss" in entry]
    for entry in steps:
        assert 0 <= entry["reward"] <= 1 and 1 <= entry["answer_length"] <= 8
        assert 0 <= entry["mismatch_kl"] < 1e-6 and entry["clipped"] == 0
    assert steps[0]["kl"] == 0 < steps[-1]["kl"]
    evaluations = [entry for entry in lines if "val_reward" in entry]
    assert [entry["step"] for entry in evaluations] == [3, 6]
    assert "drawn_log_probs" not in (whole / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(base, whole, monkeypatch):
    monkeypatch.chdir(ROOT)
    resumed = copy_until(2, whole, base / "resumed")
    assert train_here(arguments(base, "resumed")) == 0
    assert_same_run(resumed, whole)


@pytest.mark.slow
def test_an_adapter_begins_at_its_reference_and_is_resumed(base, monkeypatch):
    monkeypatch.chdir(ROOT)
    lora = {"adapter.kind": "lora", "adapter.rank": 2, "train.microbatches": 2}
    assert train_here(arguments(base, "lora", lora)) == 0
    steps = [entry for entry in read_metrics(base / "lora") if "loss" in entry]
    assert steps[0]["kl"] == 0 < steps[-1]["kl"]
    assert max(entry["mismatch_kl"] for entry in steps) < 1e-6
    resumed = copy_until(4, base / "lora", base / "resumed lora")
    assert train_here(arguments(base, "resumed lora", lora)) == 0
    assert_same_run(resumed, base / "lora")


@pytest.mark.slow
def test_four_devices_equal_one(base, monkeypatch):
    monkeypatch.chdir(ROOT)
    alike = {"train.steps": 2, "train.eval_every": 0, "optimizer.name": "sgd"}
    alike |= {"optimizer.learning_rate": 0.5, "train.checkpoint_every": 0, "run.restart": True}
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2}
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    process = fork(arguments(base, "four", alike | mesh), XLA_FLAGS=flags)
    assert train_here(arguments(base, "one", alike)) == 0
    finish(process)
    for found, expected in zip(figures(base / "four"), figures(base / "one"), strict=True):
        for name in found.keys() - {"mismatch_kl", "val_mismatch_kl"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_rewards_read_the_target_of_each_prompt_and_messages_end_with_a_prompt(base, folder):
    (folder / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "solved.jsonl").write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"{n}?"}], "solution": n}) + "\n"
            for n in range(20)
        )
    )
    changes = {"data.target_field": "solution", "grpo.reward": "scoring:near_target"}
    changes |= {"data.train": "solved.jsonl", "tokenizer.chat_template": "chat.jinja"}
    changes |= {"data.validation_fraction": 0, "train.steps": 1, "grpo.kl": 0.0}
    assert train_here(arguments(base, "targets", changes)) == 0
    prompts, targets = eval((folder / "seen.txt").read_text())
    assert len(set(prompts)) == 4 and len(prompts) == 16
    for prompt, target in zip(prompts, targets, strict=True):
        assert prompt == f"[user]{target}?[assistant]"


@pytest.mark.slow
def test_commands_that_only_look_call_no_reward(base, whole, capsys, monkeypatch):
    assert main(["evaluate", str(whole)]) == 2
    told = "a function that whoever made this directory has chosen"
    assert told in capsys.readouterr().err
    assert main(["verify", str(whole)]) == 0
    out = capsys.readouterr().out
    assert told in out and " NO " not in out
    monkeypatch.chdir(ROOT)
    assert main(["doctor", *arguments(base, "looked at")]) == 0
    assert main(["plan", *arguments(base, "planned"), "--device", "h100"]) == 0
