"""A run small enough to be made many times: its text, its command line, and what two runs are
compared by."""

import fcntl
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command
from conftest import CACHE

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.report import read_metrics

ROOT = Path(__file__).parent.parent
STEPS, EVERY = 24, 4
# What two equal runs may differ in; `before` is a digest of a line with its seconds.
CLOCK = {"tokens_per_second", "mfu", "seconds", "before"}
SETTINGS = {
    "data.cache_dir": f"{CACHE}/data",
    "data.packing": "documents",
    "data.sequence_length": 32,
    "model.d_model": 32,
    "model.dropout": 0.1,
    "model.max_length": 48,
    "model.n_heads": 2,
    "model.n_layers": 2,
    "optimizer.decay_steps": STEPS,
    "optimizer.name": "muon",
    "optimizer.warmup_steps": 4,
    "run.compilation_cache": f"{CACHE}/xla",
    "run.progress": "lines",
    "run.sample_tokens": 0,
    "tokenizer.vocab_size": 300,
    "train.batch_size": 8,
    "train.checkpoint_every": EVERY,
    "train.eval_batches": 0,
    "train.eval_every": 6,
    "train.keep_checkpoints": 100,
    "train.log_every": 1,
    "train.microbatches": 2,
    "train.steps": STEPS,
}
# Changes for tests of what neither a second layer nor the optimizer has a part in: a command takes
# a quarter less time.
PLAIN = {"model.n_layers": 1, "optimizer.name": "adamw"}


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """A text of short documents that a run reads more than once."""
    rng = random.Random(seed)
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "tree",
        "sees",
        "likes",
        "under",
        "over",
        "and",
        "slowly",
        "river",
        "stone",
        "bright",
    ]
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 60))) + "." for _ in range(documents)]
    path.write_text("\n<|endoftext|>\n".join(texts))
    return path


def line(run_dir: Path, text: Path, changes: dict[str, Any] | None = None) -> list[str]:
    """The arguments of train.py."""
    settings = SETTINGS | {"run.dir": run_dir, "data.train": text} | (changes or {})
    return [
        str(ROOT / "configs/quickstart.py"),
        *(part for name, value in settings.items() for part in (f"--{name}", str(value))),
    ]


def launch(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    """`python train.py ...` in its own process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fork(arguments: list[str], patch: str = "", **environment: str) -> Command:
    """`launch` without the start of Python and its imports."""
    return Command(["train", *arguments], environment=environment, patch=patch)


def finish(process: subprocess.Popen[str] | Command, status: int = 0) -> tuple[str, str]:
    """What a process printed, once it has ended with the status it should have."""
    out, error = process.communicate(timeout=300)
    assert process.returncode == status, f"exit status {process.returncode}\n{out}\n{error}"
    return out, error


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str] | Command) -> None:
    """Waits for something that a process does, and fails where it ends without having done it."""
    deadline = time.monotonic() + 240
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it never came to that:\n{process.communicate()}")
        time.sleep(0.002)


def train_here(arguments: list[str]) -> int:
    return main(["train", *arguments])


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if name not in CLOCK}
        for entry in read_metrics(run_dir)
    ]


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """`logged` without the states, which another mesh rounds otherwise."""
    return [{k: value for k, value in entry.items() if k != "state"} for entry in logged(run_dir)]


def lines_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def saved(run_dir: Path) -> list[int]:
    return sorted(
        int(entry.name) for entry in (run_dir / "checkpoints").glob("*") if entry.name.isdigit()
    )


def params_of(run_dir: Path, step: int | None = None) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(jf.load(run_dir, step).params)]


_final = functools.cache(params_of)  # of a run that is compared with many


def assert_same_run(found: Path, expected: Path) -> None:
    """Every logged number and every final parameter, to the bit."""
    assert logged(found) == logged(expected)
    for a, b in zip(params_of(found), _final(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not {"tensorboard", "loss.png"} & {*path.parts}
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def reference(factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run directory, text) of the run that nothing interrupts, by the real train.py, made once for
    all test processes."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    run_dir, text = base / "reference", base / "reference.txt"
    with (base / "reference.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (base / "reference.done").exists():
            finish(launch(line(run_dir, write_text(text))))
            (base / "reference.done").touch()
    return run_dir, text


def copy(source: Path, target: Path) -> Path:
    """A run under another name, as its command would have made it there."""
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(path.read_text().replace(f'"{source}"', f'"{target}"'))
    return target


def copy_until(step: int, source: Path, target: Path) -> Path:
    """A copy of a run as if it had been killed after the checkpoint of `step`, while it logged the
    step after the next."""
    copy(source, target)
    for later in (s for s in saved(target) if s > step):
        shutil.rmtree(target / "checkpoints" / str(later))
    path = target / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(text for text in lines if json.loads(text)["step"] <= step + 1) + '{"step": '
    )
    return target
