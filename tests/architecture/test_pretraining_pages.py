"""The pages of what pre-training is worth are made of their JSON; its intervals exclude 0."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_a_page_is_that_of_its_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    pretraining = importlib.import_module("pretraining")
    path = FOLDER / "results" / f"pretraining_{name}.json"
    row, runs = pretraining.ROWS[name], Path("runs/pretraining", name)
    result = json.loads(path.read_text(encoding="utf-8"))
    experiment = pretraining.task_experiment(row, runs, result)
    page = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert page == pretraining.page(name, row, runs, experiment)
    scratch, pretrained = experiment.variants
    assert len(experiment.runs_of(scratch)) == len(experiment.runs_of(pretrained)) >= 5
    difference = experiment.difference(pretrained, scratch)
    assert difference["high"] < 0, "pre-training helps, beyond the differences of seeds"
