"""What pre-training is worth to a T5 and to a BERT on a task with few examples, beside the same
model from scratch: to results/pretraining_*.json, and to docs/results/t5.md and bert.md.

    python benchmarks/pretraining.py t5 [--seeds 5]
    python benchmarks/pretraining.py bert [--seeds 5]

Text and tasks are made of Python's standard library. One run pre-trains on its source without a
fifth of the files of its largest packages. The task is learned from the others of these files, and
judged by those that pre-training has not read either. As in benchmarks/seeded.py, each of the two
has its best learning rate of --rates, and the same command makes the runs that are missing.
"""

import argparse
import hashlib
import json
import runpy
import shlex
import tempfile
import textwrap
from ast import AsyncFunctionDef, FunctionDef, parse, walk
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from intervals import interval_ranks, interval_text
from pairing import Answer, add_smoke
from seeded import (
    TUNING_SEED,
    Experiment,
    Settings,
    Variant,
    arguments,
    begun,
    filled,
    loss_text,
    make_missing,
    table,
    trained,
    verdict,
)
from workloads import CONFIGS, SMOKE_FIELDS

import jaxformer as jf
from jaxformer.files import write_text

ROOT = Path(__file__).parent.parent
PACKAGES = runpy.run_path(str(ROOT / "examples/stdlib_packages.py"))
TESTS, NO_CODE = PACKAGES["TESTS"], PACKAGES["NO_CODE"]
SHORTEST_NAME, EXAMPLES = 4, 1000
QUIET: Settings = {
    "train.eval_every": 0,
    "train.log_every": 50,
    "train.checkpoint_every": 250,
    "run.sample_tokens": 0,
}


@dataclass(frozen=True)
class Row:
    """A model: its title, sentences on its pre-training and its task, the config of both, the
    settings beside each of them, their steps, and the rates that are tried."""

    title: str
    sentences: str
    config: str
    task_config: str
    pretraining: Settings
    task: Settings
    pretraining_steps: int
    steps: int
    rates: tuple[float, ...]


ROWS = {
    "t5": Row(
        title="A T5, pre-trained and from scratch",
        sentences="""Pre-training is span corruption of Python source. The task is one from text to
text: the source of a function, cut to 64 tokens, without its name, to that name. A loss is in nats
for each token of the names. The settings are a second choice: with 3,000 steps of pre-training by
AdamW, 200 of the task and rates of 0.001 to 0.004 the difference was -0.0365 (-0.0522 to
-0.0230).""",
        config="t5_tiny.py",
        task_config="t5_tiny.py",
        pretraining={
            "data.source_length": 64,
            "data.sequence_length": 24,
            "train.batch_size": 16,
            "optimizer.name": "muon",
            "optimizer.learning_rate": 4e-3,
        },
        task={
            "data.objective": "seq2seq",
            "data.source_length": 64,
            "data.sequence_length": 16,
            "train.batch_size": 8,
            "optimizer.warmup_steps": 20,
        },
        pretraining_steps=10_000,
        steps=400,
        rates=(5e-4, 1e-3, 2e-3),
    ),
    "bert": Row(
        title="A BERT, pre-trained and from scratch",
        sentences="""Pre-training hides tokens of Python source and asks whether a piece follows
another. The task is to say of which of twelve packages of the standard library a piece of code is,
from its first 64 tokens. A loss is in nats for each piece. The settings are a second choice: with
3,000 steps of pre-training, 200 of the task and rates of 0.0003 to 0.003 the difference was -0.0822
(-0.1882 to -0.0407).""",
        config="bert_tiny.py",
        task_config="bert_tiny.py:scratch",
        pretraining={"data.sequence_length": 64, "train.batch_size": 16},
        task={"data.sequence_length": 64, "train.batch_size": 8, "optimizer.warmup_steps": 20},
        pretraining_steps=6_000,
        steps=400,
        rates=(1e-4, 3e-4, 1e-3),
    ),
}


def library_files() -> list[Path]:
    """The Python files of the standard library without tests, tables and what is installed."""
    library: Path = PACKAGES["LIBRARY"]
    files = []
    for path in sorted(library.rglob("*.py")):
        if not (TESTS | NO_CODE) & {*path.relative_to(library).parts}:
            files.append(path)
    return files


