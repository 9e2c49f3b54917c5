"""`jaxformer runs [DIR]`: the runs of a directory at a glance, from their files."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.cli.arguments import RunsArguments
from jaxformer.config.config_file import read_config
from jaxformer.config.format import escaped, human_time
from jaxformer.files import ConfigError
from jaxformer.report.banner import aligned
from jaxformer.report.metrics import read_metrics
from jaxformer.runs.directory import RunDirectory

RUN_COLUMNS = ("run", "state", "step", "loss", "best validation loss", "tokens/s", "last logged")


def run(args: RunsArguments) -> int:
    entries = list(runs_below(args.dir))
    runs = [entry for entry in entries if not isinstance(entry, ConfigError)]
    if args.json:
        listed = []
        for run in runs:
            numbers = run._asdict() | {"path": str(run.path)}
            for name, value in numbers.items():
                if isinstance(value, float) and not math.isfinite(value):
                    numbers[name] = None  # JSON has no such number
            listed.append(numbers)
        print(json.dumps(listed, indent=1))
    elif runs:
        lines = [RUN_COLUMNS]
        for run in runs:
            path = run.path.relative_to(args.dir) if run.path != args.dir else args.dir
            cells = (
                escaped(str(path)).replace("\n", "\\n"),
                run.state,
                f"{run.step:,}/{run.steps:,}",
                mean_text([run.loss], ".4f"),
                "" if run.best is None else f"{run.best:.4f} at {run.best_step:,}",
                mean_text([run.tokens_per_second], ",.0f"),
                "" if run.idle is None else f"{human_time(run.idle)} ago",
            )
            lines.append(cells)
        print("\n".join(aligned(lines, right=(2, 3, 4, 5, 6))))
    else:
        print(f"There is no run in {args.dir}.")
    for entry in entries:
        if isinstance(entry, ConfigError):
            print(f"note: {escaped(str(entry))}", file=sys.stderr)
    return 0


def mean_text(figures: Sequence[float | None], style: str) -> str:
    """Return the mean over the runs that have a figure and, where they differ, the lowest and
    highest."""
    values = [value for value in figures if value is not None]
    if not values:
        return ""
    mean = format(sum(values) / len(values), style)
    if len({*values}) == 1:  # NaN too
        return mean
    return f"{mean} ({format(min(values), style)} to {format(max(values), style)})"


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
    """Yield the runs in a directory and those below it, by their paths; for one that cannot be
    read, the reason. Links are not followed. Raises ConfigError where there is no such
    directory."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory: give the one that your runs are in.")
    for run_dir in _directories(folder):
        try:
            yield listed(run_dir)
        except ConfigError as error:
            yield error


def _directories(folder: Path) -> Iterator[Path]:
    """Yield those of runs; what cannot be listed is left out."""
    try:
        entries = sorted(folder.iterdir(), key=str)
    except OSError:
        return
    # Nothing in a run is another run.
    if {*RUN_FILES} <= {entry.name for entry in entries}:
        yield folder
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            yield from _directories(entry)


def listed(run_dir: Path) -> ListedRun:
    """Return what the files of a run say. Raises ConfigError where they cannot be read."""
    directory = RunDirectory(run_dir)
    steps = read_config(directory.config).train.steps
    log = directory.metrics
    lines = read_metrics(run_dir) if log.exists() else []
    step = max((line["step"] for line in lines), default=0)
    # A loss that is not a number is not the best one.
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
        # A clock that was set back would give negative seconds.
        idle=max(time.time() - log.stat().st_mtime, 0.0) if lines else None,
    )


def _last(lines: list[dict[str, Any]], name: str) -> float | None:
    return next((line[name] for line in reversed(lines) if name in line), None)
