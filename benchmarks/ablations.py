"""What choices of a transformer and of its training are worth: each beside a small Llama, to
results/ablations.json and docs/ablations.md.

    python benchmarks/ablations.py --text tinyshakespeare.txt [--seeds 5] [--steps 300]

A row is one train.py line. Its learning rate is the best of --rates by a run of `TUNING_SEED`, the
same trials for each row; with that rate it runs with the seeds 0, 1, ... A difference is that of
two runs of one seed, which read the same batches. Every run is kept in the JSON file when it ends,
and the same command makes those that are missing there: of more seeds, or after it was stopped.
"""

import argparse
import shlex
import statistics
import tempfile
from pathlib import Path

from intervals import interval_ranks, interval_text
from pairing import Answer, add_smoke
from scanned import Scanned, difference_from_a_run
from seeded import (
    TUNING_SEED,
    Experiment,
    Settings,
    Variant,
    arguments,
    begun,
    filled,
    loss_of,
    loss_text,
    make_missing,
    table,
    verdict,
)
from workloads import CONFIGS, SMOKE_FIELDS, words_file

from jaxformer.files import write_text

ROOT = Path(__file__).parent.parent
CONFIG = CONFIGS / "quickstart.py"
BATCH, LENGTH = 8, 64
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
    "model.embedding.scale": "sqrt",
    "model.tied_head": True,
    "model.init": "xavier",
    "optimizer.b2": 0.98,
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
}


