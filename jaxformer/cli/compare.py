"""`jaxformer compare RUN RUN ...`: the curves of runs in one picture, and where their configs
differ."""

import sys
from collections.abc import Sequence

from jaxformer.cli.arguments import CompareArguments, check_output
from jaxformer.config.format import escaped
from jaxformer.report.banner import aligned
from jaxformer.tools.run_comparison import configurations, draw_comparison, read_runs

SHOWN_FIGURES = ("steps", "loss", "best validation loss", "tokens/s")


def run(args: CompareArguments) -> int:
    check_output(args.output)
    runs, notes = read_runs(args.runs)
    for note in notes:
        print(f"note: {escaped(note)}", file=sys.stderr)
    groups = configurations(runs)
    rows: list[tuple[str, ...]] = [("run", *SHOWN_FIGURES, *groups[0].differing)]
    for group in groups:
        listed = [run.listed for run in group.runs]
        cells = (
            escaped(group.name).replace("\n", "\\n"),
            _mean([run.step for run in listed], ",.0f"),
            _mean([run.loss for run in listed], ".4f"),
            _mean([run.best for run in listed], ".4f"),
            _mean([run.tokens_per_second for run in listed], ",.0f"),
        )
        rows.append((*cells, *(escaped(str(value)) for value in group.differing.values())))
    draw_comparison(groups, args.output)
    print("\n".join(aligned(rows, right=range(1, len(SHOWN_FIGURES) + 1))))
    print(f"{args.output}: {len(runs)} runs of {len(groups)} configurations")
    return 0


def _mean(figures: Sequence[float | None], style: str) -> str:
    """The mean over the runs that have a figure and, where they differ, the lowest and highest."""
    values = [value for value in figures if value is not None]
    if not values:
        return ""
    mean = format(sum(values) / len(values), style)
    if min(values) == max(values):
        return mean
    return f"{mean} ({format(min(values), style)} to {format(max(values), style)})"
