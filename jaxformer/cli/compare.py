"""`jaxformer compare RUN RUN ...`: the curves of runs in one picture, and where their configs
differ."""

import sys
from collections.abc import Callable

from jaxformer.cli.arguments import CompareArguments, check_output
from jaxformer.config.format import escaped
from jaxformer.report.banner import aligned
from jaxformer.tools.run_comparison import (
    ComparedRun,
    Configuration,
    configurations,
    draw_comparison,
    read_runs,
)

SHOWN_FIGURES = ("steps", "loss", "best validation loss", "tokens/s")


def run(args: CompareArguments) -> int:
    check_output(args.output)
    runs, notes = read_runs(args.runs)
    for note in notes:
        print(f"note: {escaped(note)}", file=sys.stderr)
    groups = configurations(runs)
    columns = ("run", *SHOWN_FIGURES, *groups[0].differing)
    rows = [_cells(group) for group in groups]
    draw_comparison(groups, args.output)
    print("\n".join(aligned([columns, *rows], right=range(1, len(SHOWN_FIGURES) + 1))))
    print(f"{args.output}: {len(runs)} runs of {len(groups)} configurations")
    return 0


def _cells(group: Configuration) -> tuple[str, ...]:
    def figures(figure_of: Callable[[ComparedRun], float | None], style: str) -> str:
        """The mean over the runs that have the figure and, of several, the lowest and highest."""
        values = [value for value in map(figure_of, group.runs) if value is not None]
        if not values:
            return ""
        mean = format(sum(values) / len(values), style)
        if len(values) == 1:
            return mean
        return f"{mean} ({format(min(values), style)} to {format(max(values), style)})"

    steps = [run.listed.step for run in group.runs]
    first, last = min(steps), max(steps)
    return (
        escaped(group.name).replace("\n", "\\n"),
        f"{first:,}" if first == last else f"{first:,} to {last:,}",
        figures(lambda run: run.listed.loss, ".4f"),
        figures(lambda run: run.listed.best, ".4f"),
        figures(lambda run: run.listed.tokens_per_second, ",.0f"),
        *(escaped(str(value)) for value in group.differing.values()),
    )
