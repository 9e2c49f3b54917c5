"""What choices of a transformer and of its training are worth: each beside a small Llama, to
results/ablations.json and docs/ablations.md.

    python benchmarks/ablations.py --text tinyshakespeare.txt [--seeds 5] [--steps 300]

A row is one train.py line. Its learning rate is the best of --rates by a run of `TUNING_SEED`, the
same trials for each row; with that rate it runs with the seeds 0, 1, ... A difference is that of
two runs of one seed, which read the same batches. Every run is kept in the JSON file when it ends,
and the same command makes those that are missing there: of more seeds, or after it was stopped.
"""

import argparse
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from jaxformer.cluster.entry_point import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
from intervals import (  # noqa: E402
    CONFIDENCE,
    PairedInterval,
    interval_ranks,
    interval_text,
    is_apart,
    paired_interval,
)
from pairing import Answer, add_smoke, cpu_model, write_result  # noqa: E402
from workloads import CONFIGS, SMOKE_FIELDS, words_file  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.files import write_text  # noqa: E402

ROOT = Path(__file__).parent.parent
Settings = dict[str, object]
BATCH, LENGTH = 16, 64
TUNING_SEED = 1000  # none of those that are compared
BASE: Settings = {
    "model.d_model": 64,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "model.d_ff": 192,
    "model.tied_head": False,
    "data.sequence_length": LENGTH,
    "tokenizer.kind": "characters",
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 50,
    "train.batch_size": BATCH,
    "train.eval_every": 0,
    "train.log_every": 100,
    "train.checkpoint_every": 0,
    "run.sample_tokens": 0,
}
ORIGINAL: Settings = {  # configs/transformer_base.py, as a decoder
    "model.norm": "layer",
    "model.norm_placement": "post",
    "model.positions": "sinusoidal",
    "model.activation": "relu",
    "model.d_ff": 256,
    "model.bias": "all",
    "model.embedding_scale": "sqrt",
    "model.tied_head": True,
    "model.init": "xavier",
    "optimizer.b2": 0.98,
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
}


class Variant(NamedTuple):
    """A row: its title, its settings beside those of `BASE`, and the row that it is compared with
    besides the base, if any."""

    title: str
    settings: Settings
    beside: str = ""


BASE_TITLE = "base: RMSNorm before each sublayer, RoPE, SwiGLU of 3 d_model, 4 heads, AdamW"
WARM_ORIGINAL = "the transformer of 2017, with warm-up"
VARIANTS = (
    Variant(BASE_TITLE, {}),
    Variant("no norm", {"model.norm": "none"}),
    Variant("post-norm", {"model.norm_placement": "post"}),
    Variant("sandwich norm", {"model.norm_placement": "sandwich"}),
    Variant("QK-norm", {"model.query_key_norm": "head"}),
    Variant("parallel residual", {"model.residual": "parallel"}),
    Variant("no positions", {"model.positions": "none"}),
    Variant("SiLU of 4 d_model instead of SwiGLU", {"model.activation": "silu", "model.d_ff": 256}),
    Variant("1 head", {"model.n_heads": 1}),
    Variant("2 heads", {"model.n_heads": 2}),
    Variant("8 heads", {"model.n_heads": 8}),
    Variant("tied head", {"model.tied_head": True}),
    Variant("z-loss of 1e-4", {"train.z_loss": 1e-4}),
    Variant("Muon", {"optimizer.name": "muon"}),
    Variant(WARM_ORIGINAL, ORIGINAL),
    Variant(
        "the transformer of 2017, without warm-up",
        ORIGINAL | {"optimizer.warmup_steps": 0},
        beside=WARM_ORIGINAL,
    ),
)


def arguments(settings: Settings) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def trained(settings: Settings, options: argparse.Namespace) -> Answer:
    """A run's validation loss over all held-out text, None where it diverged, and its number of
    parameters."""
    begin = time.monotonic()
    settings = settings | {"data.train": options.text, "run.progress": "none"}
    with tempfile.TemporaryDirectory(prefix="jaxformer-ablation-") as folder:
        settings |= {"run.dir": str(Path(folder, "run")), "run.tracker": "none"}
        if options.smoke:
            settings |= SMOKE_FIELDS | {"model.d_ff": 64, "data.cache_dir": options.cache}
        lines = [f"{name}={value}" for name, value in settings.items()]
        try:
            result = jf.train(jf.load_config(CONFIGS / "quickstart.py", lines))
        except jf.Diverged:
            return {"loss": None, "parameters": None, "seconds": time.monotonic() - begin}
    loss: float = result.metrics[-1]["val_loss"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(result.params))
    return {"loss": loss, "parameters": parameters, "seconds": time.monotonic() - begin}


def settings_of(variant: Variant, rate: float, seed: int, steps: int) -> Settings:
    """The settings of a run, without those of where it reads and writes."""
    changes = {"optimizer.learning_rate": rate, "train.steps": steps, "run.seed": seed}
    return BASE | variant.settings | changes