def named_functions(path: Path) -> Iterator[Answer]:
    """A record for each function of a file: its source with "f" for its name, and the name, which
    is nowhere else in it. Names with two underscores are left out: most are one of a few."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in walk(parse(text)):
        if not isinstance(node, FunctionDef | AsyncFunctionDef):
            continue
        name, source = node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno])
        is_told_once = source.count(name) == 1 and len(name) >= SHORTEST_NAME
        if is_told_once and not name.startswith("__"):
            shown = textwrap.dedent(source).replace(f"def {name}(", "def f(", 1)
            if name not in shown:
                yield {"source": shown, "target": name}


def snippets(path: Path, package: str) -> Iterator[Answer]:
    """A record for each piece of a file, whose label is its package."""
    for text in PACKAGES["snippets"](path, package):
        yield {"text": text, "label": package}


RECORDS_OF = {"t5": lambda path, package: named_functions(path), "bert": snippets}


def in_fixed_order(records: list[Answer]) -> list[Answer]:
    """The records in an order that depends on nothing but their text."""

    def key(record: Answer) -> bytes:
        return hashlib.blake2b(json.dumps(record).encode(), digest_size=8).digest()

    return sorted(records, key=key)


def write_data(name: str, folder: Path, most_files: int) -> None:
    """Writes corpus.jsonl, train.jsonl and validation.jsonl of a row into a folder, of at most so
    many files each (0: all)."""
    records: dict[str, list[Answer]] = {"train": [], "validation": []}
    kept_back: set[Path] = set()
    for package, paths in PACKAGES["packages"]().items():
        held_out = PACKAGES["held_out"](paths)
        kept_back |= held_out
        for path in sorted(paths)[: most_files or None]:
            side = "validation" if path in held_out else "train"
            records[side] += RECORDS_OF[name](path, package)
    corpus = [path for path in library_files() if path not in kept_back]
    texts = [path.read_text(encoding="utf-8") for path in corpus[: most_files or None]]
    lines_of = {
        "corpus": [{"text": text} for text in texts],
        "train": in_fixed_order(records["train"])[:EXAMPLES],
        "validation": in_fixed_order(records["validation"]),
    }
    for side, lines in lines_of.items():
        write_text(folder / f"{side}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def pretraining_settings(row: Row, folder: Path) -> Settings:
    settings = QUIET | row.pretraining | {"train.steps": row.pretraining_steps, "run.seed": 0}
    return settings | {"data.train": f"{folder}/corpus.jsonl", "run.dir": f"{folder}/base"}


def pretrained(row: Row, folder: Path, fixed: Settings) -> Answer:
    """Pre-trains, or continues what the folder has of it; its steps and validation loss."""
    settings = pretraining_settings(row, folder) | fixed
    settings |= {"run.progress": "none", "run.tracker": "none"}
    lines = [f"{setting}={value}" for setting, value in settings.items()]
    result = jf.train(jf.load_config(CONFIGS / row.config, lines))
    loss = next(line["val_loss"] for line in reversed(result.metrics) if "val_loss" in line)
    print(f"pre-trained for {row.pretraining_steps} steps: {loss:.4f}", flush=True)
    return {"steps": row.pretraining_steps, "loss": loss}


def task_experiment(row: Row, folder: Path, result: Answer) -> Experiment:
    """The task from scratch, with the same tokenizer, and from the pre-trained model."""
    task = QUIET | row.task | {"data.train": f"{folder}/train.jsonl"}
    task |= {"data.validation": f"{folder}/validation.jsonl"}
    scratch = Variant("from scratch", {"tokenizer.path": f"{folder}/base"})
    return Experiment(
        task, (scratch, Variant("pre-trained", {"run.init_from": f"{folder}/base"})), result
    )


def measure(name: str, row: Row, options: argparse.Namespace, fixed: Settings) -> None:
    """Makes the data, the pre-trained model and the runs that are missing; writes the page."""
    folder: Path = options.runs / name
    folder.mkdir(parents=True, exist_ok=True)
    write_data(name, folder, options.most_files)
    base = pretrained(row, folder, fixed)
    asked = {"row": name, "pretraining": base, "steps": row.steps, "rates": list(row.rates)}
    path = options.results / f"pretraining_{name}.json"
    experiment = task_experiment(row, folder, begun(path, asked))

    def train(settings: Settings) -> Answer:
        return trained(CONFIGS / row.task_config, settings | fixed)

    make_missing(experiment, options.seeds, train, path)
    write_text(options.pages / f"{name}.md", page(name, row, folder, experiment))
    print(f"written to {options.pages / name}.md")


def table_rows(experiment: Experiment) -> list[list[str]]:
    rows, scratch = [], experiment.variants[0]
    for variant in experiment.variants:
        runs = experiment.runs_of(variant)
        accuracies = [run["accuracy"] for run in runs if "accuracy" in run]
        loss = loss_text(median(experiment.losses_of(variant)))
        rate, rates = experiment.best_rate(variant), experiment.result["rates"]
        at_the_edge = " (the edge of its trials)" if rate in (min(rates), max(rates)) else ""
        cells = [variant.title, f"{rate:g}{at_the_edge}", loss]
        cells.append(f"{median(accuracies):.1%}" if accuracies else "")
        difference = experiment.difference(variant, scratch)
        compared = [interval_text(difference), verdict(difference)]
        rows.append(cells + (["", ""] if variant is scratch else compared))
    return rows


def introduction(row: Row, experiment: Experiment) -> str:
    result, seeds = experiment.result, len(experiment.runs_of(experiment.variants[-1]))
    rates = ", ".join(f"{rate:g}" for rate in result["rates"])
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    return f"# {row.title}\n\n" + filled(f"""
{row.sentences}

