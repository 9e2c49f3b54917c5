"""Whether two checkouts of this project compute the same numbers with the same packages.

    python benchmarks/same_numbers.py --before ../base [--shakespeare FILE] [--multi30k DIRECTORY]

Each config is trained for some steps by each checkout's own train.py, in a process, a folder and a
data cache of its own. Compared are the losses, the gradient norms, the numbers of the evaluations,
all else in metrics.jsonl but clocks, and the final params. The exit status is 1 where anything
differs by more than one part in a million.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from pairing import HERE, Answer, add_smoke, print_table, save
from workloads import SMOKE_FIELDS, make_words, words_file

Numbers = dict[tuple[int, str], float]  # of metrics.jsonl, by step and name
Params = dict[str, np.ndarray]  # by dotted path
Fields = dict[str, object]

ROOT = HERE.parent
TOLERANCE = 1e-6  # the largest relative difference that a program compiled otherwise may bring
GROUPS = ("losses", "gradient norms", "evaluation", "others")  # of the numbers of metrics.jsonl
CLOCKS = {"tokens_per_second", "mfu", "seconds"}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
EVERY: Fields = {
    "train.log_every": 1,
    "train.eval_batches": 2,
    "train.checkpoint_every": 0,
    "optimizer.warmup_steps": 5,  # so that the params have moved far when they are compared
    "data.validation_fraction": 0.01,  # the last evaluation reads all of it
    "run.sample_tokens": 0,
    "run.progress": "none",
}
READ_PARAMS = """
import sys, jax, numpy, jaxformer as jf
leaves = jax.tree.leaves_with_path(jf.load(sys.argv[1]).params)
names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
numpy.savez(sys.argv[2], **{name: numpy.asarray(leaf) for name, (_, leaf) in zip(names, leaves)})
"""


def stdlib(options: argparse.Namespace, folder: Path) -> str:
    return words_file(folder) if options.smoke else "stdlib"


def shakespeare(options: argparse.Namespace, folder: Path) -> str:
    if options.shakespeare:
        return str(options.shakespeare.resolve())
    return words_file(folder)


def multi30k(options: argparse.Namespace, folder: Path) -> str:
    """Pairs of lines: those of the folder named, or random words beside themselves reversed."""
    if options.multi30k:
        return str(options.multi30k.resolve() / "train.{de,en}.gz")
    lines = [make_words(seed, 12) for seed in range(2000)]
    (folder / "pairs.de").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "pairs.en").write_text("".join(f"{line[::-1]}\n" for line in lines), encoding="utf-8")
    return str(folder / "pairs.{de,en}")


def preferences(options: argparse.Namespace, folder: Path) -> str:
    """Prompts of random words, each with itself (chosen) and reversed (rejected)."""
    lines = [make_words(seed, 12) for seed in range(500)]
    records = [{"prompt": f"{line} ", "chosen": line, "rejected": line[::-1]} for line in lines]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


class Case(NamedTuple):
    """A run to compare: its config, its data.train, and settings besides. With a `base` it starts
    from a run of that case, which the same checkout has made."""

    config: str
    text: Callable[[argparse.Namespace, Path], str]
    fields: Mapping[str, object] = MappingProxyType({})
    base: str = ""


CASES = {
    "quickstart": Case("quickstart", stdlib),
    "shakespeare_char": Case("shakespeare_char", shakespeare),
    "transformer_multi30k": Case("transformer_multi30k", multi30k),
    "bert_tiny": Case("bert_tiny", stdlib),
    "t5_tiny": Case("t5_tiny", stdlib),
    "lora": Case("finetune", shakespeare, {"adapter.kind": "lora"}, base="quickstart"),
    "dpo": Case("finetune", preferences, {"data.objective": "dpo"}, base="quickstart"),
}


def run_in(checkout: Path, *command: str | Path) -> None:
    """Runs Python in a checkout, whose package it imports; ends with its output where it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = f"{shlex.join(line)}\n{done.stdout}\n{done.stderr}"
        sys.exit(f"In {checkout}, status {done.returncode}:\n{said}")


def train(checkout: Path, config: str, folder: Path, fields: Fields) -> tuple[Numbers, Params]:
    """A checkout trains a config in `folder`: the numbers of its metrics, and the final params."""
    folder.mkdir(parents=True)
    layout = {
        "run.dir": folder / "run",
        "run.compilation_cache": folder / "programs",
        "data.cache_dir": folder / "data",
    }
    flags = [f"--{key}={value}" for key, value in (fields | layout).items()]
    run_in(checkout, "train.py", f"configs/{config}.py", *flags)
    run_in(checkout, "-c", READ_PARAMS, folder / "run", folder / "params.npz")
    metrics = (folder / "run" / "metrics.jsonl").read_text(encoding="ascii")
    lines = [json.loads(line) for line in metrics.splitlines()]
    with np.load(folder / "params.npz") as file:
        params = dict(file)
    numbers = {
        (line["step"], key): math.nan if value is None else float(value)
        for line in lines
        for key, value in line.items()
        if key not in {*CLOCKS, "step", "non_finite", "state", "before"}
    }
    return numbers, params


