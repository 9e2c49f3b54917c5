"""`jaxformer average`: the mean of checkpoints is a run that every command takes."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import EVERY, STEPS, copy, line, logged, saved, train_here

import jaxformer as jf
from jaxformer.checkpoints.reading import saved_shapes
from jaxformer.cli import main
from jaxformer.config.config_file import read_config
from jaxformer.config.saved import to_json
from jaxformer.files import ConfigError
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.runs.soup import average_checkpoints

Capture = pytest.CaptureFixture[str]


def leaves_of(path: Path, step: int | None = None) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jf.load(path, step).params)]


def mean_of(steps: list[int], run_dir: Path) -> list[np.ndarray]:
    columns = zip(*(leaves_of(run_dir, step) for step in steps), strict=True)
    return [np.mean(np.asarray(column, np.float64), 0) for column in columns]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def soup(tmp_path_factory: pytest.TempPathFactory, whole: tuple[Path, Path]) -> Path:
    """The mean of the last 3 checkpoints of the run that nothing interrupts."""
    target = tmp_path_factory.mktemp("soup") / "mean"
    arguments = ["average", str(whole[0]), "--last", "3", "--output", str(target)]
    assert main(arguments) == 0
    return target


def test_the_mean_is_that_of_the_checkpoints_and_the_source_is_untouched(
    soup: Path, whole: tuple[Path, Path]
) -> None:
    steps = [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    assert saved(soup) == [STEPS]
    assert_close(leaves_of(soup), mean_of(steps, whole[0]))
    content = json.loads((soup / "average.json").read_text())
    assert [entry["step"] for entry in content["checkpoints"]] == steps
    records = [json.loads((path / "data.json").read_text()) for path in (soup, whole[0])]
    assert records[0].pop("run_id") != records[1].pop("run_id") and records[0] == records[1]


@pytest.mark.slow
def test_a_mean_is_evaluated_sampled_converted_and_started_from(
    soup: Path, whole: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    last = [entry["val_loss"] for entry in logged(whole[0]) if "val_loss" in entry][-1]
    assert evaluate_run(soup)["val_loss"] == pytest.approx(last, rel=0.1)
    assert main(["sample", str(soup), "--prompt", "the", "--max_new_tokens", "4"]) == 0
    assert main(["convert", str(soup), str(tmp_path / "hf")]) == 0
    assert_close(leaves_of(tmp_path / "hf"), leaves_of(soup))
    assert main(["runs", str(soup.parent)]) == 0
    capsys.readouterr()
    changes = {"run.init_from": soup, "train.steps": 1, "optimizer.warmup_steps": 0}
    changes |= {"optimizer.learning_rate": 0, "optimizer.decay_steps": 0, "train.eval_every": 0}
    assert train_here(line(tmp_path / "next", whole[1], changes)) == 0
    assert_close(leaves_of(tmp_path / "next"), leaves_of(soup))


@pytest.mark.slow
def test_a_mean_is_continued_from_its_step_with_the_state_of_the_optimizer(
    soup: Path, whole: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    tables = [saved_shapes(path.absolute() / "checkpoints", STEPS) for path in (soup, whole[0])]
    differing = {path for path, row in tables[0].items() if row != tables[1][path]}
    assert differing == {path for path in tables[0] if path.startswith("params.")}
    run_dir = copy(soup, tmp_path / "run")
    assert train_here(line(run_dir, whole[1], {"train.steps": STEPS + 2})) == 0
    assert f"from step {STEPS}" in capsys.readouterr().out
    assert [entry["step"] for entry in logged(run_dir) if "loss" in entry] == [41, 42]


def test_a_soup_of_runs_takes_the_newest_checkpoint_of_each(
    whole: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    second = copy(whole[0], tmp_path / "second")
    for step in saved(second)[3:]:
        shutil.rmtree(second / "checkpoints" / str(step))
    chosen = average_checkpoints([whole[0], second], tmp_path / "soup")
    assert [step for _, step in chosen] == [STEPS, 3 * EVERY]
    assert_close(leaves_of(tmp_path / "soup"), mean_of([STEPS, 3 * EVERY], whole[0]))
    by_steps = ["average", str(second), "--steps", f"{EVERY},{2 * EVERY}"]
    assert main(by_steps) == 0
    assert f"2 checkpoints: {second} at steps 4, 8" in capsys.readouterr().out
    assert_close(leaves_of(tmp_path / "second-average"), mean_of([4, 8], whole[0]))
    assert main(by_steps) == 2
    assert "second-average is not empty" in capsys.readouterr().err


def damaged(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints" / str(STEPS) / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))


def other_model(run_dir: Path) -> None:
    run = read_config(run_dir / "config.json")
    text = to_json(run).replace('"norm_eps": 1e-05', '"norm_eps": 0.5')
    assert text != to_json(run)
    (run_dir / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, ("--last", "99"), "run has not 99 checkpoints: it holds the checkpoints of steps"),
        (None, ("--last", "1"), "1 checkpoint is chosen, and an average needs 2 or more"),
        (None, ("--steps", "4,5"), "run has not steps 5"),
        (None, ("--steps", "4;8"), "give steps separated by commas"),
        (None, ("--steps", "4,8", "--last", "2"), "leave one of them out"),
        (None, ("--weights", "average"), "run keeps no average of its weights"),
        (damaged, ("--last", "2"), "nothing was written. Leave this checkpoint out"),
        (other_model, ("REFERENCE",), "different models, whose weights have no mean:\n  model.n"),
    ],
)
def test_what_has_no_mean_is_refused_in_one_message_and_nothing_is_left(
    change, arguments, message, whole: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copy(whole[0], tmp_path / "run")
    if change:
        change(run_dir)
    named = [str(whole[0]) if text == "REFERENCE" else text for text in arguments]
    assert main(["average", str(run_dir), *named]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error
    assert not (tmp_path / "run-average").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory: jaxformer convert makes one"):
        average_checkpoints([tmp_path, tmp_path], tmp_path / "soup")
