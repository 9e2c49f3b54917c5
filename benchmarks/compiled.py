"""Compiles train steps for TPUs and GPUs that are not here, by their real compilers, and tables what
these say: memory, traffic, the bound on the step, and collectives. Nothing is run.

    python benchmarks/compiled.py [--rows gpt2_scanned ...] [--label before] [--table FILE]

Needs the extras plan-tpu and plan-gpu; a row whose compiler is missing says so. Each row compiles in
a process of its own, one after the other, and is saved at once in results/compiled.json, or with
--label in results/compiled_LABEL.json. The table shows `before` beside each figure where
results/compiled_before.json has that row. --table writes it between the marks
`<!-- compiled -->` and `<!-- /compiled -->` of a Markdown file.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # compilers of other platforms are asked by name

from pairing import HERE, Answer, add_smoke, print_table, save

from jaxformer.config import ConfigError, RunConfig
from jaxformer.plan.compiled import compile_for, compiled_report
from jaxformer.plan.compiler_report import CompiledReport, report_of
from jaxformer.runs.config import load_config

CONFIGS = HERE.parent / "configs"
GIB = 2**30
MARKS = "<!-- compiled -->", "<!-- /compiled -->"
HEADER = ["step", "target", "temporaries", "peak", "traffic", "at least", "MFU at most"]
HEADER += ["all-reduces", "reduce-scatters", "attention"]


@dataclass(frozen=True)
class Row:
    """A step to compile: what it is, its config, target and settings; `packed` as in
    `compiled_report`."""

    title: str
    config: str
    target: str
    settings: tuple[str, ...] = ()
    packed: bool | None = None

    def run(self) -> RunConfig:
        return load_config(CONFIGS / f"{self.config}.py", self.settings)


def rows_of(rows: int, microbatches: int = 1, *more: str) -> tuple[str, ...]:
    """Settings for a number of rows, scanned."""
    sizes = (f"train.batch_size={rows}", f"train.microbatches={microbatches}")
    return (*sizes, "model.layer_loop=scan", *more)


def long_rows(length: int) -> tuple[str, ...]:
    """Settings for one row of `length` tokens in two layers."""
    sizes = (f"model.max_length={length}", f"data.sequence_length={length}")
    return rows_of(1, 1, "model.n_layers=2", *sizes)


UNROLLED = ("train.batch_size=64", "train.microbatches=1")
FSDP4, FSDP16 = "mesh.fsdp=4", "mesh.fsdp=16"
ROWS = {
    "gpt2_unrolled": Row("gpt2_124m, 64 rows, unrolled", "gpt2_124m", "h100:1x1", UNROLLED),
    "gpt2_scanned": Row("the same, scanned", "gpt2_124m", "h100:1x1", rows_of(64)),
    "gpt2_packed": Row("scanned and packed", "gpt2_124m", "h100:1x1", rows_of(64), packed=True),
    "llama_1b": Row("llama_1b, 8 rows, scanned", "llama_1b", "h100:1x1", rows_of(8)),
    "gpt2_v5e": Row("gpt2_124m, 32 rows, fsdp 4", "gpt2_124m", "v5e:2x2", rows_of(32, 1, FSDP4)),
    "llama3_8b_v5e": Row(
        "llama3_8b, 16 rows, fsdp 16", "llama3_8b", "v5e:4x4", rows_of(16, 1, FSDP16)
    ),
    "llama3_8b_h100": Row(
        "llama3_8b, its config, fsdp 8", "llama3_8b", "h100:1x8", ("mesh.fsdp=8",)
    ),
    "gpt2_microbatch": Row("gpt2_124m, 64 rows, data 8", "gpt2_124m", "h100:1x8", rows_of(64)),
    "gpt2_microbatches": Row(
        "the same, 512 rows in 8 microbatches", "gpt2_124m", "h100:1x8", rows_of(512, 8)
    ),
    **{
        f"packed_{length // 1024}k": Row(
            f"two layers of llama_1b, a packed row of {length:,}",
            "llama_1b",
            "h100:1x1",
            long_rows(length),
            packed=True,
        )
        for length in (8192, 16_384, 32_768)
    },
}
# A row that an older version of the library could compile only in another way says how.
TINY = ("model.d_model=32", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=512")
TINY += ("model.max_length=64", "data.sequence_length=64", "tokenizer.vocab_size=512")


def measure(row: Row, hlo: str = "") -> Answer:
    """The report of a row as JSON, or an "error" in its place."""
    described = {"title": row.title, "target": row.target, "settings": [*row.settings]}
    try:
        return described | compiled_report(row.run(), row.target, row.packed, hlo=hlo).as_json()
    except ConfigError as error:
        return described | {"error": str(error)}


def smoke() -> dict[str, Answer]:
    """A small step, compiled for this CPU and, where it is installed, by a compiler for GPUs."""
    settings = (*rows_of(4, 2), *TINY)
    here = Row("small, for this CPU", "gpt2_124m", "cpu", settings)
    report = compile_for(here.run(), "cpu", None)
    gpu = Row("small, for a GPU", "gpt2_124m", "h100:1x1", settings)
    return {"cpu": {"title": here.title, **report.as_json()}, "gpu": measure(gpu)}


def cells(result: Answer) -> list[str]:
    """A row of the table."""
    first = [result["title"], result["target"]]
    if "error" in result:
        return [*first, result["error"].partition("\n")[0], *[""] * (len(HEADER) - 3)]
    known = {name: value for name, value in result.items() if name not in ("title", "settings")}
    report = report_of(known)
    return first + figures(report)


def figures(report: CompiledReport) -> list[str]:
    memory, counts = report.memory, report.counts
    if memory is None or counts is None:
        needed = f"needs {report.needed / GIB:.1f} of {report.capacity / GIB:.2f} GiB"
        return [needed, *[""] * (len(HEADER) - 3)]
    gib = [f"{size / GIB:.1f} GiB" for size in (memory.temporary, memory.peak, counts.bytes)]
    bound = [math.nan, math.nan] if math.isnan(counts.seconds) else [counts.seconds * 1e3]
    bound_text = f"{bound[0]:,.0f} ms" if not math.isnan(bound[0]) else ""
    mfu = "" if math.isnan(report.mfu_bound) else f"{report.mfu_bound:.0%}"
    numbers = [
        sum(entry.count for entry in counts.collectives if entry.kind == kind)
        for kind in ("all-reduce", "reduce-scatter")
    ]
    return [*gib, bound_text, mfu, *map(str, numbers), report.kernel.partition(" ")[0]]
