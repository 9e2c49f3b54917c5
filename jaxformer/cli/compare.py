"""`jaxformer compare RUN ...`: the curves of runs in one picture, and where their configs differ.
Runs that differ in their seed alone are one configuration."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.cli.arguments import CompareArguments, check_output
from jaxformer.config.config_file import read_config
from jaxformer.config.format import escaped
from jaxformer.config.run import flat
from jaxformer.files import ConfigError, read_object
from jaxformer.report.banner import aligned
from jaxformer.report.metrics import read_metrics
from jaxformer.report.plot import draw_curve, panels
from jaxformer.runs.directory import RunDirectory

# The figures of a run in the order of the table, and how they are written.
FIGURES = {"steps": ",.0f", "loss": ".4f", "best validation loss": ".4f", "tokens/s": ",.0f"}
LOSSES = {"val_loss": "validation loss", "loss": "training loss"}
RUN_FILES = ("config.json", "data.json")  # what makes a directory that of a run


class ComparedRun(NamedTuple):
    """A run with the lines of its metrics. `settings` are those that are compared, by dotted name,
    with the fingerprints of its data."""

    path: Path
    settings: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def figures(self) -> list[float | None]:
        """The values of `FIGURES`: those logged last, and the lowest validation loss."""
        newest: dict[str, Any] = {}
        best = math.inf
        for line in self.lines:
            newest |= line
            best = min(best, line.get("val_loss", math.inf))  # a NaN is not less
        lowest = None
        if best < math.inf:
            lowest = best
        return [newest.get("step"), newest.get("loss"), lowest, newest.get("tokens_per_second")]


class Configuration(NamedTuple):
    """The runs of one config, and those of its settings in which the compared configurations
    differ."""

    name: str
    runs: tuple[ComparedRun, ...]
    differing: dict[str, Any]


def run(args: CompareArguments) -> int:
    check_output(args.output)
    runs, notes = read_runs(args.runs)
    for note in notes:
        print(f"note: {escaped(note)}", file=sys.stderr)
    groups = configurations(runs)
    rows: list[tuple[str, ...]] = [("run", *FIGURES, *groups[0].differing)]
    for group in groups:
        columns = zip(*(run.figures for run in group.runs), strict=True)
        cells = map(mean_text, columns, FIGURES.values())
        settings = map(escaped, map(str, group.differing.values()))
        rows.append((escaped(group.name).replace("\n", "\\n"), *cells, *settings))
    # A panel for the validation and one for the training loss, over tokens, in which the runs of a
    # configuration have one color.
    with panels(args.output, (9, 8), (1, 1)) as both:
        for axes, (name, title) in zip(both, LOSSES.items(), strict=True):
            axes.set_ylabel(title)
            for number, group in enumerate(groups):
                label = group.name
                for run in group.runs:
                    draw_curve(axes, run.lines, name, label, f"C{number % 10}")
                    label = ""
        both[0].legend(loc="upper right", fontsize="small")
        both[1].set_xlabel("tokens")
    print("\n".join(aligned(rows, right=range(1, len(FIGURES) + 1))))
    print(f"{args.output}: {len(runs)} runs of {len(groups)} configurations")
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


def run_directories(folder: Path) -> Iterator[Path]:
    """Yield the directories of runs among a directory and those below it, by their paths; what
    cannot be listed is left out. Links are not followed."""
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
            yield from run_directories(entry)


def read_runs(paths: Sequence[Path]) -> tuple[list[ComparedRun], list[str]]:
    """Return the runs in directories and below them, each once, and a note on each run that cannot
    be read, or has logged no loss. Raises ConfigError where there is no such directory."""
    runs = list[ComparedRun]()
    notes = list[str]()
    # Resolved, so that a link is not a second run.
    read = set[Path]()
    for folder in paths:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a directory: give the one that your runs are in.")
    for path in itertools.chain.from_iterable(map(run_directories, paths)):
        # Named twice, or below two of the directories.
        if path.resolve() in read:
            continue
        read.add(path.resolve())
        directory = RunDirectory(path)
        try:
            config = read_config(directory.config)
            record = read_object(directory.data)
            lines = []  # of a run that has just begun
            if directory.metrics.exists():
                lines = read_metrics(path)
        except ConfigError as error:
            notes.append(str(error))
            continue
        settings = flat(config)
        # Where a run is stored, its seed and how it is started are not compared, but what it starts
        # from is.
        for name in [*settings]:
            if name.startswith(("run.", "launch.")):
                del settings[name]
        settings["run.init_from"] = config.run.init_from
        for name, value in record.items():
            if name != "run_id":
                settings[f"data.json: {name}"] = value
        if any("loss" in line or "val_loss" in line for line in lines):
            runs.append(ComparedRun(path, settings, lines))
        else:
            notes.append(f"{path} has logged no loss yet and is left out.")
    if not runs:
        folders = ", ".join(map(str, paths))
        reasons = "".join(f"\n  {note}" for note in notes[:20])
        raise ConfigError(
            f"There is no run with a logged loss in {folders}: give run directories.{reasons}"
        )
    return runs, notes


def configurations(runs: Iterable[ComparedRun]) -> list[Configuration]:
    """Group runs by everything but their seeds, in the order of the first of each."""
    # By text, since settings may be lists, which cannot be hashed.
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items())), []).append(run)
    # By repr, so that True is not 1.
    settings = [members[0].settings for members in groups.values()]
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    differing = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
    result = []
    for members in groups.values():
        name = str(members[0].path)
        if len(members) > 1:
            name += f" ({len(members)} runs)"
        values = {setting: members[0].settings.get(setting) for setting in differing}
        result.append(Configuration(name, tuple(members), values))
    return result
