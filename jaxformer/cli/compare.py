"""`jaxformer compare RUN RUN ...`: the curves of runs in one page, and where their configs
differ."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxformer.cli.arguments import check_output, parse

if TYPE_CHECKING:
    from jaxformer.tools.comparing import ComparedRun, Configuration

SHOWN_FIGURES = ("steps", "loss", "best validation loss", "tokens/s")


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """Writes an HTML page with the training and validation losses of runs over steps, tokens and
    seconds, and prints a table of them with the settings in which they differ. Runs that differ in
    their seed alone are one line, with a band from the lowest to the highest. Reads files only."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directories, or directories that runs are in."""
    output: Path = Path("compare.html")
    """File for the page, which needs no other files."""


def run(arguments: Sequence[str]) -> int:
    asked = parse(CompareArguments, "compare", arguments)
    check_output(asked.output)
    from jaxformer.config.format import escaped
    from jaxformer.files import write_text
    from jaxformer.report.banner import aligned
    from jaxformer.tools.comparing import band_of, configurations, read_runs
    from jaxformer.tools.comparison import Overlaid, comparison_page

    notes: list[str] = []
    runs = read_runs(asked.runs, notes)
    for note in notes:
        print(f"note: {escaped(note)}", file=sys.stderr)
    compared = configurations(runs)
    panels = {}
    for panel in ("validation", "training"):
        lines = []
        for group in compared:
            curves = [getattr(member, panel) for member in group.runs]
            lines.append(Overlaid(group.name, curves, band_of(curves)))
        panels[f"{panel} loss (nats per target; of preferences, per pair)"] = lines
    columns = ("run", *SHOWN_FIGURES, *compared[0].differing)
    rows = [_cells(group) for group in compared]
    title = f"{len(runs)} runs of {len(compared)} configurations"
    write_text(asked.output, comparison_page(panels, columns, rows, title=title))
    print("\n".join(aligned([columns, *rows], right=range(1, len(SHOWN_FIGURES) + 1))))
    print(f"{asked.output}: {title}")
    return 0


def _cells(group: "Configuration") -> tuple[str, ...]:
    from jaxformer.config.format import escaped

    def figures(of: "Callable[[ComparedRun], float | None]", form: str) -> str:
        """The mean over the runs that have the figure and, of several, the lowest and highest."""
        known = [value for value in map(of, group.runs) if value is not None]
        if not known:
            return ""
        mean = format(sum(known) / len(known), form)
        if len(known) == 1:
            return mean
        return f"{mean} ({format(min(known), form)} to {format(max(known), form)})"

    steps = sorted({run.listed.step for run in group.runs})
    return (
        escaped(group.name).replace("\n", "\\n"),
        " to ".join(f"{step:,}" for step in (*steps[:1], *steps[1:][-1:])),
        figures(lambda run: run.listed.loss, ".4f"),
        figures(lambda run: run.listed.best, ".4f"),
        figures(lambda run: run.listed.tokens_per_second, ",.0f"),
        *(escaped(str(value)) for value in group.differing.values()),
    )
