"""`jaxformer runs [DIR]`: the runs of a directory at a glance."""

import json
import math
import sys

from jaxformer.cli.arguments import RunsArguments
from jaxformer.config.format import escaped, human_time
from jaxformer.files import ConfigError
from jaxformer.report.banner import aligned
from jaxformer.tools.listing import runs_below

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
                "" if run.loss is None else f"{run.loss:.4f}",
                "" if run.best is None else f"{run.best:.4f} at {run.best_step:,}",
                "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
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
