"""The curves of several runs, grouped by their configs: runs that differ in their seed alone are
one configuration."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config.config_file import read_config
from jaxformer.config.run import flat
from jaxformer.files import ConfigError, read_object
from jaxformer.report.metrics import FILE, read_metrics
from jaxformer.report.plot import smoothed
from jaxformer.tools.comparison import Band, Curve
from jaxformer.tools.listing import ListedRun, runs_below


class ComparedRun(NamedTuple):
    """A run with its training loss, smoothed, and its validation loss. `settings` are those that
    are compared, by dotted name, with the fingerprints of its data."""

    listed: ListedRun
    seed: int
    settings: dict[str, Any]
    training: Curve
    validation: Curve


class Configuration(NamedTuple):
    """The runs of one config, by their paths, and those of its settings in which the compared
    configurations differ."""

    name: str
    runs: tuple[ComparedRun, ...]
    differing: dict[str, Any]


def read_runs(paths: Sequence[Path], notes: list[str]) -> list[ComparedRun]:
    """The runs in directories and below them, each once; a run that cannot be read, or has logged
    no loss, is told in `notes`. Raises ConfigError where none is left."""
    found, seen = list[ComparedRun](), set[Path]()
    for run in itertools.chain.from_iterable(map(runs_below, paths)):
        if isinstance(run, ConfigError):
            notes.append(str(run))
            continue
        if run.path.resolve() in seen:
            continue
        seen.add(run.path.resolve())
        compared = _read(run)
        if len(compared.training.steps) or len(compared.validation.steps):
            found.append(compared)
        else:
            notes.append(f"{run.path} has logged no loss yet and is left out.")
    if not found:
        where = ", ".join(map(str, paths))
        reasons = "".join(f"\n  {note}" for note in notes[:20])
        raise ConfigError(
            f"There is no run with a logged loss in {where}: give run directories.{reasons}"
        )
    return found


def configurations(runs: Iterable[ComparedRun]) -> list[Configuration]:
    """Runs grouped by everything but their seeds, in the order of the first of each."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items())), []).append(run)
    settings = [members[0].settings for members in groups.values()]
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    differing = [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]
    return [
        Configuration(
            name=_name(members),
            runs=tuple(members),
            differing={name: members[0].settings.get(name) for name in differing},
        )
        for members in groups.values()
    ]


def band_of(curves: Sequence[Curve]) -> Band:
    """The mean of curves, and their lowest and highest value at each of its points.

    Its points are the steps of the first curve as far as all of them reach; between their points
    the others are interpolated. Curves without points are left out.
    """
    curves = [curve for curve in curves if len(curve.steps)]
    if not curves:
        nothing = np.zeros(0)
        return Band(Curve(nothing, nothing, nothing, nothing), nothing, nothing)
    start = max(curve.steps[0] for curve in curves)
    end = min(curve.steps[-1] for curve in curves)
    steps = curves[0].steps
    steps = steps[(start <= steps) & (steps <= end)]  # [P]

    def rows(name: str) -> np.ndarray:
        """[R, P]: a column of every curve at these steps."""
        return np.stack([np.interp(steps, curve.steps, getattr(curve, name)) for curve in curves])

    values = rows("values")
    mean = Curve(steps, rows("tokens").mean(0), rows("seconds").mean(0), values.mean(0))
    return Band(mean, values.min(0), values.max(0))


def _read(run: ListedRun) -> ComparedRun:
    config = read_config(run.path / "config.json")
    settings = flat(config)
    # Where a run is and how it is started changes no number; what it starts from does.
    for name in (*flat(config.run, "run."), *flat(config.launch, "launch.")):
        del settings[name]
    settings["run.init_from"] = config.run.init_from
    for name, value in read_object(run.path / "data.json").items():
        if name != "run_id":
            settings[f"data.json: {name}"] = value
    lines = read_metrics(run.path) if (run.path / FILE).exists() else []
    tokens = {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    training = _curve(lines, "loss", tokens)
    places, values = smoothed(training.values)
    return ComparedRun(
        listed=run,
        seed=config.run.seed,
        settings=settings,
        training=Curve(
            training.steps[places], training.tokens[places], training.seconds[places], values
        ),
        validation=_curve(lines, "val_loss", tokens),
    )


def _curve(lines: list[dict[str, Any]], name: str, tokens: Mapping[int, float]) -> Curve:
    """A finite quantity by step, the last of each step. The tokens of a step at which none are
    logged are interpolated."""
    found = {line["step"]: line for line in lines if math.isfinite(line.get(name, math.nan))}
    steps = np.array(sorted(found), np.float64)
    known = np.array([(0, 0), *sorted(tokens.items())], np.float64)  # [P + 1, 2]
    seconds = [found[int(step)].get("seconds", math.nan) for step in steps]
    values = [found[int(step)][name] for step in steps]
    return Curve(
        steps,
        np.interp(steps, known[:, 0], known[:, 1]),
        np.array(seconds, np.float64),
        np.array(values, np.float64),
    )


def _name(members: Sequence[ComparedRun]) -> str:
    """The path of the only run; of several, that of the first and how many there are."""
    first = str(members[0].listed.path)
    if len(members) == 1:
        return first
    kind = "seeds" if len({run.seed for run in members}) == len(members) else "runs"
    return f"{first} ({len(members)} {kind})"
