"""Compiles train steps for TPUs and GPUs that are not here, by their real compilers, and tables
what these say: memory, traffic, the bound on the step, and collectives. Nothing is run.

    python benchmarks/compiled.py [--rows gpt2_scanned ...] [--label before] [--table FILE]
    python benchmarks/compiled.py --rows --peer llama_1b_v5e maxtext.hlo

Needs the extras plan-tpu and plan-gpu; a row whose compiler is missing says so. Each row compiles
in a process of its own, one after the other, and is saved at once in results/compiled.json, or with
--label in results/compiled_LABEL.json. The table shows the figures of results/compiled_before.json
in brackets. --table writes it between the marks `<!-- compiled -->` and `<!-- /compiled -->` of a
Markdown file, between those of `context`, `experts`, `optimizers` and `recurrent` the steps with
divided rows, with experts, with two optimizers and with recurrent layers, and between those of
`peers` the same steps beside those of other libraries. --peer counts the optimized program of
another library for the step of a row, from a text file, as ours are counted; --rows without names
compiles none.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # compilers of other platforms are asked by name

from hlo import count
from hlo.counts import operations
from pairing import HERE, Answer, add_smoke, print_table, save, write_table

from jaxformer.arrays.hardware import DEVICES, GIB, Device
from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError
from jaxformer.runs.config import load_config
from jaxformer.runs.resolve import resolve_without_data
from jaxformer.tools.plan_compiled import (
    compile_for_target,
    compiled_report,
    model_flops,
    parse_target,
)
from jaxformer.tools.plan_memory import planned_run

CONFIGS = HERE.parent / "configs"
HEADER = ["step", "target", "temporaries", "peak", "traffic", "at least", "MFU at most"]
HEADER += ["all-reduces", "reduce-scatters", "attention"]
EXPERTS_HEADER = ["step", "target", "peak", "traffic", "at least", "MFU at most"]
EXPERTS_HEADER += ["products", "of those of the model"]
RECURRENT_HEADER = ["layers", "target", "peak", "traffic", "at least", "products"]
RECURRENT_HEADER += ["those of chunks", "time of chunks"]
# What is inside the scan over the chunks of a recurrent layer, by JAX's names.
IN_CHUNKS = re.compile(r"/(delta|mamba2)/.*while/body")
OPTIMIZERS_HEADER = ["step", "target", "peak", "traffic", "at least", "products", "collectives"]


@dataclass(frozen=True)
class Row:
    """A step to compile: what it is, its config, target and settings; `packed` as in
    `compiled_report`; `table` is the mark in the Markdown file of the table that it is in.
    """

    title: str
    config: str
    target: str
    settings: tuple[str, ...] = ()
    packed: bool | None = None
    table: str = "compiled"

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


def divided_row(length: int, target: str, *more: str) -> Row:
    """A row of `length` tokens of llama_1b, divided over all devices of a target."""
    devices = parse_target(target).size
    sizes = (f"model.max_length={length}", f"data.sequence_length={length}")
    settings = rows_of(1, 1, f"mesh.context={devices}", *sizes, *more)
    title = ", ".join([f"a row of {length:,}", f"context {devices}", *more])
    return Row(title, "llama_1b", target, settings, table="context")


def of_mixers(pattern: str, length: int, target: str) -> Row:
    """A row of `length` tokens in four layers of llama_1b with the mixers of a pattern."""
    sizes = (f"model.max_length={length}", f"data.sequence_length={length}", "model.n_layers=4")
    settings = rows_of(1, 1, *sizes, f"model.layer_pattern={pattern}", FULL)
    mixers = {"m": "attention", "dddm": "three of four recurrent"}[pattern]
    return Row(f"{mixers}, {length:,} tokens", "llama_1b", target, settings, table="recurrent")


def with_experts(config: str, target: str, layers: int, rows: int, *more: str) -> Row:
    """So many rows in some layers of a config with experts, which all devices of a target have."""
    settings = rows_of(rows, 1, f"model.n_layers={layers}", *more)
    title = ", ".join([f"{layers} layers of {config}, {rows} rows", *more])
    return Row(title, config, target, settings, table="experts")


UNROLLED = ("train.batch_size=64", "train.microbatches=1")
FSDP4, FSDP16 = "mesh.fsdp=4", "mesh.fsdp=16"
FULL = "model.remat=full"
E8, E16, CAPACITY = "mesh.expert=8", "mesh.expert=16", "model.experts.capacity=1.0"
STORED = (
    "model.remat=names",
    "model.saved=q,k,v,attention,out,gate,up,down,normed,hidden",
    "train.logits_dtype=bfloat16",
)
KEPT_BY_HOST = ("model.remat=names", "model.saved=none", "model.offload=attention,input")
ROWS = {
    "gpt2_unrolled": Row("gpt2_124m, 64 rows, unrolled", "gpt2_124m", "h100:1x1", UNROLLED),
    "gpt2_scanned": Row("the same, scanned", "gpt2_124m", "h100:1x1", rows_of(64)),
    "gpt2_packed": Row("scanned and packed", "gpt2_124m", "h100:1x1", rows_of(64), packed=True),
    "llama_1b": Row("llama_1b, 8 rows, scanned", "llama_1b", "h100:1x1", rows_of(8)),
    "gpt2_v5e": Row("gpt2_124m, 32 rows, fsdp 4", "gpt2_124m", "v5e:2x2", rows_of(32, 1, FSDP4)),
    "llama_1b_v5e": Row("llama_1b, 8 rows, fsdp 4", "llama_1b", "v5e:2x2", rows_of(8, 1, FSDP4)),
    "llama3_8b_v5e": Row(
        "llama3_8b, 16 rows, fsdp 16", "llama3_8b", "v5e:4x4", rows_of(16, 1, FSDP16)
    ),
    "llama3_8b_v5e_again": Row(
        "the same, attention computed again",
        "llama3_8b",
        "v5e:4x4",
        rows_of(16, 1, FSDP16, "model.remat=names", "model.saved=none"),
    ),
    "llama3_8b_v5e_host": Row(
        "llama3_8b, 16 rows, stored by the host",
        "llama3_8b",
        "v5e:4x4",
        rows_of(16, 1, FSDP16, *KEPT_BY_HOST),
    ),
    "llama3_8b_h100": Row(
        "llama3_8b, its config, fsdp 8", "llama3_8b", "h100:1x8", ("mesh.fsdp=8",)
    ),
    "gpt2_microbatch": Row("gpt2_124m, 64 rows, data 8", "gpt2_124m", "h100:1x8", rows_of(64)),
    "gpt2_microbatches": Row(
        "the same, 512 rows in 8 microbatches", "gpt2_124m", "h100:1x8", rows_of(512, 8)
    ),
    "bert_unrolled": Row(
        "bert_base, 64 rows, dropout, unrolled", "bert_base", "h100:1x1", UNROLLED
    ),
    "bert_base": Row("the same, scanned", "bert_base", "h100:1x1", rows_of(64)),
    "t5_unrolled": Row(
        "t5_small, 128 rows, unrolled",
        "t5_small",
        "h100:1x1",
        ("train.batch_size=128", UNROLLED[1], "model.dropout=0.0"),
    ),
    "t5_small": Row(
        "the same, scanned", "t5_small", "h100:1x1", rows_of(128, 1, "model.dropout=0.0")
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
    "llama_1b_unrolled": Row(
        "llama_1b, 8 rows, unrolled", "llama_1b", "h100:1x1", (*UNROLLED[1:], "train.batch_size=8")
    ),
    "gpt2_stored": Row(
        "gpt2_124m, 64 rows, unrolled, normed and hidden stored, bfloat16 logits",
        "gpt2_124m",
        "h100:1x1",
        (*UNROLLED, *STORED),
    ),
    "llama_1b_stored": Row(
        "llama_1b, 8 rows, unrolled, the same settings",
        "llama_1b",
        "h100:1x1",
        (*UNROLLED[1:], "train.batch_size=8", *STORED),
    ),
    "gpt2_deterministic": Row(
        "gpt2_124m, 64 rows, these settings, train.deterministic",
        "gpt2_124m",
        "h100:1x1",
        (*UNROLLED, *STORED, "train.deterministic=True"),
    ),
    "llama_1b_deterministic": Row(
        "llama_1b, 8 rows, these settings, train.deterministic",
        "llama_1b",
        "h100:1x1",
        (*UNROLLED[1:], "train.batch_size=8", *STORED, "train.deterministic=True"),
    ),
    "llama_1b_fp8": Row(
        "llama_1b, 8 rows, unrolled, train.products=fp8",
        "llama_1b",
        "h100:1x1",
        (*UNROLLED[1:], "train.batch_size=8", "train.products=fp8"),
    ),
    "llama3_8b_fp8": Row(
        "llama3_8b, its config, fsdp 8, train.products=fp8",
        "llama3_8b",
        "h100:1x8",
        ("mesh.fsdp=8", "train.products=fp8"),
    ),
    **{
        f"context_{length // 1024}k_{target.replace(':', '_')}": divided_row(length, target, *more)
        for length, target, *more in (
            (32_768, "h100:1x8"),
            (131_072, "h100:1x2", FULL),
            (131_072, "h100:1x4", FULL),
            (131_072, "h100:1x8", FULL),
            (524_288, "h100:1x8", FULL),
            (32_768, "v5e:4x4"),
            (131_072, "v5e:4x4", FULL),
            (131_072, "v5p:2x2x4"),
            (524_288, "v5p:2x2x4", FULL),
        )
    },
    **{
        f"{pattern}_{length // 1024}k_{target[:4].rstrip(':')}": of_mixers(pattern, length, target)
        for target in ("h100:1x1", "v5e:1x1")
        for length in (8192, 32_768, 131_072)
        for pattern in ("m", "dddm")
    },
    **{
        f"{optimizer}_{target[:4].rstrip(':')}": Row(
            f"llama_1b, 16 rows, fsdp {devices}, {optimizer}",
            "llama_1b",
            target,
            rows_of(16, 1, f"mesh.fsdp={devices}", f"optimizer.name={optimizer}"),
            table="optimizers",
        )
        for target, devices in (("h100:1x8", 8), ("v5e:4x4", 16))
        for optimizer in ("adamw", "muon")
    },
    "olmoe_h100": with_experts("olmoe_1b_7b", "h100:1x8", 16, 16, E8, CAPACITY),
    "olmoe_h100_dropless": with_experts("olmoe_1b_7b", "h100:1x8", 16, 16, E8, FULL),
    "mixtral_h100": with_experts("mixtral_8x7b", "h100:1x8", 8, 16, E8, CAPACITY, FULL),
    "mixtral_h100_dropless": with_experts("mixtral_8x7b", "h100:1x8", 8, 16, E8, FULL),
    "olmoe_v5e": with_experts("olmoe_1b_7b", "v5e:4x4", 16, 16, E16, CAPACITY, FULL),
    "olmoe_v5e_dropless": with_experts("olmoe_1b_7b", "v5e:4x4", 4, 16, E16, FULL),
    "mixtral_v5e": with_experts(
        "mixtral_8x7b", "v5e:4x4", 4, 16, E8, "mesh.fsdp=2", CAPACITY, FULL
    ),
    "mixtral_v5e_dropless": with_experts("mixtral_8x7b", "v5e:4x4", 2, 16, E8, "mesh.fsdp=2", FULL),
}
# The steps of other libraries with the same model, rows, dtype and mesh, counted in the same way:
# (milliseconds at least, GiB at the peak).
PEERS: dict[str, dict[str, tuple[float, float]]] = {
    "llama_1b_v5e": {"MaxText 0.2.5": (198, 9.07), "Levanter, with remat": (211, 4.71)},
    "gpt2_v5e": {
        "MaxText 0.2.5": (55.9, math.nan),
        "the same without its one-hot embedding": (49.4, math.nan),
    },
    "llama3_8b_v5e": {"MaxText 0.2.5": (3424, 12.4)},
    "llama3_8b_v5e_again": {"MaxText 0.2.5": (3424, 12.4)},
    "llama3_8b_v5e_host": {"MaxText 0.2.5": (3424, 12.4)},
    "llama_1b_unrolled": {"MaxText 0.2.5": (182, math.nan)},
    "gpt2_unrolled": {
        "MaxText 0.2.5": (123, math.nan),
        "the same, by arithmetic without its detours": (111, math.nan),
        "nanodo": (197, math.nan),
    },
}
PEERS_HEADER = ["step", "target", "at least", "peak", "peer", "at least", "peak", "time", "memory"]
TINY = (
    *("model.d_model=32", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=512"),
    *("model.max_length=64", "data.sequence_length=64", "tokenizer.vocab_size=512"),
)


def described(row: Row) -> Answer:
    return {"title": row.title, "config": row.config, "settings": [*row.settings]}


def measure(row: Row, hlo: Path | None = None) -> Answer:
    """The report of a row as JSON, with the counts of its program, or an "error" in its place. The
    program is written to `hlo`."""
    with tempfile.TemporaryDirectory() as folder:
        path = hlo or Path(folder, "program.hlo")
        try:
            report = compiled_report(row.run(), row.target, row.packed, hlo=path)
        except ConfigError as error:
            return described(row) | {"target": row.target, "error": str(error)}
        device = parse_target(row.target).device
        return described(row) | dataclasses.asdict(report) | counted_on(device, path)


def counted_on(device: Device, path: Path) -> Answer:
    """The counts of a program, which there is not where the compiler refused it, on a device, and
    the published FLOP/s of that."""
    found: Answer = {"counts": None, "peak_flops": device.bfloat16 or 0.0}
    if path.is_file():
        peak, bandwidth = device.bfloat16 or math.inf, device.bandwidth or math.inf
        text = path.read_text("utf-8")
        found["counts"] = dataclasses.asdict(count(text, peak, bandwidth))
        every = operations(text, peak, bandwidth).values()
        inside = [one for one in every if IN_CHUNKS.search(one.op_name)]
        found["chunks"] = {
            "flops": sum(one.flops for one in inside),
            "seconds": sum(one.seconds for one in inside),
        }
    return found


def smoke() -> dict[str, Answer]:
    """A small step, compiled for this CPU and, where it is installed, by the compiler for GPUs."""
    import jax

    settings = (*rows_of(4, 2), *TINY)
    here = Row("small", "gpt2_124m", "cpu", settings)
    resolved, batch = resolve_without_data(here.run(), make_mesh(devices=jax.devices()[:1]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.hlo")
        report = compile_for_target(resolved, batch, DEVICES["cpu"], "cpu", path)
        on_cpu = described(here) | dataclasses.asdict(report) | counted_on(DEVICES["cpu"], path)
    gpu = Row("small", "gpt2_124m", "h100:1x1", settings)
    return {"cpu": on_cpu, "gpu": measure(gpu)}


def cells(result: Answer, before: Answer | None) -> list[str]:
    """A row of the table, with the figures of `before` in brackets where they are others."""
    now, then = figures(result), figures(before) if before else []
    shown = [
        f"{new} ({old})" if old and old != new else new
        for new, old in itertools.zip_longest(now, then, fillvalue="")
    ]
    return [result["title"], result["target"], *shown]


def figures(result: Answer) -> list[str]:
    if "error" in result:
        return [result["error"].partition("\n")[0][:80], *[""] * len(HEADER[3:])]
    memory, counts = result["memory"], result["counts"]
    if not memory or counts is None:
        needed = f"refused: {result['needed'] / GIB:.1f} of {result['capacity'] / GIB:.2f} GiB"
        return [needed, *[""] * len(HEADER[3:])]
    sizes = (memory["temporary"], memory["peak"], counts["bytes"])
    gib = [f"{size / GIB:.1f} GiB" for size in sizes]
    bound = ["", ""]
    if seconds := counts["seconds"]:
        mfu = result["model_flops"] / (result["peak_flops"] * seconds)
        bound = [f"{seconds * 1e3:,.0f} ms", f"{mfu:.0%}"]
    numbers = [
        str(sum(entry["count"] for entry in counts["collectives"] if entry["kind"] == kind))
        for kind in ("all-reduce", "reduce-scatter")
    ]
    return [*gib, *bound, *numbers, result["kernel"].partition(" ")[0]]


def of_experts(answer: Answer) -> list[str]:
    """A row of the table of experts: with the FLOPs of the program on a device, and these as a
    multiple of those of the model, in which each token has its own experts alone."""
    temporaries, *numbers = figures(answer)
    if len(numbers) < 4 or not numbers[0]:
        return [answer["title"], answer["target"], temporaries, *[""] * (len(EXPERTS_HEADER) - 3)]
    flops = sum(answer["counts"]["products"].values()) + answer["counts"]["kernels"]
    products = [f"{flops / 1e12:.1f} TFLOP", f"{flops / answer['model_flops']:.2f}"]
    return [answer["title"], answer["target"], *numbers[:4], *products]


def of_optimizers(answer: Answer) -> list[str]:
    """A row of the table of optimizers: with the FLOPs of the program on a device, and its
    collectives by kind, each with its number and the bytes of its whole arrays."""
    _, peak, traffic, bound, *_ = figures(answer)
    flops = sum(answer["counts"]["products"].values()) + answer["counts"]["kernels"]
    kinds: dict[str, list[Answer]] = {}
    for entry in answer["counts"]["collectives"]:
        kinds.setdefault(entry["kind"], []).append(entry)
    collectives = [
        f"{sum(entry['count'] for entry in entries)} {kind},"
        f" {sum(entry['count'] * entry['bytes'] for entry in entries) / GIB:.2f} GiB"
        for kind, entries in sorted(kinds.items())
    ]
    products = f"{flops / 1e12:.1f} TFLOP"
    row = [answer["title"], answer["target"], peak, traffic, bound, products]
    return [*row, "; ".join(collectives)]


def of_recurrent(answer: Answer) -> list[str]:
    """A row of the table of recurrent layers: with the FLOPs of the program, and the shares that
    chunks have of them and of the bound."""
    temporaries, *numbers = figures(answer)
    if not numbers[0]:
        return [answer["title"], answer["target"], temporaries, *[""] * (len(RECURRENT_HEADER) - 3)]
    flops = sum(answer["counts"]["products"].values()) + answer["counts"]["kernels"]
    chunks = answer["chunks"]
    shares = (chunks["flops"] / flops, chunks["seconds"] / answer["counts"]["seconds"])
    products = f"{flops / 1e12:.1f} TFLOP"
    row = [answer["title"], answer["target"], *numbers[:3], products]
    return [*row, *(f"{share:.1%}" if share else "" for share in shares)]


def beside_peers(rows: dict[str, Answer]) -> list[list[str]]:
    """The rows of the table of peers: our figures, theirs, and ours as shares of theirs."""
    table = []
    for name in [name for name in PEERS if "error" not in rows.get(name, {"error": ""})]:
        answer = rows[name]
        if answer["counts"] is None or not answer["memory"]:
            continue
        ours = (answer["counts"]["seconds"] * 1e3, answer["memory"]["peak"] / GIB)
        for peer, theirs in PEERS[name].items():
            shares = [f"{mine / other:.0%}" for mine, other in zip(ours, theirs, strict=True)]
            table.append(
                [answer["title"], answer["target"], *shown(*ours), peer, *shown(*theirs), *shares]
            )
    unknown = (*shown(math.nan, math.nan), f"{math.nan:.0%}")
    return [["" if cell in unknown else cell for cell in row] for row in table]


def shown(milliseconds: float, gib: float) -> tuple[str, str]:
    return f"{milliseconds:,.1f} ms", f"{gib:.2f} GiB"


def counted(row: Row, path: Path) -> str:
    """A line about a peer's optimized program for the step of a row; its text has no memory."""
    target = parse_target(row.target)
    peak, bandwidth = target.device.bfloat16 or math.inf, target.device.bandwidth or math.inf
    counts = count(path.read_text(encoding="utf-8"), peak, bandwidth)
    step = planned_run(row.run(), target.kind, target.size, row.packed)
    mfu = model_flops(step) / (target.size * peak * counts.seconds)
    collectives = [f"{entry.count} x {entry.kind} {entry.shape}" for entry in counts.collectives]
    return (
        f"{path.name} as {row.title}: traffic {counts.bytes / GIB:.1f} GiB, at least"
        f" {counts.seconds * 1e3:,.1f} ms, MFU at most {mfu:.1%}; {'; '.join(collectives[:8])}"
    )


