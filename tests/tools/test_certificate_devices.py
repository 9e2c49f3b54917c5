"""Certificates of runs on several devices, in several processes, and of every family."""

import json
from pathlib import Path
from typing import Any

import pytest
from forced_devices import on_eight_devices
from several import SMALL, finished, launch_all
from test_replay import FAMILIES
from tiny_run import line, train_here, write_text

from jaxformer.tools.certificate.record import read_certificate, seal_problems

pytestmark = pytest.mark.slow


def test_a_mesh_equals_one_device_and_half_a_batch_does_not() -> None:
    found = on_eight_devices("certificate_devices.py")
    for name, results in found.items():
        assert results["sound"] and results["leaves"], (name, results)
    assert found["data 8"]["broken"] is False


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    **FAMILIES,
    "experts": (
        write_text,
        "t.txt",
        {"model.feed_forward": "experts", "model.n_experts": 4, "model.expert_kernel": "loop"},
    ),
    "windows": (write_text, "t.txt", {"model.window": 8, "model.window_pattern": "wf"}),
    "best fit": (write_text, "t.txt", {"data.packing": "best_fit"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_every_family_is_certified(case: str, tmp_path: Path) -> None:
    write, name, changes = CASES[case]
    short = {"train.steps": 3, "train.eval_every": 0, "run.certify": True}
    assert train_here(line(tmp_path / "run", write(tmp_path / name), changes | short)) == 0
    certificate = read_certificate(tmp_path / "run" / "certificate.json")
    results = {entry["name"]: entry["result"] for entry in certificate["checks"]}
    assert "failed" not in results.values(), certificate["checks"]
    assert results["resumed step"] == results["replayed steps"] == "proven"
    assert results["texts apart"] == results["accumulation"] == "proven"
    if case == "experts":
        assert results["expert kernel"] == "proven"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from."""
    folder = tmp_path_factory.mktemp("base")
    short = {"train.steps": 2, "optimizer.warmup_steps": 1, "optimizer.decay_steps": 2}
    short |= {"train.eval_every": 0}
    assert train_here(line(folder / "run", write_text(folder / "text.txt"), short)) == 0
    return folder / "run"


STARTED: dict[str, dict[str, Any]] = {
    "adapter": {"adapter.kind": "lora", "optimizer.name": "adamw"},
    "prompt": {"adapter.kind": "prompt", "adapter.tokens": 4, "optimizer.name": "adamw"},
    "preferences": {"data.objective": "dpo", "optimizer.name": "adamw"},
    "preferences of an adapter": {
        "data.objective": "dpo",
        "optimizer.name": "adamw",
        "adapter.kind": "lora",
    },
}


@pytest.mark.parametrize("case", STARTED)
def test_a_run_that_starts_from_another_is_certified(case: str, base: Path, tmp_path: Path) -> None:
    text, changes = write_text(tmp_path / "text.txt"), STARTED[case]
    if "data.objective" in changes:
        text = tmp_path / "pairs.jsonl"
        sides = [("the cat sees", " the dog", " dog the"), ("a tree", " likes a stone", " a")]
        rows = [dict(zip(("prompt", "chosen", "rejected"), one, strict=True)) for one in sides * 20]
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = changes | {"data.packing": "stream"}
    short = {"train.steps": 3, "train.eval_every": 0, "run.certify": True, "run.init_from": base}
    assert train_here(line(tmp_path / "run", text, changes | short)) == 0
    certificate = read_certificate(tmp_path / "run" / "certificate.json")
    results = {entry["name"]: entry["result"] for entry in certificate["checks"]}
    assert "failed" not in results.values(), certificate["checks"]
    for name in ("texts apart", "future apart", "accumulation", "resumed step", "replayed steps"):
        assert results[name] == "proven", certificate["checks"]


def test_several_processes_certify_their_run_together(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    finished(launch_all(2, tmp_path / "run", text, SMALL | {"run.certify": True}))
    certificate = read_certificate(tmp_path / "run" / "certificate.json")
    assert seal_problems(certificate) == []
    assert certificate["device"]["processes"] == 2
    results = {entry["name"]: entry["result"] for entry in certificate["checks"]}
    assert results["one device"] == results["resumed step"] == "proven"
    assert "failed" not in results.values(), certificate["checks"]