def relative(before: np.ndarray | float, after: np.ndarray | float) -> float:
    """The largest difference over the largest number; 0 where all are equal, NaN to NaN too."""
    a, b = np.asarray(before), np.asarray(after)
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    largest = float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), np.max(np.abs(b))))
    return math.inf if math.isnan(largest) else largest


def differences(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> float:
    """The largest relative difference of two tables; infinite where their keys differ, or none."""
    if before.keys() != after.keys() or not before:
        return math.inf
    return max(relative(before[key], after[key]) for key in before)


def group(key: str) -> str:
    """The one of GROUPS that a name of metrics.jsonl belongs to."""
    if key.startswith("val_"):
        return "evaluation"
    return {"loss": "losses", "grad_norm": "gradient norms"}.get(key, "others")


def named(numbers: Numbers, names: set[str]) -> Numbers:
    return {(step, name): value for (step, name), value in numbers.items() if name in names}


def compare(name: str, options: argparse.Namespace) -> Answer:
    """The largest relative difference of each group of a config's numbers."""
    steps = options.steps
    fields: Fields = EVERY | {"train.steps": steps, "train.eval_every": max(steps // 2, 1)}
    if options.smoke:
        fields |= SMOKE_FIELDS
    case = CASES[name]
    results = []
    with tempfile.TemporaryDirectory(prefix="jaxformer-numbers-") as folder:
        text = case.text(options, Path(folder))
        for side in ("before", "after"):
            scratch, checkout = Path(folder) / side, getattr(options, side).resolve()
            start: Fields = {}
            if case.base:
                base = CASES[case.base]
                base_text = base.text(options, Path(folder))
                train(checkout, base.config, scratch / "base", fields | {"data.train": base_text})
                start = {"run.init_from": scratch / "base" / "run"}
            asked = fields | dict(case.fields) | start | {"data.train": text}
            results.append(train(checkout, case.config, scratch / "own", asked))
    (old, old_params), (new, new_params) = results
    old_names, new_names = ({key for _, key in numbers} for numbers in (old, new))
    largest = {}
    for title in GROUPS:
        names = {key for key in old_names & new_names if group(key) == title}
        largest[title] = differences(named(old, names), named(new, names))
    largest["params"] = differences(old_params, new_params)
    return {
        "config": name,
        "steps": steps,
        "final_loss": [numbers.get((steps, "loss")) for numbers in (old, new)],
        "largest_relative_difference": largest,
        "only_on_one_side": sorted(old_names ^ new_names),
    }


def cells(answer: Answer) -> list[str]:
    found = []
    for title in (*GROUPS, "params"):
        difference = answer["largest_relative_difference"][title]
        size = "equal" if difference == 0 else f"{difference:.1e}"
        found.append(size + " DIFFERS" * (difference > TOLERANCE))
    return found


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--before", type=Path, help="a checkout of the project")
    parser.add_argument("--after", type=Path, default=ROOT, help="another; default: this one")
    parser.add_argument("--configs", nargs="+", choices=CASES, help="default: all")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--shakespeare", type=Path, help="text of shakespeare_char; else words")
    parser.add_argument("--multi30k", type=Path, help="folder of train.{de,en}.gz; else words")
    add_smoke(parser)
    options = parser.parse_args()
    if options.before is None and not options.smoke:
        parser.error("--before is needed: the root of the checkout to compare with")
    options.before = options.before or ROOT
    if options.smoke:
        options.configs, options.steps = options.configs or ["quickstart"], min(options.steps, 4)
    options.configs = options.configs or [*CASES]
    for checkout in (options.before, options.after):
        if not (checkout / "train.py").is_file():
            parser.error(f"{checkout} has no train.py: give the root of a checkout of this project")
    return options


def main() -> None:
    options = parse()
    answers = []
    for name in options.configs:
        answers.append(compare(name, options))
        print(f"{name}: compared; the last loss was {answers[-1]['final_loss'][1]}", flush=True)
    rows = [[answer["config"], str(answer["steps"]), *cells(answer)] for answer in answers]
    print_table(["config", "steps", *GROUPS, "params"], rows)
    for answer in answers:
        if answer["only_on_one_side"]:
            names = ", ".join(answer["only_on_one_side"])
            print(f"{answer['config']}: only one side logs {names}, which is not compared.")
    versions = {name: version(name) for name in PACKAGES}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    save("same_numbers", {"versions": versions, "cases": answers}, options.smoke)
    if any(max(answer["largest_relative_difference"].values()) > TOLERANCE for answer in answers):
        sys.exit(1)


if __name__ == "__main__":
    main()
