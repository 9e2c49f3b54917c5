"""Runs that learn from a teacher: its parameters are beside the state, whatever interrupts the run,
on any mesh and for any rows."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import (
    assert_same_run,
    copy_until,
    figures,
    finish,
    fork,
    line,
    params_of,
    train_here,
    write_text,
)

import jaxformer as jf
from jaxformer.report import read_metrics
from jaxformer.runs.config import load_config
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.tools.plan import make_plan
from jaxformer.tools.plan_memory import planned_run

pytestmark = pytest.mark.slow

STEPS = 6
CHANGES = {
    "distill.share": 0.25,
    "distill.temperature": 2.0,
    "model.dropout": 0.0,
    "model.n_layers": 1,
    "optimizer.decay_steps": STEPS,
    "optimizer.learning_rate": 5e-3,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 0,
    "train.checkpoint_every": 2,
    "train.eval_every": 2,
    "train.steps": STEPS,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a teacher, "teacher", of another width and in another dtype than the students,
    its Hugging Face directory "hf", and a text."""
    folder = tmp_path_factory.mktemp("distillation")
    text = write_text(folder / "text.txt")
    wide = {"model.d_model": 48, "train.eval_every": 0, "train.steps": 12}
    wide |= {"optimizer.decay_steps": 12, "train.checkpoint_every": 0}
    assert train_here(line(folder / "teacher", text, wide)) == 0
    loaded = jf.load(folder / "teacher")
    jf.save_pretrained(folder / "hf", loaded.params, loaded.config, loaded.tokenizer)
    return folder


def arguments(base, name, changes=None):
    of_teacher = {"distill.teacher": base / "teacher", "tokenizer.path": base / "teacher"}
    return line(base / name, base / "text.txt", CHANGES | of_teacher | (changes or {}))


@pytest.fixture(scope="module")
def whole(base):
    assert train_here(arguments(base, "whole")) == 0
    return base / "whole"


def test_the_student_comes_near_its_teacher(base, whole):
    lines = [entry for entry in read_metrics(whole) if "loss" in entry]
    for entry in lines:
        objective = 0.25 * entry["loss"] + 0.75 * 4 * entry["kl"]
        assert entry["objective"] == pytest.approx(objective, rel=1e-5)
    evaluations = [entry for entry in read_metrics(whole) if "val_kl" in entry]
    assert evaluations[-1]["val_kl"] < 0.8 * evaluations[0]["val_kl"]
    # Without the teacher an evaluation is of the targets.
    found = evaluate_run(whole)
    assert found["val_loss"] == pytest.approx(evaluations[-1]["val_loss"], rel=1e-5)
    assert "val_kl" not in found
    # The checkpoints hold no teacher, of which there are more numbers.
    size = sum(path.stat().st_size for path in (whole / "checkpoints/6").rglob("*"))
    assert size < 3.5 * 4 * sum(leaf.size for leaf in params_of(whole))


def test_a_resumed_run_is_the_uninterrupted_one(base, whole):
    resumed = copy_until(2, whole, base / "resumed")
    assert train_here(arguments(base, "resumed")) == 0
    assert_same_run(resumed, whole)


