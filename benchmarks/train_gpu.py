"""GPT-2 124M and a 1.1B Llama on a GPU, beside torch.compile. `python benchmarks/train_gpu.py
[--torch-python PYTHON]`

Needs only a GPU, jax[cuda] and, for the baseline, PyTorch. First the device is checked: the
attention kernel against float32, forward and backward, on each workload's shapes, and a run that is
stopped and continued against one that is not. Then each is trained on random tokens by the
library's own step and by the baseline: the same mathematics (bfloat16 products and residual stream,
float32 master weights, fused AdamW, clipping) in separate processes one after the other, 5 steps of
warm-up, each timed step waited for, twice. `--smoke` runs the same code in small, on a CPU too, and
says nothing about a GPU.
"""

import argparse
import datetime
import importlib.util
import re
import statistics
import sys

from pairing import Answer, Worker, add_smoke, column, print_table, python_worker, save
from workloads import WORKLOADS, shrunk, torch_flags, with_sizes

from jaxformer.config import RunConfig
from jaxformer.models.cost import flops_per_token

WARMUPS = 5
FEWEST = 20  # timed steps
BATCHES = {
    "gpt2_124m_gpu": (64, 32, 16),
    "llama_1b_gpu": (16, 8, 4, 2),
}  # sequences a step, the first that fits both
HEADER = [
    "workload",
    "with",
    "batch",
    "tokens/s",
    "10th to 90th",
    "MFU",
    "causal",
    "of ceiling",
    "causal",
    "memory",
    "kernel",
]


def measure(worker: Worker, options: argparse.Namespace, *commands: str) -> Answer | None:
    """The timed steps of a worker; None where its memory ends."""
    answers: list[Answer] = []
    with worker:
        for command in (*commands, *["step"] * (options.warmups + options.steps), "product"):
            answers.append(worker.ask(command))
            if "out_of_memory" in answers[-1]:
                return None
    timed = answers[-options.steps - 1 : -1]
    return worker.about | {
        "seconds": column(timed, "seconds"),
        "losses": column(answers[len(commands) : -1], "loss"),
        "peak_bytes": max(column(timed, "peak_bytes")),
        "product_flops": answers[-1]["flops"],
        "xla": answers[0].get("xla", ""),
    }


def ours(workload: str, run: RunConfig, options: argparse.Namespace) -> Answer | None:
    flags = ["--workload", workload, "--batch", str(run.train.batch_size), *smoke_flag(options)]
    if options.xla:
        flags += ["--xla", *options.xla]
    return measure(python_worker("jax", "jax_gpu_baseline.py", *flags), options, "compile")


def baseline(workload: str, run: RunConfig, options: argparse.Namespace) -> Answer | None:
    flags = [
        *torch_flags(run),
        "--device",
        options.torch_device,
        "--torch-mode",
        options.torch_mode,
    ]
    worker = python_worker("torch", "torch_gpu_baseline.py", *flags, python=options.torch_python)
    return measure(worker, options)


def smoke_flag(options: argparse.Namespace) -> list[str]:
    return ["--smoke"] if options.smoke else []


NAMES = {ours: "jaxformer", baseline: "torch"}


def compare(workload: str, options: argparse.Namespace) -> tuple[RunConfig, list[Answer]]:
    """Both sides, round by round, at the largest batch of the list that fits both."""
    whole = shrunk(WORKLOADS[workload]) if options.smoke else WORKLOADS[workload]
    own = [whole.train.batch_size] if options.smoke else BATCHES[workload]
    batches = options.batches or own
    for batch in batches:
        run = with_sizes(whole, batch, 1)
        found: list[Answer] = []
        for side in [ours, baseline][: 1 + bool(options.torch_python)] * options.rounds:
            result = side(workload, run, options)
            if result is None:
                length = run.data.sequence_length
                print(f"{workload}: {batch} sequences of {length} do not fit with {NAMES[side]}.")
                break
            found.append({"with": NAMES[side]} | result)
        else:
            return run, found
    raise SystemExit(
        f"{workload}: not one of the batches {list(batches)} fits; give smaller ones by --batches."
    )


