"""A step of a run that is done again gives the numbers that the run logged, and its parts add up to
them."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import CACHE
from tiny_run import contents, copy, line, train_here, write_text

from jaxformer.cli import main
from jaxformer.report import read_metrics
from jaxformer.tools.step_replay import Replay, replay

Capture = pytest.CaptureFixture[str]
STEPS, EVERY = 6, 2
SHORT = {
    "model.d_model": 16,
    "optimizer.decay_steps": STEPS,
    "optimizer.warmup_steps": 2,
    "train.checkpoint_every": EVERY,
    "train.eval_every": 0,
    "train.steps": STEPS,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout, microbatches and two layers."""
    folder = tmp_path_factory.mktemp("replayed")
    assert train_here(line(folder / "run", write_text(folder / "text.txt"), SHORT)) == 0
    return folder / "run"


def again(run_dir: Path, step: int) -> Replay:
    return replay(run_dir, step, lambda _: None, cache_dir=f"{CACHE}/data")


def assert_adds_up(found: Replay, run_dir: Path) -> None:
    """The numbers are those of metrics.jsonl, to the bit; losses of tokens and norms of layers add
    up to them."""
    logged = next(line for line in read_metrics(run_dir) if line["step"] == found.step)
    assert found.logged == logged
    assert {name: logged[name] for name in found.metrics} == found.metrics
    assert {"loss", "grad_norm", "learning_rate"} <= {*found.metrics}
    weights = found.batch["weights"]
    assert found.nats is not None and found.nats.shape == weights.shape
    mean = float((found.nats * weights).sum() / weights.sum())
    assert mean == pytest.approx(logged["loss"], rel=1e-5)
    squares = sum(norm**2 for norm in found.norms.values())
    assert math.sqrt(squares) == pytest.approx(logged["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("step", [EVERY + 2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_with_dropout_and_microbatches_is_done_again_bitwise(
    trained: Path, step: int
) -> None:
    found = again(trained, step)
    assert found.begun == (step - 1) // EVERY * EVERY
    assert {"blocks 0", "blocks 1"} <= {*found.norms}
    assert_adds_up(found, trained)


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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_is_done_again_bitwise(family: str, tmp_path: Path) -> None:
    write, name, changes = FAMILIES[family]
    text = write(tmp_path / name)
    more = {"train.steps": 2, "model.n_layers": 1}
    assert train_here(line(tmp_path / "run", text, SHORT | changes | more)) == 0
    assert_adds_up(again(tmp_path / "run", 2), tmp_path / "run")


@pytest.mark.slow
def test_the_command_prints_the_batch_as_text_and_what_differs_from_the_log(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    before = contents(trained)
    assert main(["replay", str(trained), "--step", "4", "--data.cache_dir", f"{CACHE}/data"]) == 0
    out = capsys.readouterr().out
    assert "Step 4, from the checkpoint of step 2." in out
    assert "blocks 1 " in out and "<-" not in out
    assert "The batch, 8 rows:" in out and "row 7: loss " in out
    worst = out.split("highest loss:\n")[1].splitlines()
    losses = [float(text.split()[0]) for text in worst]
    assert len(losses) == 10 and losses == sorted(losses, reverse=True)
    assert contents(trained) == before
    run_dir = copy(trained, tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for entry in lines:
        if entry["step"] == 4:
            entry["loss"] += 1
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    assert main(["replay", str(run_dir), "--step", "4", "--data.cache_dir", f"{CACHE}/data"]) == 0
    assert "<- logged " in capsys.readouterr().out


def test_what_cannot_be_done_again_is_refused(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    for arguments, words in (
        ([str(trained), "--step", "0"], f"has the steps 1 to {STEPS}"),
        ([str(trained), "--step", str(STEPS + 1)], f"has the steps 1 to {STEPS}"),
        ([str(tmp_path), "--step", "1"], "config.json"),
        ([str(trained), "--step", "4", "--mesh.tensor", "3"], "mesh.tensor=3"),
    ):
        assert main(["replay", *arguments]) == 2
        assert words in capsys.readouterr().err
