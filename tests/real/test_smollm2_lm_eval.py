"""EleutherAI's evaluation harness, started by `jaxformer lm_eval` on a task of local files, gets
from SmolLM2-135M-Instruct what its own model `hf` gives it of the same weights."""

import contextlib
import functools
import io
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from smollm2 import HOME, MARKS, converted, words

from jaxformer.cli import main

pytest.importorskip("lm_eval")
pytestmark = MARKS
QUESTIONS, CHOICES = 10, 4
MODELS = {
    "jaxformer": ("--model", "jaxformer", "--model_args", "path={path}"),
    "hf": ("--model", "hf", "--model_args", "pretrained={path},dtype=float32", "--device", "cpu"),
}
TASK = {
    "task": "cloze",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


class Answers(NamedTuple):
    """Of the choices of all questions: log-likelihoods and whether each is the greedy text
    [questions, choices], and the metrics of the task."""

    likelihoods: np.ndarray
    greedy: np.ndarray
    metrics: dict[str, float]


def questions():
    """Sentences whose end is one of four: the last two words of it and of three others."""
    prose = " ".join(words().split())
    sentences = sorted({*re.findall(r"[A-Z][a-z]+(?: [a-z]+,?){6,24}(?=\. )", prose)})
    rng = random.Random(0)
    for _ in range(QUESTIONS):
        sampled = rng.sample(sentences, CHOICES)
        ends = [" ".join(sentence.split(" ")[-2:]) for sentence in sampled]
        label = rng.randrange(CHOICES)
        yield {
            "context": sampled[label].removesuffix(f" {ends[label]}"),
            "choices": ends,
            "label": label,
        }


@functools.cache
def task_folder() -> Path:
    folder = Path(HOME.name, "tasks")
    folder.mkdir()
    file = folder / "cloze.jsonl"
    file.write_text("\n".join(map(json.dumps, questions())), encoding="utf-8")
    files = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
    # JSON is YAML.
    (folder / "cloze.yaml").write_text(json.dumps(TASK | {"dataset_kwargs": files}))
    return folder


def answers(model: str) -> Answers:
    output = Path(HOME.name, f"answers_{model}")
    arguments = [argument.format(path=converted()) for argument in MODELS[model]]
    arguments += ["--tasks", "cloze", "--include_path", str(task_folder()), "--batch_size", "4"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["lm_eval", *arguments, "--output_path", str(output), "--log_samples"]) == 0
    print(out.getvalue())
    (samples,) = output.rglob("samples_cloze_*.jsonl")
    records = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    records.sort(key=lambda record: record["doc_id"])
    scored = [[choice for (choice,) in record["resps"]] for record in records]
    (report,) = output.rglob("results_*.json")
    metrics = json.loads(report.read_text(encoding="utf-8"))["results"]["cloze"]
    return Answers(
        np.array([[float(value) for value, _ in row] for row in scored]),
        np.array([[str(greedy) for _, greedy in row] for row in scored]),
        {name: metrics[f"{name},none"] for name in ("acc", "acc_norm")},
    )


def test_the_harness_gets_what_its_own_model_gives_choice_by_choice(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    expected, actual = answers("hf"), answers("jaxformer")
    difference = np.abs(actual.likelihoods - expected.likelihoods).max()
    print(f"largest difference of a log-likelihood: {difference:.2g} nats; {actual.metrics}")
    assert actual.likelihoods.shape == (QUESTIONS, CHOICES)
    assert difference < 1e-3
    chosen, expected_choices = actual.likelihoods.argmax(1), expected.likelihoods.argmax(1)
    assert chosen.tolist() == expected_choices.tolist() and len({*chosen.tolist()}) > 1
    assert actual.greedy.tolist() == expected.greedy.tolist()
    assert actual.metrics == expected.metrics and actual.metrics["acc"] > 1 / CHOICES
