"""What experts are worth at the size of the quickstart: a dense decoder beside decoders of experts
with as many active parameters, on the same batches.

    python benchmarks/experts.py [--steps 200] [--seeds 5]

Each is one train.py line, with seeds 0, 1, ...; a difference is that of two runs of one seed. "At
equal FLOPs", the dense model takes the steps that have the FLOPs of the router too; in a row of its
own it takes about as many as fit in the time of the experts. Runs that are complete in --runs are
not trained again. Then the steps of all are timed in turn.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
from intervals import interval_ranks, interval_text, paired_interval  # noqa: E402
from pairing import (  # noqa: E402
    Answer,
    add_smoke,
    column,
    cpu_model,
    paired_ratio,
    print_table,
    ratio_text,
    save,
)
from seeded import arguments  # noqa: E402
from steps import ready  # noqa: E402
from workloads import CONFIGS, SMOKE_FIELDS, words_file  # noqa: E402

from jaxformer import RunConfig, load_config  # noqa: E402
from jaxformer.models.cost import flops_per_token, parameter_count  # noqa: E402

ROOT = Path(__file__).parent.parent
WARMUPS = 2
Settings = dict[str, object]
BASE: Settings = {
    "data.train": "stdlib",
    "data.validation_fraction": 0.05,
    "train.batch_size": 4,
    "train.eval_every": 0,
    "train.checkpoint_every": 0,
    "run.sample_tokens": 0,
    "run.progress": "lines",
}
EXPERTS: Settings = {"model.feed_forward": "experts"}
EIGHT = EXPERTS | {"model.experts.n": 8, "model.experts.per_token": 2, "model.experts.d_ff": 192}
SIXTEEN = EXPERTS | {"model.experts.n": 16, "model.experts.per_token": 4, "model.experts.d_ff": 96}
BALANCED: Settings = {"model.experts.router_bias": "balanced", "model.experts.balance_loss": 0.0}
METRICS = {"loss": "val_loss", "bits_per_byte": "val_bits_per_byte"}


class Variant(NamedTuple):
    """A model by its title, its settings beside those of `BASE`, and its steps as a multiple of
    --steps."""

    title: str
    settings: Settings
    longer: float = 1.0


# The hidden width of the dense model is 384, and so is that of the experts of a token together.
DENSE = Variant("dense", {})
VARIANTS = (
    DENSE,
    Variant("8 experts of 192, 2 per token", EIGHT),
    Variant("the same, balanced by a bias without a loss", EIGHT | BALANCED),
    Variant("dense, 1.8 times as many steps", {}, longer=1.8),
    Variant("16 experts of 96, 4 per token", SIXTEEN),
)
HEADER = [
    "feed-forward",
    "parameters",
    "FLOPs per token",
    "bits per byte",
    "fewer than dense",
    "at equal FLOPs",
    "ms per step",
    "ratio",
    "of CPU seconds",
]
Runs = dict[tuple[str, int, int], Answer]


def settings_of(variant: Variant, options: argparse.Namespace) -> Settings:
    settings = BASE | variant.settings
    if options.smoke:
        widths: Settings = {"model.d_ff": 64}
        widths |= {"model.experts.d_ff": 32} if variant.settings else {}
        settings |= SMOKE_FIELDS | widths | {"data.train": options.text}
        settings["data.cache_dir"] = options.runs / "data"
    return settings


def config_of(variant: Variant, options: argparse.Namespace) -> RunConfig:
    lines = [f"{key}={value}" for key, value in settings_of(variant, options).items()]
    vocabulary = SMOKE_FIELDS["tokenizer.vocab_size"] if options.smoke else 4096
    return load_config(CONFIGS / "quickstart.py", [*lines, f"model.vocab_size={vocabulary}"])


def trained(variant: Variant, seed: int, steps: int, options: argparse.Namespace) -> Answer:
    """The last evaluation of a run, which is trained unless its directory has that."""
    name = variant.title.replace(",", "").replace(" ", "-")
    run_dir = (options.runs / f"{name if variant.settings else 'dense'}-{seed}-{steps}").resolve()
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists() or '"val_loss"' not in metrics.read_text(encoding="utf-8"):
        settings = settings_of(variant, options) | {"train.steps": steps}
        settings |= {"run.dir": run_dir, "run.seed": seed}
        command = [sys.executable, "train.py", "configs/quickstart.py", *arguments(settings)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last: Answer = next(line for line in reversed(lines) if "val_loss" in line)
    bits = last["val_bits_per_byte"]
    print(f"{variant.title}, seed {seed}, {steps} steps: {bits:.4f} bits per byte", flush=True)
    return last


def timed(options: argparse.Namespace) -> dict[str, list[Answer]]:
    """The time of steps of each model by its title, in turn."""
    models = {variant.title: variant for variant in options.variants if variant.longer == 1}
    steps = {title: ready(config_of(variant, options)) for title, variant in models.items()}
    states = {title: entry.state() for title, entry in steps.items()}
    times: dict[str, list[Answer]] = {title: [] for title in models}
    for i in range(WARMUPS + options.samples):
        for title, entry in steps.items():
            batch = jax.block_until_ready(entry.batch(i))
            begin, cpu_begin = time.perf_counter(), time.process_time()
            with jax.set_mesh(entry.mesh):
                states[title], _ = entry.step(states[title], batch)
            jax.block_until_ready(states[title])
            cpu_seconds = time.process_time() - cpu_begin
            times[title].append(
                {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds}
            )
    return {title: answers[WARMUPS:] for title, answers in times.items()}


def flops_of(variant: Variant, options: argparse.Namespace) -> int:
    run = config_of(variant, options)
    return flops_per_token(run.model, run.data.sequence_length)


def steps_of_flops(variant: Variant, options: argparse.Namespace) -> int:
    """The fewest steps of the dense model that have the FLOPs of --steps of a variant."""
    return math.ceil(Fraction(options.steps * flops_of(variant, options), flops_of(DENSE, options)))


def summary(
    variant: Variant, runs: Runs, times: dict[str, list[Answer]], options: argparse.Namespace
) -> Answer:
    """A row of the results."""

    def values(title: str, steps: int, metric: str) -> list[float]:
        return [runs[title, seed, steps][metric] for seed in range(options.seeds)]

    steps, flops_steps = round(options.steps * variant.longer), steps_of_flops(variant, options)
    row: Answer = {
        "title": variant.title,
        "settings": variant.settings,
        "steps": steps,
        "parameters": parameter_count(config_of(variant, options).model),
        "flops_per_token": flops_of(variant, options),
        "dense_steps_of_equal_flops": flops_steps,
    }
    for name, metric in METRICS.items():
        row[name] = values(variant.title, steps, metric)
        row[f"fewer_{name}"] = paired_interval(
            values(DENSE.title, options.steps, metric), row[name]
        )
        if variant.settings:
            dense = values(DENSE.title, flops_steps, metric)
            row[f"fewer_{name}_at_equal_flops"] = paired_interval(dense, row[name])
    if variant.title in times:
        for unit in ("seconds", "cpu_seconds"):
            dense = column(times[DENSE.title], unit)
            taken = column(times[variant.title], unit)
            row |= {unit: statistics.median(taken), f"ratio_of_{unit}": paired_ratio(dense, taken)}
    return row


def cells(row: Answer) -> list[str]:
    is_first, is_timed = row["title"] == DENSE.title, "seconds" in row
    equal_flops = row.get("fewer_bits_per_byte_at_equal_flops")
    return [
        row["title"],
        f"{row['parameters'] / 1e6:.2f}M",
        f"{row['flops_per_token'] / 1e6:.2f}M",
        f"{statistics.median(row['bits_per_byte']):.4f}",
        "" if is_first else interval_text(row["fewer_bits_per_byte"]),
        interval_text(equal_flops) if equal_flops else "",
        f"{row['seconds'] * 1e3:.0f}" if is_timed else "",
        ratio_text(row["ratio_of_seconds"]) if is_timed and not is_first else "",
        ratio_text(row["ratio_of_cpu_seconds"]) if is_timed and not is_first else "",
    ]


def measure(options: argparse.Namespace) -> None:
    """Trains all runs, times their steps, and prints the table."""
    variants = options.variants
    dense_steps = sorted({steps_of_flops(variant, options) for variant in variants})
    asked = [(DENSE, steps) for steps in dense_steps]
    asked += [(variant, round(options.steps * variant.longer)) for variant in variants[1:]]
    runs: Runs = {}
    for variant, steps in asked:
        for seed in range(options.seeds):
            runs[variant.title, seed, steps] = trained(variant, seed, steps, options)
    times = timed(options)
    rows = [summary(variant, runs, times, options) for variant in variants]
    print_table(HEADER, [cells(row) for row in rows])
    coverage = interval_ranks(options.seeds).coverage
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    print(
        f"{options.steps} steps, seeds 0 to {options.seeds - 1}. In brackets: an interval for the"
        f" median of the paired differences ({coverage:.0%}), and the range of ratios over"
        f" {options.samples} pairs. {cpu_model()}; jax {versions['jax']}, jaxlib"
        f" {versions['jaxlib']}."
    )
    result = {"steps": options.steps, "seeds": options.seeds, "coverage": coverage}
    save("experts", result | {"versions": versions, "results": rows}, options.smoke)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20, help="timed steps of each")
    parser.add_argument("--runs", type=Path, default=Path("runs/experts"))
    add_smoke(parser)
    options = parser.parse_args()
    options.variants = VARIANTS
    if options.smoke:
        options.variants = VARIANTS[:2]
        with tempfile.TemporaryDirectory(prefix="jaxformer-experts-") as folder:
            options.text, options.runs = words_file(Path(folder)), Path(folder)
            options.steps, options.seeds, options.samples = 1, 1, 2
            measure(options)
        return
    measure(options)


if __name__ == "__main__":
    main()