def loss_of(result: Answer, settings: Settings) -> float | None:
    """The loss of the run of these settings, infinite where it diverged; None before it is made."""
    for run in result["runs"]:
        if run["settings"] == settings:
            return float("inf") if run["loss"] is None else run["loss"]
    return None


def tuned_losses(variant: Variant, result: Answer) -> list[float | None]:
    """The losses of the runs of `TUNING_SEED`, by rate."""
    return [
        loss_of(result, settings_of(variant, rate, TUNING_SEED, result["steps"]))
        for rate in result["rates"]
    ]


def best_rate(variant: Variant, result: Answer) -> float | None:
    """The rate with the lowest loss of `TUNING_SEED`; the smallest where all diverged, None before
    all are made."""
    losses = tuned_losses(variant, result)
    done = [(loss, rate) for loss, rate in zip(losses, result["rates"], strict=True)
            if loss is not None]  # fmt: skip
    return min(done)[1] if len(done) == len(losses) else None


def losses_of(variant: Variant, result: Answer) -> list[float]:
    """The losses of the seeds 0, 1, ... at the best rate, until the first that is not made."""
    rate, losses = best_rate(variant, result), list[float]()
    while rate is not None:
        settings = settings_of(variant, rate, len(losses), result["steps"])
        loss = loss_of(result, settings)
        if loss is None:
            break
        losses.append(loss)
    return losses


def missing(variants: list[Variant], seeds: int, result: Answer) -> Iterator[tuple[str, Settings]]:
    """The title and settings of each run that the result lacks: the rates of all rows, then seed
    after seed of all rows."""
    for variant in variants:
        for rate, loss in zip(result["rates"], tuned_losses(variant, result), strict=True):
            if loss is None:
                yield variant.title, settings_of(variant, rate, TUNING_SEED, result["steps"])
    for seed in range(seeds):
        for variant in variants:
            rate = best_rate(variant, result)
            assert rate is not None, "the loop above has made them"
            settings = settings_of(variant, rate, seed, result["steps"])
            if loss_of(result, settings) is None:
                yield variant.title, settings


def begun(options: argparse.Namespace) -> Answer:
    """The result that the runs are added to: that of the file if it is of the same text, steps,
    rates, machine and versions."""
    result: Answer = {
        "text": Path(options.text).name,
        "steps": options.steps,
        "rates": sorted(options.rates),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "cpu": cpu_model(),
        "runs": [],
    }
    if not options.result.exists():
        return result
    saved: Answer = json.loads(options.result.read_text(encoding="utf-8"))
    different = [
        f"{name}: {saved.get(name)}, now {result[name]}"
        for name in ("text", "steps", "rates", "versions", "cpu")
        if saved.get(name) != result[name]
    ]
    if different:
        raise SystemExit(
            f"{options.result} has runs of another kind ({'; '.join(different)}), which are not"
            " compared with new ones. Move it away to begin anew, or state its values."
        )
    return result | {"runs": saved["runs"]}


def measure(options: argparse.Namespace, variants: list[Variant]) -> None:
    """Makes the runs that are missing, and writes the page."""
    result = begun(options)
    for title, settings in missing(variants, options.seeds, result):
        run = {"title": title, "settings": settings, **trained(settings, options)}
        result["runs"].append(run)
        write_result(options.result, result)
        rate, seed = settings["optimizer.learning_rate"], settings["run.seed"]
        loss = "diverged" if run["loss"] is None else f"{run['loss']:.4f}"
        print(f"{title}, rate {rate:g}, seed {seed}: {loss}, {run['seconds']:.0f} s", flush=True)
    write_text(options.page, page(result, variants))
    print(f"written to {options.page}")


def verdict(difference: PairedInterval) -> str:
    if interval_ranks(len(difference["pairs"])).coverage < CONFIDENCE:
        return "too few seeds"
    if not is_apart(difference):
        return "not apart from 0"
    return "better" if difference["high"] < 0 else "worse"


def loss_text(loss: float) -> str:
    return f"{loss:.4f}" if loss < float("inf") else "diverged"


def against(variant: Variant, other: Variant, result: Answer) -> PairedInterval:
    """The difference of two rows over the seeds that both have."""
    values, baseline = losses_of(variant, result), losses_of(other, result)
    seeds = min(len(values), len(baseline))
    return paired_interval(values[:seeds], baseline[:seeds])


