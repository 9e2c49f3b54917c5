"""`jaxformer runs [DIR]`: the runs of a directory at a glance."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from jaxformer.cli.arguments import RunsArguments
from jaxformer.config.format import escaped, human_time
from jaxformer.files import ConfigError
from jaxformer.report.banner import aligned
from jaxformer.tools.listing import ListedRun, runs_below

RUN_COLUMNS = ("run", "state", "step", "loss", "best validation loss", "tokens/s", "last logged")


def run(args: RunsArguments) -> int:
    entries = list(runs_below(args.dir))
    runs = [entry for entry in entries if not isinstance(entry, ConfigError)]
    if args.json:
        print(json.dumps([_numbers(run) for run in runs], indent=1))
    elif runs:
        lines = [RUN_COLUMNS, *(_cells(run, args.dir) for run in runs)]
        print("\n".join(aligned(lines, right=(2, 3, 4, 5, 6))))
    else:
        print(f"There is no run in {args.dir}.")
    for entry in entries:
        if isinstance(entry, ConfigError):
            print(f"note: {escaped(str(entry))}", file=sys.stderr)
    return 0


def _numbers(run: ListedRun) -> dict[str, Any]:
    """A run for JSON, which has no number that is not finite."""
    values = run._asdict() | {"path": str(run.path)}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return values


def _cells(run: ListedRun, folder: Path) -> tuple[str, ...]:
    name = str(run.path.relative_to(folder)) if run.path != folder else str(folder)
    return (
        escaped(name).replace("\n", "\\n"),
        run.state,
        f"{run.step:,}/{run.steps:,}",
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.best is None else f"{run.best:.4f} at {run.best_step:,}",
        "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "" if run.idle is None else f"{human_time(run.idle)} ago",
    )
