"""A step of a run that is done again gives the numbers that the run logged, and its parts add up to
them."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import EVERY, STEPS, contents, copy, line, reference, train_here, write_text

from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.cli import main
from jaxformer.files import ConfigError
from jaxformer.report import read_metrics
from jaxformer.tools.step_replay import replay

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)[0]


def quiet(_: str) -> None:
    pass


def logged_at(run_dir: Path, step: int) -> dict[str, Any]:
    return next(line for line in read_metrics(run_dir) if line["step"] == step and "loss" in line)


def assert_adds_up(run_dir: Path, step: int) -> None:
    """The numbers are those of metrics.jsonl, to the bit; losses of tokens and norms of leaves add
    up to them."""
    found, wanted = replay(run_dir, step, quiet), logged_at(run_dir, step)
    assert found.logged == wanted and found.differing() == {}
    assert {name: wanted[name] for name in found.metrics} == found.metrics
    assert {"loss", "grad_norm", "learning_rate"} <= {*found.metrics}
    weights = found.batch["weights"]
    assert found.nats is not None and found.nats.shape == weights.shape
    mean = float((found.nats * weights).sum() / weights.sum())
    assert mean == pytest.approx(wanted["loss"], rel=1e-5)
    squares = sum(norm**2 for norms in found.norms.values() for norm in norms)
    assert math.sqrt(squares) == pytest.approx(wanted["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("step", [1, EVERY, EVERY + 1, STEPS])
def test_a_step_with_dropout_and_microbatches_is_done_again_bitwise(
    trained: Path, step: int
) -> None:
    assert_adds_up(trained, step)
    assert replay(trained, step, quiet).begun == (step - 1) // EVERY * EVERY


def classified(path: Path) -> Path:
    lines = [{"text": f"the {w} sees", "label": w} for w in ("cat", "dog", "tree") * 20]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def pairs(path: Path) -> Path:
    rows = [f"the {a} sees\tdoes the {b} see" for a, b in pairwise("abcdefgh" * 8)]
    path.write_text("source\ttarget\n" + "\n".join(rows) + "\n")
    return path


FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "masked": (write_text, "t.txt", {"model.family": "encoder", "data.packing": "stream"}),
    "classes": (
        classified,
        "t.jsonl",
        {"model.family": "encoder", "model.head": "classes", "data.packing": "stream"},
    ),
    "pairs": (
        pairs,
        "t.tsv",
        {
            "model.family": "encoder_decoder",
            "data.objective": "seq2seq",
            "data.packing": "stream",
            "train.z_loss": 1e-3,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_is_done_again_bitwise(family: str, tmp_path: Path) -> None:
    write, name, changes = FAMILIES[family]
    text = write(tmp_path / name)
    more = {"train.steps": 3, "train.eval_every": 0}
    assert train_here(line(tmp_path / "run", text, changes | more)) == 0
    assert_adds_up(tmp_path / "run", 2)


def test_the_command_prints_the_batch_as_text_and_writes_every_token(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    before, output = contents(trained), tmp_path / "step.json"
    assert main(["replay", str(trained), "--step", "6", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "Step 6, from the checkpoint of step 4, after 1 step in between." in out
    assert "is the same there, to the bit" in out and "blocks 1 " in out
    assert contents(trained) == before
    found = json.loads(output.read_text())
    assert found["equal"] is True and found["from_step"] == EVERY
    row = found["rows"][3]
    spelled = "".join(token["target"] for token in row["tokens"])
    assert len(row["tokens"]) == 32 and spelled[:-8] in row["text"] + spelled[-8:]
    nats = [token["nats"] for token in row["tokens"]]
    assert row["loss"] == pytest.approx(float(np.mean(nats)), rel=1e-5)
    ranked = max(token["nats"] for row in found["rows"] for token in row["tokens"])
    assert f"  {ranked:.4f}  row" in out.split("highest loss:\n")[1].splitlines()[0]


@pytest.mark.parametrize("axis", MESH_AXES)
def test_a_step_is_replayed_on_another_mesh(axis: str, trained: Path, capsys: Capture) -> None:
    # There is one device.
    assert main(["replay", str(trained), "--step", "6", f"--mesh.{axis}", "3"]) == 2
    assert f"mesh.{axis}=3" in capsys.readouterr().err


def test_what_differs_from_the_log_is_named(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    run_dir = copy(trained, tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for entry in lines:
        if entry["step"] == 6 and "loss" in entry:
            entry["loss"] += 1
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    assert main(["replay", str(run_dir), "--step", "6"]) == 0
    assert "Not as the run logged it: loss" in capsys.readouterr().out


@pytest.mark.parametrize("step", [0, -3, STEPS + 1])
def test_a_step_that_the_run_has_not_is_refused(trained: Path, step: int) -> None:
    with pytest.raises(ConfigError, match=f"has the steps 1 to {STEPS}"):
        replay(trained, step, quiet)


def test_a_directory_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        replay(tmp_path, 1, quiet)
