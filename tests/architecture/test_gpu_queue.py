"""The queue of measurements on a GPU: its order, and what each entry leaves."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURES = """import json, os, pathlib
pathlib.Path(os.environ["BENCHMARK_RESULTS"], "x.json").write_text(json.dumps({"samples": [1]}))
"""


def test_entries_run_in_order_and_each_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By scripts that measure and fail. What did not end is measured again, and no other."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    queue, out = importlib.import_module("gpu_queue"), tmp_path / "out"
    for folder in (out, tmp_path / "results"):
        folder.mkdir()
    (tmp_path / "measures.py").write_text(MEASURES)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(queue, "HERE", tmp_path)
    monkeypatch.setattr(queue, "SHORTEST", 3)
    monkeypatch.setattr(queue, "TORCH_ENVIRONMENT", tmp_path / "torch")
    entries = [queue.Entry(2, "first", "measures.py", 9), queue.Entry(1, "second", "fails.py", 9)]
    options = argparse.Namespace(out=out, seconds=60, commit="abc", smoke=True)
    for state in ("ended", "known already"):
        work = queue.Queue(options, "NVIDIA H200")
        work.run(entries)
        assert work.states["first"].startswith(state)
        assert work.states["second"].startswith("failed with status 3")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["first:", "second:", "second:"]
    found = json.loads((out / "gpu_first_nvidia_h200.json").read_text())
    assert found["result"] == {"samples": [1]}
    assert (found["state"], found["commit"], found["device"]) == ("ended", "abc", "NVIDIA H200")


def test_every_entry_names_a_script_and_a_place_on_the_page_of_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_queue")
    numbers = [entry.number for entry in module.entries()]
    assert numbers == sorted(numbers)
    page = (ROOT / "docs/results/measured.md").read_text()
    for entry in module.entries():
        assert (ROOT / "benchmarks" / entry.command.split()[0]).is_file()
    assert "<!-- results: gpu_queue -->" in page
