"""The start of `jaxformer sample`, beside a script with transformers that writes the same number of
tokens from the same files.

Each sample is a fresh process, from its start to its end: ours without compiled programs (cold) and
with them (warm), and theirs, in turn. Where other processes run too, the processor time tells more
than the wall time.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pairing import HERE, Answer
from torch_start_baseline import NEW_TOKENS

from jaxformer.config import ModelConfig

PROMPT = "Once upon a time"
COLD, WARM, THEIRS = "jaxformer sample, cold", "jaxformer sample, warm", "a script, transformers"


def measure_starts(torch_python: str, config: ModelConfig, samples: int) -> Answer:
    """Wall and processor seconds of each kind of start, with a model of the shape of `config`."""
    taken: Answer = {name: [] for name in (COLD, WARM, THEIRS)}
    with tempfile.TemporaryDirectory() as folder:
        model, home = Path(folder, "model"), Path(folder, "home")
        script = (torch_python, str(HERE / "torch_start_baseline.py"))
        subprocess.run([*script, "make", str(model), *_shape(config)], check=True)
        ours = [sys.executable, "-m", "jaxformer", "sample", str(model), "--temperature", "0"]
        ours += ["--prompt", PROMPT, "--max_new_tokens", str(NEW_TOKENS)]
        theirs = [*script, "write", str(model), "--prompt", PROMPT]
        for _ in range(samples):
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()  # compiled programs are kept in a folder of the home directory
            taken[COLD].append(_seconds(ours, home))
            taken[WARM].append(_seconds(ours, home))
            taken[THEIRS].append(_seconds(theirs, home))
    return taken


def start_rows(taken: Answer) -> list[list[str]]:
    """The rows of a table: medians of wall and processor time."""
    rows = []
    for name, samples in taken.items():
        wall, processor = (statistics.median(column) for column in zip(*samples, strict=True))
        rows.append([name, f"{wall:.1f} s", f"{processor:.1f} s", str(len(samples))])
    return rows


def _shape(config: ModelConfig) -> list[str]:
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_length,
    }
    return [text for name, size in sizes.items() for text in (f"--{name}", str(size))]


def _seconds(command: Sequence[str], home: Path) -> tuple[float, float]:
    """Wall and processor time of a process."""
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(HERE.parent)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    before, begin = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = os.times()
    used = after.children_user - before.children_user
    return time.perf_counter() - begin, used + after.children_system - before.children_system
