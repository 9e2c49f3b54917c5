"""Runs of every kind are verified: every family, experts, adapters, preferences, several processes,
other meshes, a bucket."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import pytest
from conftest import CACHE
from forced_devices import on_eight_devices
from several import finished, launch_all
from tiny_run import PLAIN, finish, fork, line, train_here, write_text

from jaxformer.cli import main
from jaxformer.cli.verify import verify
from jaxformer.tools.verify import Statement

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
PROMPT = {"adapter.kind": "prompt", "adapter.tokens": 4, "run.init_from": "start"}
EXPERTS = {"model.feed_forward": "experts", "model.experts.n": 4, "model.experts.per_token": 2}
ENCODER = {"model.family": "encoder", "data.packing": "stream"}
PAIRS = {"model.family": "encoder_decoder", "data.objective": "seq2seq", "data.packing": "stream"}
DPO = {"data.objective": "dpo", "data.packing": "stream", "run.init_from": "start"}
# The data of a run and its settings; `start` is a run of the fixture.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("text.txt", EXPERTS | {"model.window": 8, "model.window_pattern": "wf"}),
    "recurrent": ("text.txt", {"model.n_layers": 2, "model.layer_pattern": "ds"}),
    "a prompt": ("text.txt", PROMPT),
    "preferences of an adapter": ("preferences.jsonl", DPO | LORA),
    "masked": ("text.txt", ENCODER),
    "classes": ("classes.jsonl", ENCODER | {"model.head.kind": "classes"}),
    "pairs": ("pairs.tsv", PAIRS | {"train.z_loss": 1e-3}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the data of every kind, and a run to start from."""
    made = tmp_path_factory.mktemp("kinds")
    text = write_text(made / "text.txt")
    with (made / "preferences.jsonl").open("w") as file:
        for words in text.read_text().split("\n<|endoftext|>\n"):
            first, *others = words.split()
            pair = {"chosen": " ".join(others[:4]), "rejected": " ".join(others[4:0:-1])}
            file.write(json.dumps({"prompt": f"{first} "} | pair) + "\n")
    records = [{"text": f"the {w} sees", "label": w} for w in ("cat", "dog", "tree") * 20]
    (made / "classes.jsonl").write_text("\n".join(map(json.dumps, records)))
    rows = [f"the {a} sees\tdoes the {b} see" for a, b in pairwise("abcdefgh" * 8)]
    (made / "pairs.tsv").write_text("source\ttarget\n" + "\n".join(rows) + "\n")
    assert train_here(line(made / "start", text, SMALL)) == 0
    return made


def statements(run_dir: Path, **options: Any) -> dict[str, Statement]:
    """All but that of the files that a run has no digest of."""
    options = {"steps": 3, "cache_dir": f"{CACHE}/data"} | options
    found = {one.subject: one for one in verify(run_dir, **options)}
    assert found.pop("tokenizer_config.json").verdict == "unknown"
    return found


def assert_verified(found: dict[str, Statement]) -> None:
    """All is equal to the bit, but gradients and kernels, which are to rounding."""
    verdicts = {name: one.verdict for name, one in found.items()}
    rounded = {name for name, verdict in verdicts.items() if verdict == "equal to rounding"}
    assert rounded <= {"accumulation", "kernels"}
    assert {verdicts[name] for name in {*verdicts} - rounded} == {"equal"}, found
    assert {"texts apart", "resumed step"} <= {*found}
    assert sum(name.startswith("step ") for name in found) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_is_verified_to_the_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    data, changes = KINDS[kind]
    if "run.init_from" in changes:
        changes = changes | {"run.init_from": folder / "start"}
    assert train_here(line(tmp_path / "run", folder / data, SMALL | changes)) == 0
    assert_verified(statements(tmp_path / "run"))


def test_a_mesh_equals_one_device_and_half_a_batch_does_not() -> None:
    found = on_eight_devices("verify_devices.py")
    broken = found["experts"].pop("broken")
    assert broken[0] == "NO"
    for name, results in found.items():
        verdicts = {verdict for verdict, _ in results.values()}
        assert verdicts == {"equal to rounding"}, (name, results)


def test_a_run_of_eight_devices_is_verified_on_one(folder: Path, tmp_path: Path) -> None:
    arguments = line(
        tmp_path / "run", folder / "text.txt", SMALL | {"mesh.fsdp": 2, "mesh.tensor": 2}
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    finish(fork(arguments, XLA_FLAGS=flags))
    found = statements(tmp_path / "run")
    assert found["steps done again"].verdict == "unknown"
    assert "--mesh.fsdp" in found["steps done again"].text
    on_one = {"fsdp": 1, "tensor": 1}
    verdicts = {one.verdict for one in statements(tmp_path / "run", mesh=on_one).values()}
    assert verdicts == {"equal", "equal to rounding"}


@pytest.mark.xdist_group("processes")
def test_a_run_of_two_processes_is_verified_by_one(folder: Path, tmp_path: Path) -> None:
    """Files, states and probes are to the bit, and figures to rounding."""
    finished(launch_all(2, tmp_path / "run", folder / "text.txt", SMALL))
    found = {name: one.verdict for name, one in statements(tmp_path / "run").items()}
    again = {name for name in found if name.startswith("step ")}
    assert len(again) == 3
    assert "equal to rounding" in {found[name] for name in again}
    assert {*found.values()} <= {"equal", "equal to rounding"}
    assert {found[name] for name in found if name.startswith("checkpoint")} == {"equal"}


def test_a_run_in_a_bucket_is_verified(
    s3_bucket: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{s3_bucket}/run"
    assert train_here(line(url, folder / "text.txt", SMALL)) == 0
    assert main(["verify", url, "--steps", "1"]) == 0
    store = boto3.client("s3")
    place = {"Bucket": s3_bucket.removeprefix("s3://"), "Key": "run/metrics.jsonl"}
    lines = store.get_object(**place)["Body"].read().splitlines()
    lines[1] = lines[1].replace(b'"loss": ', b'"loss": 1', 1)
    store.put_object(**place, Body=b"\n".join(lines) + b"\n")
    capsys.readouterr()
    assert main(["verify", url, "--steps", "0"]) == 1
    assert "metrics.jsonl" in capsys.readouterr().out
