"""Every benchmark runs, in small."""

import ast
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
WORKERS = {
    path.stem for path in FOLDER.glob("*_baseline.py")
}  # started by the benchmarks themselves
NEEDS = {"train_cpu": ("torch",), "decode_cpu": ("torch", "transformers"), "tokens": ("tiktoken",)}


def is_started_by_hand(path: Path) -> bool:
    """Whether a file runs something when it is started; the others are modules of those that do."""
    tests = [node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return any(ast.unparse(test) == "__name__ == '__main__'" for test in tests)


SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if is_started_by_hand(path))
BENCHMARKS = [name for name in SCRIPTS if name not in WORKERS]


def test_the_benchmarks_are_found() -> None:
    assert {"train_cpu", "train_gpu", "train_tpu", "startup", "tokens", "same_numbers"} <= {
        *BENCHMARKS
    }


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_in_small(name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    before = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--smoke"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "| ---" in done.stdout or "|---" in done.stdout, "no table was printed"
    after = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    assert before == after, "a smoke test saves nothing"


def test_checkouts_that_differ_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    differences = importlib.import_module("same_numbers").differences
    numbers = {(1, "loss"): 2.0, (2, "loss"): math.nan}
    assert differences(numbers, {**numbers}) == 0
    assert differences(numbers, numbers | {(1, "loss"): 2.0 * (1 + 1e-7)}) == pytest.approx(1e-7)
    assert differences(numbers, numbers | {(2, "loss"): 2.0}) == math.inf
    assert differences(numbers, {(1, "loss"): 2.0}) == math.inf
    assert differences({}, {}) == math.inf
    params = {"head": np.array([1.0, -4.0], np.float32)}
    assert differences(params, {"head": np.array([1.5, -4.0], np.float32)}) == 0.125
    assert differences(params, {"head": np.array([[1.0, -4.0]], np.float32)}) == math.inf
