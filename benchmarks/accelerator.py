"""What train_gpu.py and train_tpu.py share: the library's own step on each workload of an
accelerator, row by row, in processes of their own.

A row that does not fit, or fails, is recorded as such and the next one runs; the results are
written after each row.
"""

import argparse
import contextlib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pairing import Answer, Worker, add_smoke, column, print_table, python_worker, save
from workloads import ACCELERATOR_WORKLOADS, shrunk, with_sizes

from jaxformer.arrays.hardware import peak_flops
from jaxformer.config.run import RunConfig
from jaxformer.models.cost import flops_per_token
from jaxformer.report import human_bytes

WARMUPS = 5
FEWEST = 20  # timed steps
WORKER = "jax_accelerator_baseline.py"
HEADER = (
    *("workload", "with", "batch", "tokens/s", "10th to 90th"),
    *("MFU", "causal", "of ceiling", "memory", "kernel"),
)
# Trains a workload: (name, run, options) -> the answers, with "out_of_memory" where it ends.
Side = Callable[[str, RunConfig, argparse.Namespace], Answer]


@dataclass
class Results:
    """What is saved: the device, what was checked, and the rows so far."""

    device: Answer
    rows: dict[str, list[Answer]] = field(default_factory=dict)

    def table(self) -> list[list[str]]:
        rows = [(name, row) for name, found in self.rows.items() for row in found]
        return [shown(name, row) for name, row in rows if "checked" not in row]


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(ACCELERATOR_WORKLOADS)
    parser.add_argument("--workloads", nargs="+", default=[], choices=names, metavar="NAME")
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[],
        help="sequences a step on a device, tried in order until one fits; default: the workload's"
        " own and its halves",
    )
    parser.add_argument("--fsdp", type=int, default=1, help="devices that share the parameters")
    parser.add_argument(
        "--steps", type=int, default=30, help=f"timed steps of a round, at least {FEWEST}"
    )
    parser.add_argument("--rounds", type=int, default=0, help="default 2, or 1 with --smoke")
    parser.add_argument(
        "--part",
        choices=("all", "checks", "times"),
        default="all",
        help="check the device alone, or time the workloads of a device that was checked",
    )
    parser.add_argument(
        "--peak",
        type=float,
        default=None,
        help="dense bfloat16 TFLOP/s of the device, where arrays/hardware.py does not know it",
    )
    parser.add_argument(
        "--xla", nargs="*", default=[], metavar="NAME=VALUE", help="compiler options of our step"
    )
    add_smoke(parser)
    return parser


def parsed(parser: argparse.ArgumentParser, smoke: Sequence[str]) -> argparse.Namespace:
    """The options; a smoke test runs the workloads in `smoke` unless others are named."""
    options = parser.parse_args()
    names = [*smoke] if options.smoke else [*ACCELERATOR_WORKLOADS]
    options.workloads = options.workloads or names
    options.warmups, options.rounds = WARMUPS, options.rounds or (1 if options.smoke else 2)
    if options.smoke:
        options.warmups, options.steps = 1, 2
    elif options.steps < FEWEST:
        parser.error(f"--steps must be at least {FEWEST}, or the median says little")
    options.worker = None
    return options


@contextlib.contextmanager
def jax_worker(options: argparse.Namespace) -> Iterator[Worker]:
    """A new process for each row, whose peak of memory is that of the row alone; a smoke test has
    one for all."""
    flags = ["--smoke"] if options.smoke else []
    if options.smoke:
        if options.worker is None or options.worker.process.poll() is not None:
            options.worker = python_worker("jax", WORKER, *flags)
        yield options.worker
        return
    with python_worker("jax", WORKER, *flags) as worker:
        yield worker


def timed(worker: Worker, options: argparse.Namespace) -> Answer:
    """The timed steps of a worker that is ready; "out_of_memory" says where its memory ends."""
    answers: list[Answer] = []
    for command in (*["step"] * (options.warmups + options.steps), "product"):
        answers.append(worker.ask(command))
        if "out_of_memory" in answers[-1]:
            return answers[-1]
    steps = answers[-options.steps - 1 : -1]
    return {
        "seconds": column(steps, "seconds"),
        "losses": column(answers[:-1], "loss"),
        "peak_bytes": max(column(steps, "peak_bytes")),
        "product_flops": answers[-1]["flops"],
    }


def ours(name: str, run: RunConfig, options: argparse.Namespace) -> Answer:
    with jax_worker(options) as worker:
        batch = run.train.batch_size
        found = worker.ask(f"load {name} {batch} {options.fsdp}")
        if "out_of_memory" not in found:
            found |= worker.ask(" ".join(["compile", *options.xla]))
        if "out_of_memory" not in found:
            found |= timed(worker, options)
        return found


def measured(
    name: str, sides: dict[str, Side], device: Answer, options: argparse.Namespace
) -> list[Answer]:
    """The rounds of a workload with each side, at the largest batch that fits all; what did not fit
    comes first."""
    whole = ACCELERATOR_WORKLOADS[name]
    run = shrunk(whole) if options.smoke else whole
    batches = options.batches or halves(run.train.batch_size)
    refused: list[Answer] = []
    for batch in batches:
        run, found = with_sizes(run, batch, 1), list[Answer]()
        for side in [*sides] * options.rounds:
            facts = {"with": side, "batch": batch, "length": run.data.sequence_length}
            result = sides[side](name, run, options)
            if "out_of_memory" in result:
                print(f"{name}: {batch} sequences do not fit with {side}.", flush=True)
                refused.append(facts | {"out_of_memory": result["out_of_memory"]})
                break
            found.append(facts | result | costs(run, result, device))
        else:
            return refused + found
    return refused


