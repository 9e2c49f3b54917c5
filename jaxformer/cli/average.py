"""`jaxformer average RUN ...`: the mean of the weights of checkpoints, as a run of its own."""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxformer.cli.arguments import AverageArguments
from jaxformer.cli.convert import complete_or_empty, require_empty
from jaxformer.files import ConfigError, located, store_errors
from jaxformer.runs.soup import SavedStep, average_checkpoints


def run(args: AverageArguments) -> int:
    steps = _steps(args)
    target = _target(args)
    with complete_or_empty(target):
        chosen = average_checkpoints(
            args.runs, target, last=args.last, steps=steps, weights=args.weights
        )
    kind = "averaged" if args.weights == "average" else "trained"
    print(f"{target}: the mean of the {kind} weights of {_listed(chosen)}")
    print(f"next: jaxformer evaluate {target}")
    return 0


def _steps(args: AverageArguments) -> list[int]:
    """The numbers of --steps. Raises ConfigError where the arguments choose no checkpoints, or
    choose them twice."""
    if not args.runs:
        raise ConfigError("no run is named: jaxformer average RUN --last 5.")
    if args.last < 0:
        raise ConfigError(f"--last {args.last}: give a number of checkpoints, at least 1.")
    if args.steps and args.last:
        raise ConfigError("--last and --steps both choose checkpoints: leave one of them out.")
    text = args.steps.replace(" ", "")
    if text and not re.fullmatch(r"\d{1,10}(,\d{1,10})*", text):
        raise ConfigError(f"--steps {args.steps!r}: give steps separated by commas, as in 100,200.")
    return [int(number) for number in text.split(",") if number]


def _target(args: AverageArguments) -> Path:
    """The directory to write: --output, or one beside the first run. Raises ConfigError where it is
    not empty."""
    target = args.output or located(f"{str(args.runs[0]).rstrip('/')}-average")
    with store_errors(target, "read"):
        require_empty(target)
    return target


def _listed(chosen: Sequence[SavedStep]) -> str:
    """The checkpoints by their runs, as in "3 checkpoints: runs/a at steps 10, 20; runs/b at step
    20"."""
    steps: dict[Path, list[str]] = {}
    for run_dir, step in chosen:
        steps.setdefault(run_dir, []).append(f"{step:,}")
    runs = (
        f"{run_dir} at {'steps' if len(numbers) > 1 else 'step'} {', '.join(numbers)}"
        for run_dir, numbers in steps.items()
    )
    return f"{len(chosen)} checkpoints: {'; '.join(runs)}"
