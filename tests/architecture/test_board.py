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
