"""What dpo, ipo, orpo and simpo make of pairs from a text, to the table of docs/finetuning.md.

    python benchmarks/preferences.py --text tinyshakespeare.txt

A small decoder of characters learns the first part of the text. A pair is a prompt from the rest of
it, the true continuation (chosen), and the same words in another order (rejected). Each objective
is one train.py line from that decoder; the table has the figures of held-out pairs before and
after, and the diagram the reward margin on the way.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pairing import add_smoke
from workloads import SMOKE_FIELDS, words_file

ROOT = Path(__file__).parent.parent
LEARNED, TRAINED = 0.8, 0.95  # the parts of the text that end here: to pre-train on, and for pairs
PROMPT, COMPLETION = 60, 40  # characters, up to the next space
DECODER: dict[str, object] = {
    "model.d_model": 128,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "data.sequence_length": 128,
    "tokenizer.kind": "characters",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 20,
    "train.batch_size": 16,
    "train.steps": 600,
    "train.eval_every": 0,
    "train.checkpoint_every": 0,
    "run.sample_tokens": 0,
}
PAIRS: dict[str, object] = {
    "optimizer.learning_rate": 1e-4,
    "optimizer.warmup_steps": 5,
    "data.sequence_length": 128,
    "train.batch_size": 16,
    "train.steps": 80,
    "train.eval_every": 20,
    "train.checkpoint_every": 0,
    "run.sample_tokens": 0,
}
RUNS: dict[str, dict[str, object]] = {
    "dpo": {},
    "ipo": {},
    "orpo": {},
    "simpo": {},
    "dpo, LoRA of rank 8": {"adapter.kind": "lora", "optimizer.learning_rate": 1e-3},
}
COLUMNS = {
    "loss": "val_loss",
    "reward margin": "val_reward_margin",
    "reward accuracy": "val_reward_accuracy",
    "log p(chosen)": "val_log_prob_chosen",
    "log p(rejected)": "val_log_prob_rejected",
    "KL": "val_kl",
}


def pairs_of(text: str, seed: int = 0) -> list[dict[str, str]]:
    """The pairs of a text, one after the other; those whose words are all the same have none."""
    rng, place = random.Random(seed), 0
    found: list[dict[str, str]] = []
    while True:
        ends = [text.find(" ", place + size) for size in (PROMPT, PROMPT + COMPLETION)]
        if -1 in ends:
            return found
        words = text[ends[0] : ends[1]].split(" ")[1:]  # each after one space
        other = rng.sample(words, len(words))
        if other != words:
            sides = {"chosen": words, "rejected": other}
            pair = {side: "".join(f" {word}" for word in told) for side, told in sides.items()}
            found.append({"prompt": text[place : ends[0]]} | pair)
        place = ends[1] + 1


def write_parts(text: str, folder: Path) -> None:
    """learn.txt, train.jsonl and held.jsonl, from disjoint parts of the text."""
    first, second = (int(part * len(text)) for part in (LEARNED, TRAINED))
    (folder / "learn.txt").write_text(text[:first], encoding="utf-8")
    for name, part in (("train", text[first:second]), ("held", text[second:])):
        lines = [json.dumps(pair) + "\n" for pair in pairs_of(part)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def line(config: str, settings: dict[str, object]) -> list[str]:
    fields = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["python", "train.py", f"configs/{config}.py", *fields]


def trained(command: list[str], folder: Path) -> list[dict[str, Any]]:
    """Runs a line with its paths in `folder`; its evaluations."""
    given = [part.replace("runs/", f"{folder}/") for part in command[1:]]
    done = subprocess.run([sys.executable, *given], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}")
    run_dir = Path(given[given.index("--run.dir") + 1])
    lines = (json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "val_loss" in row]


def measure(folder: Path, runs: list[str], smoke: bool) -> str:
    """The decoder, and each run from it: the table and its command lines."""
    small = SMOKE_FIELDS if smoke else {}
    steps = {"train.steps": 2, "optimizer.warmup_steps": 1} if smoke else {}
    base = DECODER | small | steps | {"data.train": "runs/learn.txt", "run.dir": "runs/base"}
    commands = [line("quickstart", base)]
    trained(commands[0], folder)
    common = PAIRS | steps | {"run.init_from": "runs/base"}
    common |= {"data.train": "runs/train.jsonl", "data.validation": "runs/held.jsonl"}
    rows, diagrams = [], []
    for number, name in enumerate(runs):
        settings = common | {"data.objective": name.split(",")[0]} | RUNS[name]
        unchanged = {"optimizer.learning_rate": 0.0, "optimizer.warmup_steps": 0, "train.steps": 1}
        before = line("finetune", settings | unchanged | {"run.dir": f"runs/{number}before"})
        commands.append(line("finetune", settings | {"run.dir": f"runs/{number}"}))
        curve = [trained(before, folder)[-1] | {"step": 0}, *trained(commands[-1], folder)]
        for label, found in (("before", curve[0]), ("after", curve[-1])):
            shown = [f"{found[key]:.4g}" if key in found else "" for key in COLUMNS.values()]
            rows.append(f"| {label}: {name} | {' | '.join(shown)} |".replace("|  ", "| "))
            print(rows[-1], flush=True)
        diagrams.append(diagram(name, curve))
    counts = [sum(1 for _ in (folder / f"{part}.jsonl").open()) for part in ("train", "held")]
    told = (
        f"{counts[0]:,} pairs to train on, {counts[1]:,} held out; jax {version('jax')}, one seed."
    )
    head = f"| objective | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}"
    lines = "\n".join(map(shlex.join, commands))
    return "\n".join([told, "", head, *rows, "", *diagrams, "```", lines, "```", ""])


def diagram(name: str, curve: list[dict[str, Any]]) -> str:
    """The reward margin of the evaluations, as a diagram of Mermaid."""
    margins = [row["val_reward_margin"] for row in curve]
    low, high = min(0.0, *margins), max(0.1, *margins)
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta",
            f'    title "{name}: reward margin on held-out pairs"',
            f'    x-axis "step" [{", ".join(str(row["step"]) for row in curve)}]',
            f'    y-axis "margin" {low:.1f} --> {high + 0.05:.1f}',
            f"    line [{', '.join(f'{margin:.3f}' for margin in margins)}]",
            "```",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="a file of text, such as tinyshakespeare.txt")
    parser.add_argument("--output", type=Path, help="a file for the table, which is also printed")
    add_smoke(parser)
    options = parser.parse_args()
    if not options.text and not options.smoke:
        parser.error("--text is needed: a file of text, such as tinyshakespeare.txt")
    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="jaxformer-preferences-") as place:
        folder = Path(place)
        text = Path(options.text or words_file(folder)).read_text(encoding="utf-8")
        write_parts(text, folder)
        table = measure(folder, ["dpo"] if options.smoke else [*RUNS], options.smoke)
    print(table)
    print(f"{time.time() - begin:.0f} s")
    if options.output:
        options.output.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
