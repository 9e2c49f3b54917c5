"""What norm, its place, positions and gating are worth: four ablations beside their base, to
docs/ablations.md.

    python benchmarks/ablations.py --text tinyshakespeare.txt

Each variant is one train.py line, run at several learning rates; the best of them stands for it.
"""

import argparse
import json
import platform
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
BATCH, LENGTH = 16, 128
BASE: dict[str, object] = {
    "model.d_model": 128,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "model.d_ff": 384,
    "data.sequence_length": LENGTH,
    "tokenizer.kind": "characters",
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 50,
    "train.batch_size": BATCH,
    "train.eval_every": 0,
    "train.log_every": 50,
    "train.checkpoint_every": 0,
    "run.sample_tokens": 0,
    "run.progress": "lines",
}
VARIANTS: dict[str, dict[str, object]] = {
    "base: RMSNorm before each sublayer, RoPE, SwiGLU of 3 d_model": {},
    "no norm": {"model.norm": "none"},
    "post-norm": {"model.norm_placement": "post"},
    "no positions": {"model.positions": "none"},
    "SiLU of 4 d_model instead of SwiGLU": {"model.activation": "silu", "model.d_ff": 512},
}


def arguments(settings: dict[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def trained(
    changes: dict[str, object], rate: float, run_dir: Path, options: argparse.Namespace
) -> tuple[float, str]:
    """Validation loss over all held-out text (infinite where training diverged), and the
    parameters."""
    settings = BASE | changes | {"optimizer.learning_rate": rate, "train.steps": options.steps}
    settings |= {"data.train": options.text, "run.dir": run_dir}
    if options.smoke:
        settings |= SMOKE_FIELDS | {"model.d_ff": 64, "data.cache_dir": run_dir / "data"}
    command = [sys.executable, "train.py", "configs/quickstart.py", *arguments(settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}")
    if done.returncode == 1:
        return float("inf"), ""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    count = (
        next(line for line in done.stdout.splitlines() if " parameters, " in line)
        .split(" parameters, ")[0]
        .split()[-1]
    )
    return next(line["val_loss"] for line in reversed(lines) if "val_loss" in line), count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="the text to learn, as data.train takes it")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--runs", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs/ablations.md")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory(prefix="jaxformer-ablations-") as folder:
            options.text, options.output = words_file(Path(folder)), Path(folder, "ablations.md")
            options.runs, options.steps, options.rates = Path(folder), 3, [1e-3]
            measure(options, ["no norm"])
            print(options.output.read_text())
        return
    if not options.text:
        parser.error("--text is needed: a file of text to learn, as tinyshakespeare.txt")
    options.text = str(Path(options.text).resolve())
    measure(options, [*VARIANTS])


def measure(options: argparse.Namespace, variants: list[str]) -> None:
    """Trains the variants and writes the page."""
    begin, table = time.time(), []
    for i, name in enumerate(variants):
        changes, found = VARIANTS[name], {}
        for rate in options.rates:
            found[rate] = trained(
                changes, rate, (options.runs / f"{i}-{rate:g}-{int(begin)}").resolve(), options
            )
            print(f"{name}, learning rate {rate:g}: {found[rate][0]:.4f}", flush=True)
        table.append((name, changes, found))
    options.output.write_text(page(table, options))
    print(f"{options.output}, after {time.time() - begin:.0f} s")


def page(table: list[Any], options: argparse.Namespace) -> str:
    tokens = options.steps * BATCH * LENGTH
    best = [min(loss for loss, _ in found.values()) for _, _, found in table]
    rates = " | ".join(f"at {rate:g}" for rate in options.rates)
    lines = [
        "# Ablations",
        "",
        (
            "Validation loss, nats per character, over all held-out text of"
            f" {Path(options.text).name} after {tokens:,} tokens ({options.steps} steps), by"
            " learning rate; the best of a row stands for it. Made by `benchmarks/ablations.py`"
            f" with jax {version('jax')} on {platform.machine()} CPU cores, one seed each."
        ),
        "",
        f"| variant | parameters | {rates} | best against base |",
        "|---|---|" + "---|" * (len(options.rates) + 1),
    ]
    for (name, _, found), loss in zip(table, best, strict=True):
        shown = " | ".join(
            f"{value:.4f}" if value < float("inf") else "diverged" for value, _ in found.values()
        )
        size = next((count for _, count in found.values() if count), "?")
        lines.append(f"| {name} | {size} | {shown} | {loss - best[0]:+.4f} |")
    lines += ["", "Each is one command line, the base's with what is named here added:", ""]
    lines += ["<!-- docs-test: skip: each indented line is added to the first -->", "```"]
    base = BASE | {"train.steps": options.steps, "optimizer.learning_rate": options.rates[-1]}
    base |= {"data.train": Path(options.text).name}
    lines.append(f"python train.py configs/quickstart.py {shlex.join(arguments(base))}")
    lines += [f"    {' '.join(arguments(changes))}" for _, changes, _ in table if changes]
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    main()
