"""`jaxformer compare RUN RUN ...`: the curves of runs in one picture, and where their configs
differ. Runs that differ in their seed alone are one configuration."""

import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.cli.arguments import CompareArguments, check_output
from jaxformer.cli.runs import ListedRun, mean_text, runs_below
from jaxformer.config.config_file import read_config
from jaxformer.config.format import escaped
from jaxformer.config.run import flat
from jaxformer.files import ConfigError, read_object
from jaxformer.report.banner import aligned
from jaxformer.report.metrics import read_metrics
from jaxformer.report.plot import draw_curve, panels
from jaxformer.runs.directory import RunDirectory

SHOWN_FIGURES = ("steps", "loss", "best validation loss", "tokens/s")
LOSSES = {"val_loss": "validation loss", "loss": "training loss"}


class ComparedRun(NamedTuple):
    """A run with the lines of its metrics. `settings` are those that are compared, by dotted name,
    with the fingerprints of its data."""

    listed: ListedRun
    settings: dict[str, Any]
    lines: list[dict[str, Any]]


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
    rows: list[tuple[str, ...]] = [("run", *SHOWN_FIGURES, *groups[0].differing)]
    for group in groups:
        listed = [run.listed for run in group.runs]
        cells = (
            escaped(group.name).replace("\n", "\\n"),
            mean_text([run.step for run in listed], ",.0f"),
            mean_text([run.loss for run in listed], ".4f"),
            mean_text([run.best for run in listed], ".4f"),
            mean_text([run.tokens_per_second for run in listed], ",.0f"),
        )
        rows.append((*cells, *(escaped(str(value)) for value in group.differing.values())))
    # A panel for the validation and one for the training loss, over tokens, in which the runs of a
    # configuration have one color.
    with panels(args.output, (9, 8), (1, 1)) as both:
        for axes, (name, title) in zip(both, LOSSES.items(), strict=True):
            axes.set_ylabel(title)
            for number, group in enumerate(groups):
                for run in group.runs:
                    label = ""
                    if run is group.runs[0]:
                        label = group.name
                    draw_curve(axes, run.lines, name, label, f"C{number % 10}")
        both[0].legend(loc="upper right", fontsize="small")
        both[1].set_xlabel("tokens")
    print("\n".join(aligned(rows, right=range(1, len(SHOWN_FIGURES) + 1))))
    print(f"{args.output}: {len(runs)} runs of {len(groups)} configurations")
    return 0


def read_runs(paths: Sequence[Path]) -> tuple[list[ComparedRun], list[str]]:
    """Return the runs in directories and below them, each once, and a note on each run that cannot
    be read, or has logged no loss."""
    runs = list[ComparedRun]()
    notes = list[str]()
    # Resolved, so that a link is not a second run.
    read = set[Path]()
    for run in itertools.chain.from_iterable(map(runs_below, paths)):
        if isinstance(run, ConfigError):
            notes.append(str(run))
            continue
        # Named twice, or below two of the directories.
        if run.path.resolve() in read:
            continue
        read.add(run.path.resolve())
        directory = RunDirectory(run.path)
        config = read_config(directory.config)
        settings = flat(config)
        # Where a run is stored, its seed and how it is started are not compared, but what it starts
        # from is.
        for name in [*settings]:
            if name.startswith(("run.", "launch.")):
                del settings[name]
        settings["run.init_from"] = config.run.init_from
        for name, value in read_object(directory.data).items():
            if name != "run_id":
                settings[f"data.json: {name}"] = value
        # Of a run that has just begun there are none.
        lines = read_metrics(run.path) if directory.metrics.exists() else []
        if any("loss" in line or "val_loss" in line for line in lines):
            runs.append(ComparedRun(run, settings, lines))
        else:
            notes.append(f"{run.path} has logged no loss yet and is left out.")
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
        name = str(members[0].listed.path)
        if len(members) > 1:
            name += f" ({len(members)} runs)"
        values = {setting: members[0].settings.get(setting) for setting in differing}
        result.append(Configuration(name, tuple(members), values))
    return result
