"""The runs below a directory, with what their files say of them."""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.config.config_file import read_config
from jaxformer.files import ConfigError
from jaxformer.report.metrics import read_metrics
from jaxformer.runs.directory import RunDirectory

RUN_FILES = ("config.json", "data.json")  # what makes a directory that of a run
State = Literal["running", "done", "stopped"]


class ListedRun(NamedTuple):
    """A run: `loss` and `tokens_per_second` are those logged last, `best` the lowest validation
    loss, at `best_step`; None where nothing was logged. `idle` are the seconds since then."""

    path: Path
    state: State
    step: int
    steps: int
    loss: float | None
    best: float | None
    best_step: int | None
    tokens_per_second: float | None
    idle: float | None


def runs_below(folder: Path) -> Iterator[ListedRun | ConfigError]:
    """The runs in a directory and those below it, by their paths; for one that cannot be read, the
    reason. Links are not followed. Raises ConfigError where there is no such directory."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory: give the one that your runs are in.")
    for run_dir in _directories(folder):
        try:
            yield listed(run_dir)
        except ConfigError as error:
            yield error


def _directories(folder: Path) -> Iterator[Path]:
    """Those of runs; what cannot be listed is left out."""
    try:
        entries = sorted(folder.iterdir(), key=str)
    except OSError:
        return
    if {*RUN_FILES} <= {entry.name for entry in entries}:
        yield folder
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            yield from _directories(entry)


def listed(run_dir: Path) -> ListedRun:
    """What the files of a run say. Raises ConfigError where they cannot be read."""
    directory = RunDirectory(run_dir)
    steps = read_config(directory.config).train.steps
    log = directory.metrics
    lines = read_metrics(run_dir) if log.exists() else []
    step = max((line["step"] for line in lines), default=0)
    losses = [line for line in lines if math.isfinite(line.get("val_loss", math.nan))]
    best: Mapping[str, Any] = min(losses, key=lambda line: line["val_loss"], default={})
    state: State = "done" if step >= steps else "stopped"
    if directory.is_in_use():
        state = "running"
    return ListedRun(
        path=run_dir,
        state=state,
        step=step,
        steps=steps,
        loss=_last(lines, "loss"),
        best=best.get("val_loss"),
        best_step=best.get("step"),
        tokens_per_second=_last(lines, "tokens_per_second"),
        idle=max(time.time() - log.stat().st_mtime, 0.0) if lines else None,
    )


def _last(lines: list[dict[str, Any]], name: str) -> float | None:
    return next((line[name] for line in reversed(lines) if name in line), None)
