"""A soup of checkpoints: the mean of the weights of several, of one run or of several runs of the
same model (arXiv:2203.05482), written as a run of its own."""

import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.checkpoints.reading import Damaged, saved_shapes, saved_steps
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig
from jaxformer.config.saved import to_json
from jaxformer.files import ConfigError, first_of, located, read_file, write_text
from jaxformer.runs.config import OF_THE_PROGRAM
from jaxformer.runs.directory import ROLLBACKS, identity_of
from jaxformer.runs.loading import is_run
from jaxformer.runs.run_reading import Read, SavedWeights, reader_of, record_of
from jaxformer.runs.saved_averages import saved_average
from jaxformer.tokenizer import Tokenizer

AVERAGE = "average.json"  # in the run directory: the checkpoints whose mean it is
COPIED = (ROLLBACKS, "reference.json")  # files that a run needs to continue
# Of data.json: what has to be the same in all runs.
SAME_RECORDS = ("tokenizer", "labels", "base", "learned")


class SavedStep(NamedTuple):
    """A checkpoint: its run directory and its step."""

    run_dir: Path
    step: int


def average_checkpoints(
    paths: Sequence[str | Path],
    target: str | Path,
    *,
    last: int = 0,
    steps: Sequence[int] = (),
    weights: Literal["trained", "average"] = "trained",
) -> list[SavedStep]:
    """Writes the mean of the weights of checkpoints as the run directory `target`, which must not
    be a run yet, and returns them.

    Args:
      paths: run directories of the same model.
      last: so many newest checkpoints of each; 0 takes all of one run, and the newest one of each
          of several.
      steps: the checkpoints of these steps of each instead.
      weights: "trained", or "average" for the mean of the averages that the runs keep.

    The mean is computed in float32, leaf by leaf: memory holds one state and two leaves, whatever
    the number of checkpoints. All else is that of the newest chosen checkpoint of the first run:
    its step and the state of its optimizer, in which an average of weights becomes the mean too. So
    the directory is loaded, evaluated, converted, started from and continued like any run.

    Raises ConfigError for fewer than 2 checkpoints, runs of different models, a step that was not
    saved, and a checkpoint that is damaged.
    """
    run_dirs = [located(path) for path in paths]
    newest = last or (1 if len(run_dirs) > 1 else 0)
    chosen = [
        SavedStep(run_dir, step)
        for run_dir in run_dirs
        for step in _chosen_steps(run_dir, newest, steps)
    ]
    if len(chosen) < 2:
        raise ConfigError(
            f"{', '.join(map(str, run_dirs))}: 1 checkpoint is chosen, and an average needs 2 or"
            " more. Name more runs, or let the run keep more checkpoints"
            " (train.keep_checkpoints, train.keep_every)."
        )
    configs = [read_config(run_dir / "config.json") for run_dir in run_dirs]
    _require_same_model(run_dirs, configs)
    base = max(saved for saved in chosen if saved.run_dir == run_dirs[0])
    try:
        state = _mean_state(chosen, base, weights)
    except Damaged as error:
        raise ConfigError(
            f"{error}: nothing was written. Leave this checkpoint out, by --steps."
        ) from error
    _write(located(target), state, base, configs[0])
    sources = [{"run": str(run_dir.absolute()), "step": step} for run_dir, step in chosen]
    content = {"checkpoints": sources, "weights": weights}
    write_text(located(target) / AVERAGE, json.dumps(content, indent=2) + "\n", follow=False)
    return chosen


def _chosen_steps(run_dir: Path, last: int, steps: Sequence[int]) -> list[int]:
    """The steps of the checkpoints to average of one run, ascending; `last` 0 takes all."""
    if not is_run(run_dir):
        raise ConfigError(
            f"{run_dir} is no run directory: jaxformer convert makes one of a Hugging Face model."
        )
    saved = saved_steps(run_dir)
    missing = [step for step in steps if step not in saved]
    if missing or not saved or len(saved) < last:
        wanted = f"steps {', '.join(map(str, missing))}" if missing else f"{last or 1} checkpoints"
        raise ConfigError(
            f"{run_dir} has not {wanted}: it holds the checkpoints of steps {saved}."
            " train.keep_checkpoints and train.keep_every let a run keep more."
        )
    return sorted({*steps}) or saved[-last:]