def row_of(variant: Variant, base: Variant, result: Answer) -> list[str]:
    """The cells of a row: title, parameters, rate, loss, difference, verdict."""
    losses, rate = losses_of(variant, result), best_rate(variant, result)
    sizes = [run["parameters"] for run in result["runs"] if run["title"] == variant.title]
    size = next((f"{number / 1e3:.1f}k" for number in sizes if number), "")
    edge = " (an end)" if rate in (result["rates"][0], result["rates"][-1]) else ""
    cells = [variant.title, size, f"{rate:g}{edge}", loss_text(statistics.median(losses))]
    if variant is base:
        return [*cells, "", ""]
    difference = against(variant, base, result)
    return [*cells, interval_text(difference), verdict(difference)]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def introduction(result: Answer, seeds: int) -> list[str]:
    steps, rates = result["steps"], ", ".join(f"{rate:g}" for rate in result["rates"])
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    coverage = f"{interval_ranks(seeds).coverage:.0%}"
    return [
        "# Ablations",
        "",
        f"""What choices of a transformer and of its training are worth, each beside a base:
validation loss, nats per character, over all held-out text of {result["text"]} after {steps} steps
of {BATCH} rows of {LENGTH} characters ({steps * BATCH * LENGTH:,} in all).

The learning rate of each row is the best of {rates}, by one run of another seed ({TUNING_SEED});
the same trials for each row. With it the row runs with the seeds 0 to {seeds - 1}. A difference is
that of two runs of one seed, which read the same batches, and is above 0 where the row is worse:
the median over the seeds, and in brackets an interval for the median of all such differences
({coverage}), which assumes no distribution: with five seeds, from the smallest to the largest.
A row whose interval has 0 in it is not told apart from the base; of rows without any effect, one
of 16 lies apart by chance. At an end of the rates that were tried, better ones may lie beyond. The
model and the run are small, and say little of small differences in large ones.

Made by `benchmarks/ablations.py` with {versions} on one core of an {result["cpu"]}; every
run is in `benchmarks/results/ablations.json`.
""",
    ]


def pairs_of_rows(result: Answer, variants: list[Variant]) -> list[str]:
    """Sentences on rows that are compared with another row than the base."""
    titles = {variant.title: variant for variant in variants}
    lines = []
    for variant in variants:
        if variant.beside in titles:
            difference = against(variant, titles[variant.beside], result)
            lines += [
                f"Against {variant.beside}: {variant.title} has {interval_text(difference)},"
                f" {verdict(difference)}.",
                "",
            ]
    return lines


def commands(result: Answer, variants: list[Variant]) -> list[str]:
    """The train.py line of the base, and what each row adds to it."""
    lines = [
        "Each row is one command line, that of the base with what stands here added; seed 0:",
        "",
    ]
    lines += ["<!-- docs-test: skip: each indented line is added to the first -->", "```"]
    for variant in variants:
        rate: Settings = {"optimizer.learning_rate": best_rate(variant, result)}
        if variant is variants[0]:
            base = BASE | {"train.steps": result["steps"], "run.seed": 0}
            base |= {"data.train": result["text"], **rate}
            lines.append(f"python train.py configs/quickstart.py {shlex.join(arguments(base))}")
            default = rate
        else:
            changes = variant.settings | ({} if rate == default else rate)
            lines.append(f"    {' '.join(arguments(changes))}")
    return [*lines, "```", ""]


def page(result: Answer, variants: list[Variant]) -> str:
    """docs/ablations.md, of the rows that have been run with at least one seed."""
    shown = [variant for variant in variants if losses_of(variant, result)]
    seeds = min(len(losses_of(variant, result)) for variant in shown)
    header = ["variant", "parameters", "learning rate", "loss", "against base", ""]
    rows = [row_of(variant, shown[0], result) for variant in shown]
    tuning_header = ["learning rate", *(f"{rate:g}" for rate in result["rates"])]
    tuning = [
        [variant.title, *(loss_text(loss) for loss in tuned_losses(variant, result) if loss)]
        for variant in shown
    ]
    lines = [*introduction(result, seeds), *table(header, rows), ""]
    lines += pairs_of_rows(result, shown)
    lines += [f"Losses of the trials of the learning rate (seed {TUNING_SEED}):", ""]
    lines += [*table(tuning_header, tuning), "", *commands(result, shown)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="the text to learn, as data.train takes it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 6e-3, 1.8e-2])
    results = ROOT / "benchmarks/results/ablations.json"
    parser.add_argument("--result", type=Path, default=results, help="file of the runs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/ablations.md")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory(prefix="jaxformer-ablations-") as folder:
            options.text, options.page = words_file(Path(folder)), Path(folder, "ablations.md")
            options.cache, options.result = str(Path(folder, "data")), Path(folder, "runs.json")
            options.steps, options.rates, options.seeds = 3, [1e-3], 2
            measure(options, [VARIANTS[0], VARIANTS[1]])
            print(options.page.read_text(encoding="utf-8"))
        return
    if not options.text:
        parser.error("--text is needed: a file of text to learn, as tinyshakespeare.txt")
    options.text = str(Path(options.text).resolve())
    measure(options, [*VARIANTS])


if __name__ == "__main__":
    main()