def test_a_hugging_face_teacher_is_the_same_and_another_one_is_refused(base, whole, capsys):
    of_hf = {"distill.teacher": base / "hf"}
    assert train_here(arguments(base, "of hf", of_hf)) == 0
    for a, b in zip(params_of(base / "of hf"), params_of(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    copy_until(2, whole, base / "other")
    changed = jf.load(base / "teacher")
    params = changed.params | {"embed": {"tokens": changed.params["embed"]["tokens"] + 0.1}}
    jf.save_pretrained(base / "changed", params, changed.config, changed.tokenizer)
    record = json.loads((base / "other" / "config.json").read_text())
    record["distill"]["teacher"] = str(base / "changed")
    (base / "other" / "config.json").write_text(json.dumps(record))
    assert train_here(arguments(base, "other", {"distill.teacher": base / "changed"})) == 2
    error = capsys.readouterr().err
    assert "distill.teacher=" in error and "is not the model that this run began with" in error


def test_an_adapter_teaches_as_the_model_that_it_makes(base):
    """One of peft, over the model that it names."""
    loaded = jf.load(base / "hf")
    params = jf.adapt(loaded.params, loaded.config, jf.LoRA(rank=2), jax.random.key(0))
    moved = jax.tree.map(lambda leaf: leaf + 0.02, params)
    jf.save_adapter(base / "adapter", moved, loaded.config, base=base / "hf")
    merged = jf.merge(jf.load(base / "adapter").params)
    jf.save_pretrained(base / "merged", merged, loaded.config, loaded.tokenizer)
    few = {"train.steps": 2, "train.eval_every": 0, "train.checkpoint_every": 0}
    logs = []
    for name in ("adapter", "merged"):
        changes = few | {"distill.teacher": base / name}
        assert train_here(arguments(base, f"of {name}", changes)) == 0
        lines = read_metrics(base / f"of {name}")
        logs.append([entry["kl"] for entry in lines if "kl" in entry])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5) and min(logs[0]) > 0


def test_eight_devices_in_microbatches_equal_one(base):
    alike = {"train.steps": 2, "train.eval_every": 0, "optimizer.name": "sgd"}
    alike |= {"optimizer.learning_rate": 0.5, "train.batch_size": 16, "train.microbatches": 2}
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    meshes = [{"mesh.fsdp": 2, "mesh.tensor": 2}, {"mesh.data": 2, "mesh.context": 4}]
    several = [
        fork(arguments(base, f"eight {i}", alike | mesh), XLA_FLAGS=flags)
        for i, mesh in enumerate(meshes)
    ]
    finish(fork(arguments(base, "one", alike | {"train.microbatches": 1})))
    for i, process in enumerate(several):
        finish(process)
        found, expected = figures(base / f"eight {i}"), figures(base / "one")
        assert found == [pytest.approx(entry, rel=1e-4, abs=1e-5) for entry in expected]
        for a, b in zip(params_of(base / f"eight {i}"), params_of(base / "one"), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_answers_are_distilled_by_an_adapter(base):
    """Packed answers of sft, learned by LoRA over a base that another model teaches."""
    records = [{"source": f"{i} and", "target": f" {i + 1}."} for i in range(80)]
    (base / "sft.jsonl").write_text("\n".join(map(json.dumps, records)))
    one = {"train.steps": 2, "train.eval_every": 0, "distill.teacher": ""}
    plain = {"distill.share": 0.5, "distill.temperature": 1.0}
    assert train_here(arguments(base, "start", one | plain)) == 0
    changes = {"run.init_from": base / "start", "adapter.kind": "lora", "adapter.rank": 2}
    changes |= {"data.train": base / "sft.jsonl", "distill.share": 0.0}
    changes |= {"data.objective": "sft", "optimizer.learning_rate": 0.05}
    assert train_here(arguments(base, "lora", changes)) == 0
    values = [entry["val_kl"] for entry in read_metrics(base / "lora") if "val_kl" in entry]
    assert values[-1] < values[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.path": "", "tokenizer.vocab_size": 290}, "has not the tokenizer of"),
        ({"data.objective": "dpo"}, "which data.objective=dpo has not"),
        ({"distill.teacher": ""}, "say how a run learns from a teacher, and distill.teacher is em"),
        ({"model.family": "encoder"}, "has model.family=decoder, and the run encoder"),
        ({"data.sequence_length": 64, "model.max_length": 64}, "exceeds the model.max_length=48"),
        ({"train.preference_beta": 0.2}, "takes no beta"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(changes, message, base, capsys):
    if changes.get("data.objective") == "dpo":
        changes = changes | {"run.init_from": base / "teacher", "model.n_layers": 2}
        changes |= {"model.d_model": 48}
    assert train_here(arguments(base, "never", changes)) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and not (base / "never").exists()


def test_a_plan_counts_the_teacher(base):
    def plan(**settings):
        asked = ["tokenizer.vocab_size=300", *(f"{k}={v}" for k, v in settings.items())]
        config = load_config(Path(__file__).parents[2] / "configs/quickstart.py", asked)
        return make_plan(planned_run(config, "h100", 1))

    alone = plan()
    taught = plan(**{"distill.teacher": base / "teacher", "data.sequence_length": 48})
    held = {part.name: part.bytes for part in taught.memory.held}
    size = 4 * sum(leaf.size for leaf in params_of(base / "teacher"))
    assert held["parameters of the reference"] == size
    assert "parameters of the reference" not in {part.name for part in alone.memory.held}