def halves(batch: int) -> list[int]:
    found = [batch]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def costs(run: RunConfig, result: Answer, device: Answer) -> Answer:
    """FLOP/s of a device as multiples of its peak, and those of a decoder with only the scores that
    it sees counted."""
    length, source = run.data.sequence_length, run.data.source_length
    rate = run.train.batch_size * length / statistics.median(result["seconds"])
    full = flops_per_token(run.model, length, source)
    seen = full
    if run.model.family == "decoder":
        scores = flops_per_token(run.model, 2 * length) - full  # they alone grow with the length
        reach = min(run.model.window or length, length)
        seen -= scores - round(scores * (reach / length) * (1 - reach / (2 * length)))
    return {
        "tokens_per_second": rate,
        "flops_per_token": {"full": full, "seen": seen},
        "mfu": device["peak"] and rate * full / device["peak"],
        "seen_mfu": device["peak"] and rate * seen / device["peak"],
        "of_ceiling": rate * full / result["product_flops"],
    }


def run_rows(
    names: Sequence[str],
    measure: Callable[[str], list[Answer]],
    results: Results,
    write: Callable[[Results], None],
) -> list[str]:
    """Measures each workload and writes the results after each; the names of those that failed."""
    failed = []
    for name in names:
        try:
            results.rows[name] = measure(name)
        except (Exception, SystemExit) as error:  # a worker that ends raises SystemExit
            results.rows[name] = [{"with": "jaxformer", "failed": f"{error}"[:2000]}]
            print(f"{name} failed: {error}", flush=True)
            failed.append(name)
        write(results)
    return failed


def shown(name: str, row: Answer) -> list[str]:
    """A row of the table. MFU counts the scores in full, "causal" those that are seen."""
    if "seconds" not in row:
        reason = "out of memory" if "out_of_memory" in row else "failed"
        return [name, row["with"], str(row.get("batch", "")), reason, *[""] * (len(HEADER) - 4)]
    tokens, cuts = row["batch"] * row["length"], statistics.quantiles(row["seconds"], n=10)
    shares = (row["mfu"], row["seen_mfu"], row["of_ceiling"])
    return [
        name,
        row["with"],
        str(row["batch"]),
        f"{row['tokens_per_second']:,.0f}",
        f"{tokens / cuts[-1]:,.0f} - {tokens / cuts[0]:,.0f}",
        *("?" if share is None else f"{share:.1%}" for share in shares),
        human_bytes(row["peak_bytes"]),
        row["kernel"].partition(" (")[0],
    ]


def checked(platform: str, options: argparse.Namespace) -> Answer:
    """What the device is, and what it got right before anything is timed, printed."""
    with jax_worker(options) as worker:
        about = dict(worker.about)
        if about["platform"] != platform and not options.smoke:
            raise SystemExit(
                f"jax sees no {platform.upper()} here but {about['device']}; `--smoke` proves the"
                " code without one."
            )
        if options.part != "times":
            for check in ("resume", "logits", "decoding"):
                about |= worker.ask(check)
            same = about["resume"]["bitwise"]
            apart = "bitwise the same" if same else f"NOT bitwise the same: {about['resume']}"
            print(f"A run stopped and continued, beside one that was not: {apart}.")
            print(f"Logits in float32 beside those of the CPU: {about['logits']}")
            print(f"Decoding beside the forward pass: {about['decoding']}", flush=True)
    stated = options.peak and options.peak * 1e12
    about["peak"] = stated or peak_flops(about["device"], "bfloat16")
    return about


def checked_kernels(name: str, options: argparse.Namespace) -> str:
    """Which kernels serve a workload, and their errors, printed too. Raises RuntimeError where one
    is wrong or refused."""
    with jax_worker(options) as worker:
        answer = worker.ask(f"check {name} {options.fsdp}")
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    found = str(answer.get("kernel", "unchecked: out of memory"))
    print(f"{name}: attention {found}", flush=True)
    return found


def run_benchmark(
    platform: str, sides_of: Callable[[str], dict[str, Side]], options: argparse.Namespace
) -> int:
    """The whole benchmark, with the sides of each workload by name; the exit status, 1 if a row
    failed or a check of the device did."""
    device = checked(platform, options)
    kind = re.sub(r"[^a-z0-9]+", "_", device["device"].lower()).strip("_")
    part = "" if options.part == "all" else f"_{options.part}"
    path = f"train_{platform}_{kind}{part}"

    def measure(name: str) -> list[Answer]:
        checks = []
        if options.part != "times":
            checks.append({"with": "jaxformer", "checked": checked_kernels(name, options)})
        if options.part == "checks":
            return checks
        return checks + measured(name, sides_of(name), device, options)

    def write(results: Results) -> None:
        if not options.smoke:
            save(path, {"device": results.device, "rows": results.rows}, smoke=False)

    results = Results(device)
    failed = run_rows(options.workloads, measure, results, write)
    print_table(HEADER, results.table())
    peak = f"{device['peak'] / 1e12:g} TFLOP/s" if device["peak"] else "an unknown peak"
    print(
        f"Of one device of {device['devices']}: MFU over {peak}; causal counts only the scores that"
        " are seen; the ceiling is the best large bfloat16 product of random data."
    )
    print(", ".join(f"{name} {value}" for name, value in device["versions"].items()))
    if options.worker is not None:
        options.worker.close()
        save(path, {}, smoke=True)
    checks = {name: device[name] for name in ("logits", "decoding") if name in device}
    wrong = [name for name, found in checks.items() if not found["right"]]
    if wrong:
        print(f"NOT right on this device: {', '.join(wrong)}.")
    return 1 if failed or wrong else 0
