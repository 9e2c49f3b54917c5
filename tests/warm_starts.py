"""Small runs that begin from another run or a model, and their parameters by path."""

from pathlib import Path

import jax
import numpy as np
from tiny_run import SETTINGS

import jaxformer as jf
from jaxformer.runs.config import load_config

SMALL = SETTINGS | {
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 0,
    "run.progress": "none",
    "run.sample_tokens": 0,
    "train.checkpoint_every": 0,
    "train.eval_every": 0,
    "train.steps": 2,
}


def settings(base: Path, name: str, **changes) -> list[str]:
    chosen = (
        SMALL
        | {"run.dir": base / name}
        | {key.replace("__", "."): value for key, value in changes.items()}
    )
    return [f"{key}={value}" for key, value in chosen.items()]


def run(base: Path, name: str, **changes) -> Path:
    jf.train(
        load_config(
            Path(__file__).parents[1] / "configs/quickstart.py", settings(base, name, **changes)
        )
    )
    return base / name


def leaves(run_dir: Path) -> dict[str, np.ndarray]:
    params = jf.load(run_dir).params
    named = jax.tree.leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in named
    }
