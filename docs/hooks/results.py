"""Tables of what the scripts of benchmarks/ measured, from benchmarks/results/*.json.

`<!-- results: NAME -->` in a page stands for the table of NAME, with its date and machine.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MARK = re.compile(r"<!-- results: (\w+) -->")
Result = dict[str, Any]


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda found: table_of(found[1]), markdown)


def gpu_queue() -> str:
    """A row for each entry of benchmarks/gpu_queue.py, with the files that hold its results."""
    sys.path.insert(0, str(RESULTS.parent))
    from gpu_queue import entries

    lines = ["| number | entry | command | results |", "|---|---|---|---|"]
    for entry in entries():
        found = []
        for path in sorted(RESULTS.glob(f"gpu_{entry.name}_nvidia_*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            text = f"{result['device']}, {result['date'][:10]}, {result['state']}: `{path.name}`"
            found.append(text)
        results = "<br>".join(found) or "not run yet"
        lines.append(f"| {entry.number} | {entry.name} | `{entry.command}` | {results} |")
    return "\n".join(lines)


def table_of(name: str) -> str:
    """The table of a benchmark, and a line on when and where it was measured."""
    if name == "gpu_queue":
        return gpu_queue()
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    header, rows = TABLES[name](result)
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table}\n\n{_origin(name, result)}"


def _origin(name: str, result: Result) -> str:
    machine, versions = result["machine"], _versions(result)
    used = ", ".join(f"{package} {number}" for package, number in versions.items())
    neighbours = result.get("neighbours", 0.0)
    shared = f" Other processes took {neighbours:.0%} of the CPU." if neighbours > 0.03 else ""
    device = result.get("device", "")
    if isinstance(device, dict):
        device = device["device"]
    where = f"an {device}" if device else f"{machine['cores']} cores of an {machine['cpu']}"
    return (
        f"Measured on {result['date'][:10]} on {where}"
        f"{f' with {used}' if used else ''}; `benchmarks/results/{name}.json`.{shared}"
    )


def _versions(found: Any) -> dict[str, str]:
    """The versions of packages, wherever a result states them."""
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    versions = dict(found.get("versions", {})) if isinstance(found, dict) else {}
    for part in parts:
        versions |= _versions(part)
    return versions


def ratio(found: Result) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def median(numbers: Sequence[float]) -> float:
    return statistics.median(numbers)


def train_cpu(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["step", "tokens/s", "PyTorch", "ratio of pairs", "peak memory", "PyTorch"]
    return header, (
        [
            f"{row.get('workload') or row['work']}, microbatches: {row['microbatches'] or 'auto'}",
            *(f"{rate:,.0f}" for rate in row["tokens_per_second"]),
            ratio(row["ratio"]),
            *map(gigabytes, row["peak_bytes"]),
        ]
        for row in result["results"]
    )


def train_cpu_peers(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["library", "tokens/s", "ratio of pairs", "ratio of CPU seconds", "peak memory"]
    return header, (
        [name, row["missing"], "", "", ""]
        if "missing" in row
        else [
            name,
            f"{row['tokens_per_second']:,.0f}",
            ratio(row["ratio"]),
            ratio(row["ratio_of_cpu_seconds"]),
            gigabytes(row["peak_bytes"]),
        ]
        for name, row in result["rows"].items()
    )


def decode_cpu(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["library", "seconds for all", "first token", "tokens/s after it", "of the limit"]
    sides = zip(
        ("jaxformer", "transformers"),
        map(median, result["seconds"]),
        result["first_token_seconds"],
        result["tokens_per_second_after_the_first"],
        result["share_of_limit"],
        strict=True,
    )
    return header, (
        [name, f"{whole:.2f}", f"{first:.2f}", f"{rate:.1f}", f"{share['median']:.0%}"]
        for name, whole, first, rate, share in sides
    )


def train_gpu(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    """MFU counts all scores of attention, or those that are seen; the ceiling is the fastest large
    product of all rows."""
    header = ["workload", "library", "rows x tokens", "tokens/s", "10th to 90th", "MFU", "causal"]
    header += ["of the ceiling", "memory"]
    timed = [
        (name, row) for name, rows in result["rows"].items() for row in rows if "seconds" in row
    ]
    ceiling = max(row["product_flops"] for _, row in timed)

    def cells(name: str, row: Result) -> list[str]:
        tokens, cuts = row["batch"] * row["length"], statistics.quantiles(row["seconds"], n=10)
        flops = row["tokens_per_second"] * row["flops_per_token"]["full"]
        shares = (row["mfu"], row["seen_mfu"], flops / ceiling)
        rates = f"{tokens / cuts[-1]:,.0f} to {tokens / cuts[0]:,.0f}"
        size = f"{row['batch']} x {row['length']:,}"
        rate = f"{row['tokens_per_second']:,.0f}"
        percent = [f"{share:.1%}" for share in shares]
        return [name, row["with"], size, rate, rates, *percent, gigabytes(row["peak_bytes"])]

    return header, (cells(name, row) for name, row in timed)


def decode_gpu(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["weights", "rows", "bytes of the weights", "tokens/s", "limit", "of the limit"]
    return header, (
        [
            row["kind"],
            str(row["batch"]),
            gigabytes(row["bytes"]),
            f"{median(row['tokens_per_second']):,.0f}",
            f"{median(row['limit_tokens_per_second']):,.0f}",
            "{median:.0%} ({low:.0%} to {high:.0%})".format(**row["share_of_limit"]),
        ]
        for row in result["results"]
    )


def tokens_training(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["text", "entries", "jaxformer", "tokenizers", "our time over theirs"]
    return header, (
        [
            case,
            f"{row['entries'][0]:,}",
            *(f"{median(seconds):.2f} s" for seconds in row["seconds"]),
            ratio(row["ratio"]),
        ]
        for case, row in result["cases"].items()
    )


def tokens_encoding(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    sides = list(next(iter(result["cases"].values()))["seconds"])
    header = ["text", *sides, "ours over tokenizers"]
    return header, (
        [
            case,
            *(f"{row['bytes'] / 1e6 / median(row['seconds'][side]):.1f} MB/s" for side in sides),
            ratio(row["ratios"][0]),
        ]
        for case, row in result["cases"].items()
    )


def tokens_loader(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    rates = result["tokens_per_second"]
    trained = median(rates["training"])
    return ["batches", "tokens/s", "times the training speed"], (
        [way, f"{median(found):,.0f}", f"{median(found) / trained:,.0f}"]
        for way, found in rates.items()
    )


def finetune(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["method", "learned parameters", "base", "optimizer", "memory above the base"]
    return header, (
        [
            row["method"],
            f"{row['learned']:,}",
            gigabytes(row["base_bytes"]),
            gigabytes(row["optimizer_bytes"]),
            gigabytes(row["above_base"]) + ("" if row["seconds"] else " (compiled, not run)"),
        ]
        for row in result["results"]
    )


def pretrained_memory(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["what", "files", "parameters", "model", "largest leaf", "memory above", "seconds"]
    return header, (
        [
            f"{row['what']}, {row['shape']}" + (", 2 devices" if row.get("devices") == 2 else ""),
            row["files"],
            row["params"],
            *(gigabytes(row[size]) for size in ("model", "largest_leaf", "excess")),
            f"{row['seconds']:.1f}",
        ]
        for row in result["cases"]
    )


def experts(result: Result) -> tuple[list[str], Iterable[list[str]]]:
    header = ["feed-forward", "parameters", "bits per byte", "fewer than dense", "at equal FLOPs"]
    header += ["time of a step", "CPU time of a step"]

    def fewer(row: Result, name: str) -> str:
        if name not in row or row["title"] == "dense":
            return ""
        return "{median:+.4f} ({low:+.4f} to {high:+.4f})".format(**row[name])

    return header, (
        [
            row["title"],
            f"{row['parameters'] / 1e6:.2f}M",
            f"{median(row['bits_per_byte']):.4f}",
            fewer(row, "fewer_bits_per_byte"),
            fewer(row, "fewer_bits_per_byte_at_equal_flops"),
            ratio(row["ratio_of_seconds"]) if "ratio_of_seconds" in row else "",
            ratio(row["ratio_of_cpu_seconds"]) if "ratio_of_cpu_seconds" in row else "",
        ]
        for row in result["results"]
    )


TABLES: dict[str, Callable[[Result], tuple[list[str], Iterable[list[str]]]]] = {
    "train_cpu": train_cpu,
    "train_cpu_peers": train_cpu_peers,
    "decode_cpu": decode_cpu,
    "train_gpu_nvidia_h200": train_gpu,
    "decode_gpu": decode_gpu,
    "tokens_training": tokens_training,
    "tokens_encoding": tokens_encoding,
    "tokens_loader": tokens_loader,
    "finetune": finetune,
    "pretrained_memory": pretrained_memory,
    "experts": experts,
}
