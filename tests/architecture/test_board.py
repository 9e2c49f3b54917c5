"""The board of optimizers: its rules, its page, and that its runs are those of train.py."""

import argparse
import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

import jaxformer as jf

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def trials(best: float, number: int, rules: ModuleType) -> dict[float, float]:
    """The losses by exponent of so many trials, where the loss grows away from `best`."""
    losses: dict[float, float] = {}
    for _ in range(number):
        exponent = rules.next_exponent(losses)
        losses[exponent] = abs(exponent - best)
    return losses


def test_learning_rates_are_tried_towards_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = module("board_rules", monkeypatch)
    assert list(trials(0.1, 5, rules)) == [0, 1, -1, 0.5, -0.5]
    assert list(trials(0.4, 5, rules)) == [0, 1, -1, 0.5, 0.25]
    assert list(trials(0.6, 5, rules)) == [0, 1, -1, 2, 0.5]
    assert list(trials(9.0, 5, rules)) == [0, 1, -1, 2, 3]
    assert list(trials(-1.7, 5, rules)) == [0, 1, -1, -2, -3]
    diverged = {0.0: math.inf, 1.0: math.inf, -1.0: 3.0}
    assert rules.next_exponent(diverged) == -2


def ladder(loss_of_steps: float, first: int, rules: ModuleType) -> dict[int, float]:
    """The losses by rung of one seed, for a loss that falls with the logarithm of the steps and is
    5 after `loss_of_steps`."""
    losses: dict[int, float] = {}
    while (rung := rules.next_rung(losses, 5.0, first)) is not None:
        losses[rung] = 5 - math.log(rules.rung_steps(200, rung) / loss_of_steps)
    return losses


@pytest.mark.parametrize("first", [-2, 2, 5])
@pytest.mark.parametrize("needed", [95.0, 140.0, 290.0])
def test_the_steps_to_a_loss_lie_between_two_horizons(
    needed: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = module("board_rules", monkeypatch)
    losses = ladder(needed, first, rules)
    by_steps = {rules.rung_steps(200, rung): loss for rung, loss in losses.items()}
    assert sum(loss <= 5 for loss in losses.values()) == 1 or min(losses) == first
    assert rules.steps_to_reach(by_steps, 5.0) == pytest.approx(needed)


def test_a_row_claims_only_what_its_interval_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, intervals = (module(name, monkeypatch) for name in ("board_rules", "intervals"))
    base = intervals.interval_of([190.0, 200.0, 205.0, 210.0, 220.0])

    def claim(*steps: float) -> str:
        return str(rules.verdict(intervals.interval_of(steps), base, len(steps)))

    assert claim(120, 125, 130, 140, 189) == "faster"
    assert claim(120, 125, 130, 140, 190) == "not told apart"
    assert claim(195, 196, 197, 198, 199) == "not told apart"
    assert claim(100, 125, 200, 240, 290) == "not told apart"
    assert claim(221, 222, 223, math.inf, math.inf) == "slower"
    assert claim(1, 1, 1, 1) == "too few seeds"


def test_the_page_of_the_board_is_that_of_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    board_page = module("board_page", monkeypatch)
    result = json.loads((FOLDER / "results" / "board.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "results" / "board.md").read_text(encoding="utf-8")
    assert page == board_page.page(result), "python benchmarks/board.py --page"
    for task in result["tasks"].values():
        for row in filter(None, task["rows"].values()):
            assert len(row["tuning"]["trials"]) == 5, "the same number of trials for each row"


def test_every_row_is_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    board = module("board", monkeypatch)
    runs = board.Board(argparse.Namespace(task="10m", smoke=False, folder=tmp_path))
    for recipe in board.RECIPES.values():
        settings = runs.settings(recipe, recipe.center, 200, 0)
        lines = [f"{name}={value}" for name, value in settings.items()]
        run = jf.load_config(ROOT / "configs" / "quickstart.py", lines)
        assert run.optimizer.learning_rate == recipe.center and run.train.steps == 200


@pytest.mark.slow
def test_a_run_of_the_board_is_that_of_its_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    board, workloads = (module(name, monkeypatch) for name in ("board", "workloads"))
    options = argparse.Namespace(task="quickstart", smoke=True, folder=tmp_path)
    options.text = workloads.words_file(tmp_path)
    runs, recipe = board.Board(options), board.RECIPES["muon"]
    lines = [f"{name}={value}" for name, value in runs.settings(recipe, 0.01, 6, 3).items()]
    lines += [f"run.dir={tmp_path / 'run'}", "run.progress=none"]
    trained = jf.train(jf.load_config(ROOT / "configs" / "quickstart.py", lines))
    # Another horizon and seed before, with the same program.
    runs._trained(recipe, 0.01, 4, 0)
    numbers = runs._trained(recipe, 0.01, 6, 3)
    for name, number in numbers.items():
        assert number == pytest.approx(trained.metrics[-1][name], rel=1e-5)