BASE_TITLE = "base: RMSNorm before each sublayer, RoPE, SwiGLU of 3 d_model, 4 heads, AdamW"
WARM_ORIGINAL = "the transformer of 2017, with warm-up"
VARIANTS = (
    Variant(BASE_TITLE, {}),
    Variant("no norm", {"model.norm": "none"}),
    Variant("post-norm", {"model.norm_placement": "post"}),
    Variant("sandwich norm", {"model.norm_placement": "sandwich"}),
    Variant("QK-norm", {"model.attention.query_key_norm": "head"}),
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


def fixed_settings(options: argparse.Namespace) -> Settings:
    """The settings of all runs that do not stand in the result."""
    fixed: Settings = {"data.train": options.text}
    if options.smoke:
        fixed |= SMOKE_FIELDS | {"model.d_ff": 64, "data.cache_dir": options.cache}
    return fixed


def measure(options: argparse.Namespace, variants: tuple[Variant, ...]) -> None:
    """Makes the runs that are missing, and writes the page."""
    asked = {"text": Path(options.text).name, "steps": options.steps}
    result = begun(options.result, asked | {"rates": sorted(options.rates)})
    experiment = Experiment(BASE, variants, result)
    train, fixed = Scanned(CONFIG), fixed_settings(options)
    make_missing(
        experiment, options.seeds, lambda settings: train(settings | fixed), options.result
    )
    write_text(options.page, page(experiment))
    print(f"written to {options.page}")


def row_of(experiment: Experiment, variant: Variant) -> list[str]:
    """The cells of a row: title, parameters, rate, loss, difference from the base, verdict."""
    runs, rate = experiment.runs_of(variant), experiment.best_rate(variant)
    size = next((f"{run['parameters'] / 1e3:.1f}k" for run in runs if run["parameters"]), "")
    rates = experiment.result["rates"]
    edge = " (an end)" if rate in (rates[0], rates[-1]) else ""
    loss = statistics.median([loss_of(run) for run in runs])
    cells = [variant.title, size, f"{rate:g}{edge}", loss_text(loss)]
    base = experiment.variants[0]
    if variant is base:
        return [*cells, "", ""]
    difference = experiment.difference(variant, base)
    return [*cells, interval_text(difference), verdict(difference)]


def introduction(result: Answer, seeds: int) -> str:
    steps, rates = result["steps"], ", ".join(f"{rate:g}" for rate in result["rates"])
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return "# Ablations\n\n" + filled(f"""
What choices of a transformer and of its training are worth, each beside a base: validation loss,
nats per character, over all held-out text of {result["text"]} after {steps} steps of {BATCH} rows
of {LENGTH} characters ({steps * BATCH * LENGTH:,} in all).

The learning rate of each row is the best of {rates}, by one run of another seed ({TUNING_SEED});
the same trials for each row. With it the row runs with the seeds 0 to {seeds - 1}. A difference is
that of two runs of one seed, which read the same batches, and is above 0 where the row is worse:
the median over the seeds, and in brackets an interval for the median of all such differences
({interval_ranks(seeds).coverage:.0%}), which assumes no distribution: with five seeds, from the
smallest to the largest. A row whose interval has 0 in it is not told apart from the base; of rows
without any effect, one of 16 lies apart by chance. At an end of the rates that were tried, better
ones may lie beyond. The model and the run are small, and say little of small differences in large
ones.

Made by `benchmarks/ablations.py` with {versions} on one core of an {result["cpu"]}; every run is
in `benchmarks/results/ablations.json`. A run is one program there. In the program of a `train.py`
line sums are rounded otherwise, which at high learning rates moves its loss by up to 0.01.
""")


def pairs_of_rows(experiment: Experiment) -> list[str]:
    """Sentences on rows that are compared with another row than the base."""
    titles = {variant.title: variant for variant in experiment.variants}
    lines = []
    for variant in experiment.variants:
        if variant.beside in titles:
            difference = experiment.difference(variant, titles[variant.beside])
            numbers = interval_text(difference)
            lines.append(
                f"{variant.title.capitalize()}, against {variant.beside}: {numbers},"
                f" {verdict(difference)}.\n"
            )
    return lines


def commands(experiment: Experiment) -> list[str]:
    """The train.py line of the base, and what each row adds to it."""
    base, *variants = experiment.variants
    default = experiment.best_rate(base)
    line: Settings = {**BASE, "train.steps": experiment.result["steps"], "run.seed": 0}
    line |= {"data.train": experiment.result["text"], "optimizer.learning_rate": default}
    lines = ["Each row is one command line, the base's with what stands here added (seed 0):", ""]
    lines += ["<!-- docs-test: skip: each indented line is added to the first -->", "```"]
    lines.append(f"python train.py configs/quickstart.py {shlex.join(arguments(line))}")
    for variant in variants:
        rate = experiment.best_rate(variant)
        own_rate: Settings = {} if rate == default else {"optimizer.learning_rate": rate}
        lines.append(f"    {' '.join(arguments(variant.settings | own_rate))}")
    return [*lines, "```", ""]


def page(experiment: Experiment) -> str:
    """docs/ablations.md, of the rows that have been run with at least one seed."""
    shown = tuple(variant for variant in experiment.variants if experiment.runs_of(variant))
    experiment = Experiment(experiment.base, shown, experiment.result)
    seeds = min(len(experiment.runs_of(variant)) for variant in shown)
    header = ["variant", "parameters", "learning rate", "loss", "against base", ""]
    trials = [
        [variant.title, *(loss_text(loss) for loss in experiment.tuned_losses(variant) if loss)]
        for variant in shown
    ]
    rates = [f"{rate:g}" for rate in experiment.result["rates"]]
    lines = [
        introduction(experiment.result, seeds),
        *table(header, [row_of(experiment, variant) for variant in shown]),
        "",
    ]
    lines += pairs_of_rows(experiment)
    lines += [f"Losses of the trials of the learning rate (seed {TUNING_SEED}):", ""]
    lines += [*table(["learning rate", *rates], trials), "", *commands(experiment)]
    return "\n".join(lines)


def smoke(options: argparse.Namespace, folder: Path) -> None:
    """Two rows in small, and one run beside that of `jf.train`."""
    options.text, options.page = words_file(folder), folder / "ablations.md"
    options.cache, options.result = str(folder / "data"), folder / "runs.json"
    options.steps, options.rates, options.seeds = 3, [1e-3], 2
    measure(options, VARIANTS[:2])
    print(options.page.read_text(encoding="utf-8"))
    settings = BASE | {"train.steps": 3, "optimizer.learning_rate": 1e-3, "run.seed": 0}
    difference = difference_from_a_run(CONFIG, settings | fixed_settings(options))
    print(f"The loss differs from that of train.py by {difference:.1e}.")
    if not difference < 1e-4:
        raise SystemExit("The program of the ablations is not that of train.py.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="the text to learn, as data.train takes it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2])
    results = ROOT / "benchmarks/results/ablations.json"
    parser.add_argument("--result", type=Path, default=results, help="file of the runs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/ablations.md")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory(prefix="jaxformer-ablations-") as folder:
            smoke(options, Path(folder))
        return
    if not options.text:
        parser.error("--text is needed: a file of text to learn, as tinyshakespeare.txt")
    options.text = str(Path(options.text).resolve())
    measure(options, VARIANTS)


if __name__ == "__main__":
    main()
