"""Runs of every kind are verified: experts, adapters, preferences, several processes, other
meshes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import CACHE
from several import finished, launch_all
from tiny_run import PLAIN, finish, fork, line, train_here, write_text

from jaxformer.tools.certificate.chain import Statement
from jaxformer.tools.certificate.verification import verify

pytestmark = pytest.mark.slow

STEPS = 4
SMALL = PLAIN | {
    "model.d_model": 16,
    "optimizer.decay_steps": STEPS,
    "optimizer.warmup_steps": 1,
    "train.checkpoint_every": 2,
    "train.eval_every": 2,
    "train.steps": STEPS,
}
LORA = {"adapter.kind": "lora", "adapter.rank": 2, "adapter.base": "int8"}
# The settings of a run, whether it starts from another, and its data.
KINDS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "experts": (
        {"model.feed_forward": "experts", "model.n_experts": 4, "model.experts_per_token": 2},
        False,
        "text.txt",
    ),
    "an adapter": (LORA, True, "text.txt"),
    "preferences": ({"data.objective": "dpo", "data.packing": "stream"}, True, "pairs.jsonl"),
    "preferences of an adapter": (
        {"data.objective": "dpo", "data.packing": "stream", **LORA},
        True,
        "pairs.jsonl",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text, pairs, and a run to start from."""
    made = tmp_path_factory.mktemp("kinds")
    text = write_text(made / "text.txt")
    with (made / "pairs.jsonl").open("w") as file:
        for words in text.read_text().split("\n<|endoftext|>\n"):
            first, *others = words.split()
            pair = {"chosen": " ".join(others[:4]), "rejected": " ".join(others[4:0:-1])}
            file.write(json.dumps({"prompt": f"{first} "} | pair) + "\n")
    assert train_here(line(made / "start", text, SMALL)) == 0
    return made


def statements(run_dir: Path) -> dict[str, Statement]:
    found = verify(run_dir, lambda _: None, steps=3, cache_dir=f"{CACHE}/data")
    return {statement.subject: statement for statement in found}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_is_verified_to_the_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    changes, starts, data = KINDS[kind]
    start = {"run.init_from": folder / "start"} if starts else {}
    assert train_here(line(tmp_path / "run", folder / data, SMALL | changes | start)) == 0
    found = statements(tmp_path / "run")
    assert {name: one for name, one in found.items() if one.verdict != "equal"} == {
        "certificate.json": found["certificate.json"]
    }
    assert sum(name.startswith("step ") for name in found) == 3
    figures = next(one.text for name, one in found.items() if name.startswith("step "))
    assert "learning_rate, " in figures and figures.endswith("state.")


def assert_equal_to_rounding(run_dir: Path) -> None:
    """Files and states are to the bit, and figures to rounding, however it comes out here."""
    found = statements(run_dir)
    verdicts = {name: one.verdict for name, one in found.items()}
    assert verdicts.pop("certificate.json") == "not checked"
    again = {name for name in verdicts if name.startswith(("step ", "evaluation"))}
    assert len(again) == 4 and {verdicts[name] for name in again} <= {"equal", "rounding"}
    assert "rounding" in {verdicts[name] for name in again}
    assert {verdicts[name] for name in {*verdicts} - again} == {"equal"}


def test_a_run_of_eight_devices_is_verified_on_one(folder: Path, tmp_path: Path) -> None:
    arguments = line(
        tmp_path / "run", folder / "text.txt", SMALL | {"mesh.fsdp": 2, "mesh.tensor": 2}
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    finish(fork(arguments, XLA_FLAGS=flags))
    found = verify(tmp_path / "run", lambda _: None, steps=3, cache_dir=f"{CACHE}/data")
    unknown = {one.subject: one.text for one in found if one.verdict == "not checked"}
    assert "--mesh.fsdp" in unknown["steps done again"]
    on_one = {"fsdp": 1, "tensor": 1}
    options: dict[str, Any] = {"steps": 3, "mesh": on_one, "cache_dir": f"{CACHE}/data"}
    verdicts = {one.verdict for one in verify(tmp_path / "run", lambda _: None, **options)}
    assert verdicts == {"equal", "rounding", "not checked"}


@pytest.mark.xdist_group("processes")
def test_a_run_of_two_processes_is_verified_by_one(folder: Path, tmp_path: Path) -> None:
    finished(launch_all(2, tmp_path / "run", folder / "text.txt", SMALL))
    assert_equal_to_rounding(tmp_path / "run")