def row(workload: str, run: RunConfig, result: Answer, peak: float, ceiling: float) -> list[str]:
    """MFU counts the scores in full, causal only the half that is seen."""
    length = run.data.sequence_length
    tokens = run.train.batch_size * length
    rate = tokens / statistics.median(result["seconds"])
    cuts = statistics.quantiles(result["seconds"], n=10)
    full = flops_per_token(run.model, length)
    scores = flops_per_token(run.model, 2 * length) - full  # they alone grow with the length
    shares = [
        f"{rate * flops / limit:.1%}"
        for limit in (peak, ceiling)
        for flops in (full, full - scores / 2)
    ]
    size = [
        workload,
        result["with"],
        str(run.train.batch_size),
        f"{rate:,.0f}",
        f"{tokens / cuts[-1]:,.0f} - {tokens / cuts[0]:,.0f}",
    ]
    return [
        *size,
        *shares,
        f"{result['peak_bytes'] / 2**30:.1f} GiB",
        result["kernel"].partition(" (")[0],
    ]


def checked(options: argparse.Namespace) -> Answer:
    """What the device got right before anything is timed, printed."""
    flags = ["--workloads", *options.workloads, *smoke_flag(options)]
    worker = python_worker("check", "jax_gpu_baseline.py", *flags)
    if worker.about["platform"] != "gpu" and not options.smoke:
        worker.process.kill()
        raise SystemExit(
            f"jax sees no GPU here but {worker.about['device']}; `--smoke` proves the code without"
            " one."
        )
    found = worker.about | worker.read()
    for workload, kernel in found["kernels"].items():
        print(f"{workload}: attention {kernel}")
    apart = (
        "bitwise the same"
        if found["resume"]["bitwise"]
        else (
            f"NOT bitwise the same: losses {found['resume']['losses']}, parameters up to "
            f"{found['resume']['largest_parameter_gap']:.1e} apart"
        )
    )
    print(f"A run stopped and continued, beside one that was not: {apart}.", flush=True)
    worker.process.wait()
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[],
        help="sequences a step, tried in order until one fits",
    )
    parser.add_argument(
        "--steps", type=int, default=30, help=f"timed steps of a round, at least {FEWEST}"
    )
    parser.add_argument("--rounds", type=int, default=0, help="default 2, or 1 with --smoke")
    parser.add_argument(
        "--peak", type=float, default=989.0, help="the GPU's dense bfloat16 TFLOP/s"
    )
    parser.add_argument(
        "--xla", nargs="*", default=[], metavar="NAME=VALUE", help="compiler options of our step"
    )
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        help="a Python that has PyTorch; empty leaves the baseline out",
    )
    parser.add_argument(
        "--torch-mode", default="default", help="mode of torch.compile; none runs eagerly"
    )
    add_smoke(parser)
    options = parser.parse_args()
    options.warmups, options.rounds = WARMUPS, options.rounds or (1 if options.smoke else 2)
    if options.smoke:
        options.workloads, options.warmups, options.steps = ["llama_1b_gpu"], 1, 3
        options.torch_mode = "none"  # to compile takes a minute
    elif options.steps < FEWEST:
        parser.error(f"--steps must be at least {FEWEST}, or the median says little")
    if options.torch_python == sys.executable and importlib.util.find_spec("torch") is None:
        print(
            "No PyTorch in this Python, so the baseline is left out; --torch-python names another.",
            flush=True,
        )
        options.torch_python = ""
    return options


def main() -> None:
    options = parse()
    check = checked(options)
    options.torch_device = "cuda" if check["platform"] == "gpu" else "cpu"
    results, table = {}, []
    for workload in options.workloads:
        run, rounds = compare(workload, options)
        results[workload] = rounds
        ceiling = max(result["product_flops"] for result in rounds)
        table += [row(workload, run, result, options.peak * 1e12, ceiling) for result in rounds]
        losses = "; ".join(
            f"{r['with']} {r['losses'][0]:.3f} to {r['losses'][-1]:.3f}" for r in rounds
        )
        print(
            f"{workload}: ceiling {ceiling / 1e12:.3g} TFLOP/s, the best large bfloat16 product",
            end="",
        )
        print(f" of random data; loss {losses}")
    print_table(HEADER, table)
    print(
        f"MFU over {options.peak:g} TFLOP/s and over the ceiling; causal counts half of the scores."
    )
    versions = {
        name: value
        for rounds in results.values()
        for result in rounds
        for name, value in result["versions"].items()
    }
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    device = re.sub(r"[^a-z0-9]+", "-", check["device"].lower()).strip("-")
    result = {"peak_tflops": options.peak, "check": check, "results": results}
    save(f"train_gpu-{device}-{datetime.date.today()}", result, options.smoke)


if __name__ == "__main__":
    main()