Text and task are of Python's standard library. A fifth of the files of its largest packages is for
validation, and pre-training has not read them either. It takes {row.pretraining_steps:,} steps and
ends at {result["pretraining"]["loss"]:.3f} nats. There are {EXAMPLES:,} examples of the task, and
both learn it for {row.steps} steps, with the same tokenizer: from random numbers, and from the
pre-trained model. That model is one; seeds are those of the task.

The learning rate of each is the best of {rates}, by one run of another seed ({TUNING_SEED}). With
it each runs with the seeds 0 to {seeds - 1}. The difference is that of two runs of one seed, below
0 where pre-training helps: the median, and in brackets an interval for the median of all such
differences ({interval_ranks(seeds).coverage:.0%}), which assumes no distribution. Pre-training has
a cost of its own, which equal steps of the task leave out.

Made by `benchmarks/pretraining.py` with {versions} on one core of an {result["cpu"]}.
""")


def page(name: str, row: Row, folder: Path, experiment: Experiment) -> str:
    """docs/results/t5.md or bert.md."""
    header = ["", "learning rate", "loss", "accuracy", "against scratch", ""]
    lines = [introduction(row, experiment), *table(header, table_rows(experiment)), ""]
    lines += ["<!-- docs-test: skip: needs the data that the benchmark writes -->", "```"]
    lines.append(f"python benchmarks/pretraining.py {name}")
    words = shlex.join(arguments(pretraining_settings(row, folder)))
    lines.append(f"python train.py configs/{row.config} {words}")
    for variant in experiment.variants:
        rate = experiment.best_rate(variant)
        assert rate is not None, "all runs are made"
        settings = experiment.settings_of(variant, rate, 0)
        words = shlex.join(arguments(settings | {"run.dir": f"{folder}/{variant.title[:4]}"}))
        lines.append(f"python train.py configs/{row.task_config} {words}")
    return "\n".join([*lines, "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", nargs="?", choices=[*ROWS], help="the model")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/pretraining"))
    results = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=results, help="folder of the JSON files")
    add_smoke(parser)
    options = parser.parse_args()
    options.most_files, options.pages = 0, ROOT / "docs/results"
    if options.smoke:
        with tempfile.TemporaryDirectory(prefix="jaxformer-pretraining-") as folder:
            options.runs = options.results = options.pages = Path(folder)
            options.seeds, options.most_files = 1, 3
            fixed = SMOKE_FIELDS | {"model.d_ff": 64, "tokenizer.vocab_size": 400}
            fixed["data.cache_dir"] = str(Path(folder, "data"))
            small = replace(ROWS["bert"], pretraining_steps=1, steps=1, rates=(1e-3,))
            measure("bert", small, options, fixed)
            print(Path(folder, "bert.md").read_text(encoding="utf-8"))
        return
    if not options.row:
        parser.error(f"state the model: {' or '.join(ROWS)}")
    measure(options.row, ROWS[options.row], options, {})


if __name__ == "__main__":
    main()
