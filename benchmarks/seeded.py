"""Variants of one run, each with its best learning rate and the same seeds, kept in a JSON file.

The rate of a variant is the best of a few by one run of `TUNING_SEED`, the same trials for each
variant; with it the seeds 0, 1, ... are run. Every run is written when it ends, and the same
command makes those that are missing: of more seeds, or after it was stopped.
"""

import json
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
from intervals import CONFIDENCE, PairedInterval, interval_ranks, is_apart, paired_interval  # noqa: E402
from pairing import Answer, cpu_model, write_result  # noqa: E402

import jaxformer as jf  # noqa: E402

Settings = dict[str, object]
TUNING_SEED = 1000  # none of those that are compared


class Variant(NamedTuple):
    """A row: its title, its settings beside those of the base, and the title of a row that it is
    compared with besides the first, if any."""

    title: str
    settings: Settings
    beside: str = ""


@dataclass(frozen=True)
class Experiment:
    """Variants and the runs of them: `result` has "steps", "rates" and "runs", and is what the JSON
    file holds. The first variant is what the others are compared with."""

    base: Settings
    variants: tuple[Variant, ...]
    result: Answer

    def settings_of(self, variant: Variant, rate: float, seed: int) -> Settings:
        """The settings of a run, without those of where it reads and writes."""
        changes = {"optimizer.learning_rate": rate, "train.steps": self.result["steps"]}
        return self.base | variant.settings | changes | {"run.seed": seed}

    def run_of(self, settings: Settings) -> Answer | None:
        """The run of these settings; None before it is made."""
        return next((run for run in self.result["runs"] if run["settings"] == settings), None)

    def tuned_losses(self, variant: Variant) -> list[float | None]:
        """The losses of the runs of `TUNING_SEED`, by rate; None for those that are not made."""
        runs = [
            self.run_of(self.settings_of(variant, rate, TUNING_SEED))
            for rate in self.result["rates"]
        ]
        return [None if run is None else loss_of(run) for run in runs]

    def best_rate(self, variant: Variant) -> float | None:
        """The rate with the lowest loss of `TUNING_SEED`; the smallest where all diverged, None
        before all are made."""
        pairs = zip(self.tuned_losses(variant), self.result["rates"], strict=True)
        made = [(loss, rate) for loss, rate in pairs if loss is not None]
        return min(made)[1] if len(made) == len(self.result["rates"]) else None

    def runs_of(self, variant: Variant) -> list[Answer]:
        """The runs of the seeds 0, 1, ... at the best rate, before the first that is not made."""
        rate, runs = self.best_rate(variant), list[Answer]()
        while rate is not None:
            run = self.run_of(self.settings_of(variant, rate, len(runs)))
            if run is None:
                break
            runs.append(run)
        return runs

    def losses_of(self, variant: Variant) -> list[float]:
        return [loss_of(run) for run in self.runs_of(variant)]

    def missing(self, seeds: int) -> Iterator[tuple[str, Settings]]:
        """The title and settings of each run that the result lacks when it is asked for: the rates
        of all variants, then seed after seed of all variants."""
        for variant in self.variants:
            for rate, loss in zip(self.result["rates"], self.tuned_losses(variant), strict=True):
                if loss is None:
                    yield variant.title, self.settings_of(variant, rate, TUNING_SEED)
        for seed in range(seeds):
            for variant in self.variants:
                rate = self.best_rate(variant)
                assert rate is not None, "the loop above has made them"
                settings = self.settings_of(variant, rate, seed)
                if self.run_of(settings) is None:
                    yield variant.title, settings

    def difference(self, variant: Variant, baseline: Variant) -> PairedInterval:
        """The losses of a variant less those of another one, over the seeds that both have."""
        values, losses = self.losses_of(variant), self.losses_of(baseline)
        seeds = min(len(values), len(losses))
        return paired_interval(values[:seeds], losses[:seeds])


def loss_of(run: Answer) -> float:
    """The validation loss of a run, infinite where it diverged."""
    return float("inf") if run["loss"] is None else float(run["loss"])


def make_missing(
    experiment: Experiment, seeds: int, train: Callable[[Settings], Answer], path: Path
) -> None:
    """Makes the runs that are missing, and writes the result to a file after each."""
    for title, settings in experiment.missing(seeds):
        run = {"title": title, "settings": settings, **train(settings)}
        experiment.result["runs"].append(run)
        write_result(path, experiment.result)
        rate, seed = settings["optimizer.learning_rate"], settings["run.seed"]
        taken = f"{run['seconds']:.0f} s"
        print(f"{title}, rate {rate}, seed {seed}: {loss_text(loss_of(run))}, {taken}", flush=True)


def trained(config: Path, settings: Settings) -> Answer:
    """A run's validation loss over all held-out data, None where it diverged, its accuracy if it
    has one, its number of parameters and its time."""
    begin = time.monotonic()
    quiet: Settings = {"run.progress": "none", "run.tracker": "none", "run.sample_tokens": 0}
    with tempfile.TemporaryDirectory(prefix="jaxformer-seeded-") as folder:
        settings = settings | quiet | {"run.dir": str(Path(folder, "run"))}
        lines = [f"{name}={value}" for name, value in settings.items()]
        try:
            result = jf.train(jf.load_config(config, lines))
        except jf.Diverged:
            return {"loss": None, "parameters": None, "seconds": time.monotonic() - begin}
    last = result.metrics[-1]
    run = {"loss": last["val_loss"]}
    if "val_accuracy" in last:
        run["accuracy"] = last["val_accuracy"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(result.params))
    return run | {"parameters": parameters, "seconds": time.monotonic() - begin}


def begun(path: Path, asked: Answer) -> Answer:
    """What was asked for with the versions and the CPU, and with the runs of a file, which is of
    the same. Raises SystemExit for a file of another kind."""
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    result: Answer = {**asked, "versions": versions, "cpu": cpu_model()}
    if not path.exists():
        return {**result, "runs": []}
    saved: Answer = json.loads(path.read_text(encoding="utf-8"))
    different = [
        f"{name} {saved.get(name)}, now {value}"
        for name, value in result.items()
        if saved.get(name) != value
    ]
    if different:
        raise SystemExit(
            f"{path} has runs of another kind ({'; '.join(different)}), which are not compared with"
            " new ones: move it away to begin anew, or give its values."
        )
    return {**result, "runs": saved["runs"]}


def arguments(settings: Settings) -> list[str]:
    """The settings as they stand on a command line."""
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def verdict(difference: PairedInterval) -> str:
    """Whether a difference of losses lies apart from 0."""
    if interval_ranks(len(difference["pairs"])).coverage < CONFIDENCE:
        return "too few seeds"
    if not is_apart(difference):
        return "not apart from 0"
    return "better" if difference["high"] < 0 else "worse"


def loss_text(loss: float) -> str:
    return f"{loss:.4f}" if loss < float("inf") else "diverged"


def filled(text: str) -> str:
    """Paragraphs of Markdown in lines of at most 100 characters."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
