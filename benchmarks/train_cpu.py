"""Trains the same mathematics in JAX and in PyTorch on this CPU, step by step in turn, and prints
how they compare.

    python benchmarks/train_cpu.py [--torch-python PYTHON] [--workloads small gpt2_124m] [--samples
    8]
    python benchmarks/train_cpu.py --jax-peers [--peers-python PYTHON]
    python benchmarks/train_cpu.py --dtypes

Both start from the same weights on the same tokens, so their losses must agree; that is checked.

With --jax-peers the step runs in turn with those of other libraries in JAX: GPT-2 of the same
shape, each with its own initial values, on the same tokens in float32 by the same AdamW.

With --dtypes the steps in float32 and in bfloat16, ours and PyTorch's eager ones and those under
autocast, run in turn, each side from its own initial values.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile

from pairing import (
    Answer,
    Neighbours,
    Worker,
    add_smoke,
    alternate,
    column,
    paired_ratio,
    print_table,
    python_worker,
    ratio_text,
    save,
    verdict,
)
from workloads import WORKLOADS, shrunk, torch_flags, with_sizes

from jaxformer.config.run import RunConfig
from jaxformer.models.cost import flops_per_token

LOSS_TOLERANCE = 2e-3  # nats, over the first steps from the same weights
HEADER = [
    "workload",
    "tokens/s",
    "PyTorch",
    "ratio",
    "fastest",
    "MFU",
    "PyTorch",
    "peak memory",
    "PyTorch",
    "ratio",
]

PEERS = {  # of jax_peer_baseline.py
    "nanodo": "nanodo's model",
    "nnx": "a decoder of flax.nnx",
    "keras_hub": "KerasHub's GPT-2",
}
PEERS_HEADER = ["library", "tokens/s", "ratio", "fastest", "of CPU seconds", "peak memory"]


def measure(workload: str, microbatches: int, options: argparse.Namespace) -> Answer:
    run = shrunk(WORKLOADS[workload]) if options.smoke else WORKLOADS[workload]
    run = with_sizes(run, 0, microbatches)
    pieces = ("--microbatches", str(microbatches))
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "weights.npz")
        own = ["--workload", workload, *pieces, "--save-weights", weights]
        own += ["--smoke"] if options.smoke else []
        ours = python_worker("jax", "jax_baseline.py", *own)
        flags = [*torch_flags(run), "--threads", str(os.cpu_count()), "--weights", weights]
        baseline = python_worker("torch", "torch_baseline.py", *flags, python=options.torch_python)
    with ours, baseline:
        products = alternate([ours, baseline], "product", samples=2, warmups=0)
        check_losses(*alternate([ours, baseline], "step", samples=3, warmups=0))
        neighbours = Neighbours([ours, baseline])
        steps = alternate([ours, baseline], "step", options.samples, warmups=0)
        share = neighbours.share()
        products += alternate([ours, baseline], "product", samples=2, warmups=0)
        best = max(flops for answers in products for flops in column(answers, "flops"))
        shape = {"workload": workload, "microbatches": microbatches, "neighbours": share}
        return shape | summary(run, steps, best, [ours, baseline])


def check_losses(ours: list[Answer], baseline: list[Answer]) -> None:
    gaps = [abs(a - b) for a, b in zip(column(ours, "loss"), column(baseline, "loss"), strict=True)]
    if not max(gaps) < LOSS_TOLERANCE:
        raise SystemExit(
            f"the two do not compute the same: losses {column(ours, 'loss')} and"
            f" {column(baseline, 'loss')}"
        )


def summary(
    run: RunConfig, steps: list[list[Answer]], product: float, workers: list[Worker]
) -> Answer:
    tokens = run.train.batch_size * run.data.sequence_length
    seconds = [column(answers, "seconds") for answers in steps]
    rates = [tokens / statistics.median(times) for times in seconds]
    flops = flops_per_token(run.model, run.data.sequence_length)
    return {
        "tokens_per_second": rates,
        "ratio": paired_ratio(seconds[0], seconds[1]),
        "ratio_of_the_fastest": min(seconds[1]) / min(seconds[0]),
        "product_flops": product,
        "flops_per_second": [rate * flops for rate in rates],
        "peak_bytes": [max(column(answers, "peak_bytes")) for answers in steps],
        "seconds": seconds,
        "versions": workers[0].about["versions"] | workers[1].about["versions"],
        "kernel": workers[0].about["kernel"],
    }


def row(result: Answer, product: float) -> list[str]:
    ours, baseline = result["peak_bytes"]
    count = result["microbatches"]
    name = result["workload"] + (f", {count} microbatch{'es' * (count > 1)}" if count else "")
    rates = [f"{rate:,.0f}" for rate in result["tokens_per_second"]]
    mfu = [f"{flops / product:.0%}" for flops in result["flops_per_second"]]
    ratios = [ratio_text(result["ratio"]), f"{result['ratio_of_the_fastest']:.2f}x"]
    memory = [f"{size / 1e9:.2f} GB" for size in (ours, baseline)]
    return [name, *rates, *ratios, *mfu, *memory, f"{ours / baseline:.2f}x"]


def measure_peers(options: argparse.Namespace) -> Answer:
    """Our step of the small workload in turn with those of the peers that are installed."""
    run = shrunk(WORKLOADS["small"]) if options.smoke else WORKLOADS["small"]
    workload = ["--workload", "small", *(["--smoke"] if options.smoke else [])]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(python_worker("jaxformer", "jax_baseline.py", *workload))
        peers = [
            stack.enter_context(
                python_worker(
                    name,
                    "jax_peer_baseline.py",
                    *("--peer", name, *torch_flags(run)),
                    python=options.peers_python,
                )
            )
            for name in PEERS
        ]
        workers = [ours, *(peer for peer in peers if "missing" not in peer.about)]
        first = alternate(workers, "step", samples=3, warmups=0)
        neighbours = Neighbours(workers)
        steps = alternate(workers, "step", options.samples, warmups=0)
        share = neighbours.share()
    for worker, before, after in zip(workers, first, steps, strict=True):
        if not after[-1]["loss"] < before[0]["loss"]:
            raise SystemExit(f"{worker.name} does not learn: {column(before + after, 'loss')}")
    tokens = run.train.batch_size * run.data.sequence_length
    our_seconds, our_cpu_seconds = column(steps[0], "seconds"), column(steps[0], "cpu_seconds")
    rows: dict[str, Answer] = {peer.name: peer.about for peer in peers}
    for worker, answers in zip(workers, steps, strict=True):
        seconds, cpu_seconds = column(answers, "seconds"), column(answers, "cpu_seconds")
        rows[worker.name] = {
            "tokens_per_second": tokens / statistics.median(seconds),
            "ratio": paired_ratio(our_seconds, seconds),
            "ratio_of_the_fastest": min(seconds) / min(our_seconds),
            "ratio_of_cpu_seconds": paired_ratio(our_cpu_seconds, cpu_seconds),
            "peak_bytes": max(column(answers, "peak_bytes")),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "versions": worker.about["versions"],
        }
    return {
        "neighbours": share,
        "rows": {worker.name: rows[worker.name] for worker in (ours, *peers)},
    }


def peer_row(name: str, result: Answer) -> list[str]:
    if "missing" in result:
        return [PEERS[name], result["missing"], *[""] * len(PEERS_HEADER[2:])]
    ratios = [ratio_text(result["ratio"]), f"{result['ratio_of_the_fastest']:.2f}x"]
    ratios.append(ratio_text(result["ratio_of_cpu_seconds"]))
    memory = f"{result['peak_bytes'] / 1e9:.2f} GB"
    return [PEERS.get(name, name), f"{result['tokens_per_second']:,.0f}", *ratios, memory]


def compare_peers(options: argparse.Namespace) -> None:
    result = measure_peers(options)
    print_table(PEERS_HEADER, [peer_row(name, row) for name, row in result["rows"].items()])
    print(
        f"Ratios: theirs over ours, median (range) of {options.samples} pairs; fastest: of the two"
        " fastest steps; CPU seconds: of all threads, which neighbours change least."
    )
    print(verdict(result["neighbours"]))
    save("train_cpu_peers", result, options.smoke)


def compare_dtypes(options: argparse.Namespace) -> None:
    results = []
    for workload in options.workloads:
        name = workload.partition(":")[0]
        run = shrunk(WORKLOADS[name]) if options.smoke else WORKLOADS[name]
        ours = ["--workload", name, *(["--smoke"] if options.smoke else [])]
        torch = [*torch_flags(run), "--threads", str(os.cpu_count())]
        python = options.torch_python
        with (
            python_worker("bfloat16", "jax_baseline.py", *ours, "--dtype", "bfloat16") as narrow,
            python_worker("float32", "jax_baseline.py", *ours, "--dtype", "float32") as wide,
            python_worker("PyTorch", "torch_baseline.py", *torch, python=python) as eager,
            python_worker(
                "PyTorch, autocast", "torch_baseline.py", *torch, "--bfloat16", python=python
            ) as autocast,
        ):
            workers = [narrow, wide, eager, autocast]
            first = alternate(workers, "step", samples=2, warmups=0)
            neighbours = Neighbours(workers)
            steps = alternate(workers, "step", options.samples, warmups=0)
            share = neighbours.share()
        tokens = run.train.batch_size * run.data.sequence_length
        for worker, before, after in zip(workers, first, steps, strict=True):
            if not after[-1]["loss"] < before[0]["loss"]:
                raise SystemExit(f"{worker.name} does not learn: {column(before + after, 'loss')}")
            seconds = column(after, "seconds")
            result = {
                "workload": name,
                "name": worker.name,
                "tokens_per_second": tokens / statistics.median(seconds),
                "of_bfloat16": paired_ratio(column(steps[0], "seconds"), seconds),
                "seconds": seconds,
                "neighbours": share,
            }
            results.append(result)
    header = ["workload", "step", "tokens/s", "bfloat16 is so many times as fast"]
    rows = []
    for result in results:
        speed = f"{result['tokens_per_second']:,.0f}"
        rows.append([result["workload"], result["name"], speed, ratio_text(result["of_bfloat16"])])
    print_table(header, rows)
    print(verdict(max(result["neighbours"] for result in results)))
    save("train_cpu_dtypes", {"results": results}, options.smoke)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    default = ["small", "small:1", "gpt2_124m"]
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=default,
        help="NAME, in the microbatches that a run selects, or NAME:MICROBATCHES",
    )
    parser.add_argument("--samples", type=int, default=8, help="paired samples")
    parser.add_argument("--jax-peers", action="store_true", help="beside libraries in JAX")
    parser.add_argument("--dtypes", action="store_true", help="float32 beside bfloat16")
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has them")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.workloads, options.samples = ["small:2"], 2
    if options.jax_peers:
        compare_peers(options)
        return
    if options.dtypes:
        compare_dtypes(options)
        return
    results = []
    for name in options.workloads:
        workload, _, pieces = name.partition(":")
        results.append(measure(workload, int(pieces or 0), options))
        print_table(HEADER, [row(results[-1], results[-1]["product_flops"])])
    best = max(result["product_flops"] for result in results)
    print()
    print_table(HEADER, [row(result, best) for result in results])
    print(
        f"Ratio: median (range) of {options.samples} pairs; fastest: that of the two fastest steps."
    )
    print(f"MFU: over the best product seen in this run, {best / 1e9:.0f} GFLOP/s.")
    print(verdict(max(result["neighbours"] for result in results)))
    save("train_cpu", {"results": results}, options.smoke)


if __name__ == "__main__":
    main()