def _require_same_model(run_dirs: Sequence[Path], configs: Sequence[RunConfig]) -> None:
    """Raises ConfigError where runs differ in their model, adapter, tokenizer, labels or base."""

    def settings_of(run_dir: Path, run: RunConfig) -> dict[str, Any]:
        model, adapter = dataclasses.asdict(run.model), dataclasses.asdict(run.adapter)
        values = {f"model.{name}": model[name] for name in model if name not in OF_THE_PROGRAM}
        values |= {f"adapter.{name}": value for name, value in adapter.items()}
        record = record_of(run_dir)
        return values | {f"{name} in data.json": record.get(name) for name in SAME_RECORDS}

    first = settings_of(run_dirs[0], configs[0])
    for run_dir, run in zip(run_dirs[1:], configs[1:], strict=True):
        differing = [
            f"{name}: {first[name]!r} and {value!r}"
            for name, value in settings_of(run_dir, run).items()
            if value != first[name]
        ]
        if differing:
            raise ConfigError(
                f"{run_dirs[0]} and {run_dir} are different models, whose weights have no mean:"
                f"\n  {first_of(differing)}"
            )


def _mean_state(
    chosen: Sequence[SavedStep], base: SavedStep, weights: Literal["trained", "average"]
) -> dict[str, np.ndarray]:
    """The state of the checkpoint `base` on the host, by the paths of its leaves, with the means of
    the weights of `chosen` in place of its own."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    table = saved_shapes(base.run_dir.absolute() / "checkpoints", base.step)
    shapes = {
        path: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=device)
        for path, (shape, dtype, _) in table.items()
    }
    readers = [_reader(saved, weights) for saved in chosen]
    read_base, state = _reader(base, "trained"), dict[str, np.ndarray]()
    for path, shape in shapes.items():
        is_weight = path.startswith("params.") and jnp.issubdtype(shape.dtype, jnp.inexact)
        leaves = [read_base] if not is_weight else readers
        state[path] = _mean(functools.partial(_leaf, path=path, shape=shape), leaves)
    average = saved_average(shapes)
    for path, (name, _) in (average.names if average else {}).items():
        state[name] = state[f"params.{path}"].astype(shapes[name].dtype)
    return state


def _reader(saved: SavedStep, weights: Literal["trained", "average"]) -> Read:
    return reader_of(SavedWeights(*saved, weights, {}), saved.step)


def _leaf(read: Read, path: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.asarray(read({path: shape})[path])


def _mean(leaf_by: Callable[[Read], np.ndarray], readers: Sequence[Read]) -> np.ndarray:
    """The mean of a leaf over checkpoints, in float32 and of the leaf's dtype; of one, itself."""
    leaves: Iterator[np.ndarray] = map(leaf_by, readers)
    first = next(leaves)
    mean = first.astype(np.float32) if len(readers) > 1 else first
    for count, leaf in enumerate(leaves, 2):
        mean += (leaf.astype(np.float32) - mean) / np.float32(count)
    return mean.astype(first.dtype)


def _write(target: Path, state: dict[str, np.ndarray], base: SavedStep, run: RunConfig) -> None:
    """Writes a state as a run directory with one checkpoint; config.json, which makes it one, comes
    last. It has an id of its own."""
    record = record_of(base.run_dir) | {"run_id": uuid.uuid4().hex}
    with Checkpoints(target, run=identity_of(record, run.run.seed)) as checkpoints:
        checkpoints.save(state, base.step)
    tokenizer = Tokenizer.find(base.run_dir)
    if tokenizer is not None:
        tokenizer.save(target / "tokenizer.json", follow=False)
    for name in COPIED:
        if (base.run_dir / name).is_file():
            write_text(target / name, read_file(base.run_dir / name).decode(), follow=False)
    write_text(target / "data.json", json.dumps(record, indent=2) + "\n", follow=False)
    settings = dataclasses.replace(run.run, dir=str(target), restart=False)
    config = to_json(dataclasses.replace(run, run=settings))
    write_text(target / "config.json", config, follow=False)
