"""The rows of train_gpu.py and train_tpu.py: what is recorded, counted and written, and their
batches."""

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxformer.models.cost import flops_per_token
from jaxformer.tools.plan.plan import make_plan
from jaxformer.tools.plan.planned import planned_run

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("accelerator")


def test_the_results_are_written_after_each_row_and_a_failure_ends_its_row_alone(
    accelerator: ModuleType,
) -> None:
    written: list[list[str]] = []
    reached: list[str] = []

    def measure(name: str) -> list[dict[str, Any]]:
        reached.append(name)
        if name == "third":
            raise SystemExit("worker jax ended with status 1")
        if name == "fourth":
            raise RuntimeError("INTERNAL: no")
        return [{"with": "jaxformer", "out_of_memory": "54.9G exceeds 15.75G", "batch": 4}]

    results = accelerator.Results({"device": "none"})
    names = ["first", "second", "third", "fourth", "fifth"]
    failed = accelerator.run_rows(
        names, measure, results, lambda found: written.append([*found.rows])
    )
    assert failed == ["third", "fourth"] and reached == names
    assert written == [names[:i] for i in range(1, 6)]
    reasons = ["out of memory", "out of memory", "failed", "failed", "out of memory"]
    assert [row[3] for row in results.table()] == reasons


def test_a_batch_that_does_not_fit_is_recorded_and_half_of_it_is_tried(
    accelerator: ModuleType,
) -> None:
    tried = []

    def side(name: str, run: Any, options: Any) -> dict[str, Any]:
        tried.append(run.train.batch_size)
        if run.train.batch_size > 1:
            return {"out_of_memory": "RESOURCE_EXHAUSTED: Ran out of memory"}
        return {"seconds": [0.5] * 3, "product_flops": 1e14, "peak_bytes": 2**30, "kernel": "xla"}

    options = argparse.Namespace(smoke=False, batches=[], rounds=2)
    device = {"peak": 197e12}
    rows = accelerator.measured("llama_1b_8k", {"jaxformer": side}, device, options)
    assert tried == [4, 2, 1, 1]
    assert [row.get("out_of_memory") is not None for row in rows] == [True, True, False, False]
    assert rows[2]["tokens_per_second"] == 2 * 8192
    full, seen = rows[2]["flops_per_token"].values()
    scores = full - flops_per_token(
        accelerator.ACCELERATOR_WORKLOADS["llama_1b_8k"].model, 8192 // 2
    )
    assert full - seen == pytest.approx(scores, rel=1e-6), "half of the scores are masked"
    assert rows[2]["mfu"] == pytest.approx(2 * 8192 * full / 197e12)
    cells = accelerator.shown("llama_1b_8k", rows[2] | {"mfu": None})
    assert cells[5] == "?" and cells[8] == "1.0 GiB"


def test_the_memory_that_was_measured_is_within_a_tenth_of_the_plan(
    accelerator: ModuleType,
) -> None:
    result = json.loads((FOLDER / "results/train_gpu_nvidia_h200.json").read_text(encoding="utf-8"))
    compared = 0
    for name, rows in result["rows"].items():
        for row in rows:
            if row["with"] != "jaxformer" or "peak_bytes" not in row:
                continue
            run = accelerator.with_sizes(accelerator.ACCELERATOR_WORKLOADS[name], row["batch"], 1)
            run = replace(run, model=replace(run.model, dtype="bfloat16"))
            planned = make_plan(planned_run(run, "h200", 1)).memory.peak
            assert planned == pytest.approx(row["peak_bytes"], rel=0.1), name
            compared += 1
    assert compared == 7