def saved(name: str) -> dict[str, Answer]:
    """The rows in results/NAME.json; none where there is no such file."""
    path = HERE / "results" / f"{name}.json"
    rows: dict[str, Answer] = json.loads(path.read_text())["rows"] if path.is_file() else {}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=[*ROWS], choices=ROWS, metavar="ROW")
    parser.add_argument("--label", default="", help="save as results/compiled_LABEL.json")
    parser.add_argument("--table", type=Path, help="a Markdown file that gets the table")
    parser.add_argument("--hlo", type=Path, help="a directory for the optimized programs")
    parser.add_argument(
        "--peer", nargs=2, action="append", default=[], metavar=("ROW", "FILE"), help="count a file"
    )
    add_smoke(parser)
    options = parser.parse_args()
    name = f"compiled_{options.label}" if options.label else "compiled"
    rows, before = ({}, {}) if options.smoke else (saved(name), saved("compiled_before"))
    if options.smoke:
        rows = smoke()
    for row in [] if options.smoke else options.rows:
        hlo = options.hlo / f"{name}_{row}.hlo" if options.hlo else None
        rows[row] = measure(ROWS[row], hlo)
        print(f"{row}: {', '.join(figures(rows[row]))}", flush=True)
        save(name, {"rows": rows}, smoke=False)
    tables: dict[str, list[list[str]]] = {
        "compiled": [],
        "context": [],
        "experts": [],
        "optimizers": [],
        "recurrent": [],
    }
    special = {"experts": of_experts, "optimizers": of_optimizers, "recurrent": of_recurrent}
    for row in [row for row in dict.fromkeys([*ROWS, *rows]) if row in rows]:
        of_table = ROWS[row].table if row in ROWS else "compiled"
        answer = rows[row]
        if of_table in special:
            tables[of_table].append(special[of_table](answer))
        else:
            tables[of_table].append(cells(answer, before.get(row)))
    headers = dict.fromkeys(tables, HEADER) | {"experts": EXPERTS_HEADER, "peers": PEERS_HEADER}
    headers["optimizers"] = OPTIMIZERS_HEADER
    headers["recurrent"] = RECURRENT_HEADER
    tables["peers"] = beside_peers(rows)
    for mark, table in tables.items():
        print_table(headers[mark], table)
    for row, path in options.peer:
        print(counted(ROWS[row], Path(path)))
    if options.smoke:
        save(name, {"rows": rows}, smoke=True)
    if options.table:
        for mark, table in tables.items():
            write_table(options.table, mark, headers[mark], table)


if __name__ == "__main__":
    main()
