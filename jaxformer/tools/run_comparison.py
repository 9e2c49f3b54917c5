"""The curves of several runs in one HTML page, drawn by plotly, the extra `compare`. Runs that
differ in their seed alone are one configuration.

In the comments, P is the number of points of a curve and R that of runs.
"""

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer.config.config_file import read_config
from jaxformer.config.run import flat
from jaxformer.files import ConfigError, read_object
from jaxformer.report.metrics import FILE, read_metrics
from jaxformer.report.plot import smoothed
from jaxformer.tools import filled_page
from jaxformer.tools.listing import ListedRun, runs_below

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# The colors of Okabe and Ito, which people with any kind of color blindness can tell apart. Further
# lines have the same colors, and are dashed.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
DASHES = ("solid", "dash", "dot", "dashdot")
LOSSES = ("validation", "training")
# Metrics that have a panel of their own where a run has logged them: these, and those of sources
# and layers, which begin so.
FURTHER_METRICS = ("skipped_spikes",)
BY_SOURCE_OR_LAYER = (
    *("loss/", "val_loss/", "grad_norm/", "update_norm/", "dead_units/"),
    *("attention_entropy/", "cross_attention_entropy/"),
)
HEIGHTS = {"loss": 360, "further": 240}  # of a panel, in pixels
AXES_OF_RUNS = {"steps": "step", "tokens": "tokens", "seconds": "seconds"}
MARKED_POINTS = 30  # a line of more has no markers


class Curve(NamedTuple):
    """A quantity by step: arrays [P] of float64. `tokens` counts the tokens read in training, and
    `seconds` the wall time of the run."""

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


class Band(NamedTuple):
    """The mean of several curves, and the lowest and highest value [P] at each of its points."""

    mean: Curve
    low: np.ndarray
    high: np.ndarray


class ComparedRun(NamedTuple):
    """A run with its training loss, smoothed, its validation loss, and the further metrics that it
    has, by name. `settings` are those that are compared, by dotted name, with the fingerprints of
    its data."""

    listed: ListedRun
    seed: int
    settings: dict[str, Any]
    training: Curve
    validation: Curve
    metrics: dict[str, Curve]

    def curve(self, quantity: str) -> Curve:
        """The "training" or "validation" loss, or a metric, which may have no points."""
        losses = {"training": self.training, "validation": self.validation}
        empty = np.zeros(0)
        return (losses | self.metrics).get(quantity, Curve(empty, empty, empty, empty))


class Configuration(NamedTuple):
    """The runs of one config, by their paths, and those of its settings in which the compared
    configurations differ."""

    name: str
    runs: tuple[ComparedRun, ...]
    differing: dict[str, Any]

    def curves(self, quantity: str) -> list[Curve]:
        """The curve of each run for "training", "validation" or a metric."""
        return [run.curve(quantity) for run in self.runs]


class Panel(NamedTuple):
    """A panel of the page: its title, and the quantities that it shows, of several layers in their
    order."""

    title: str
    quantities: tuple[str, ...]


def read_runs(paths: Sequence[Path]) -> tuple[list[ComparedRun], list[str]]:
    """The runs in directories and below them, each once, and a note on each run that cannot be
    read, or has logged no loss. Raises ConfigError where no run is left."""
    runs, notes, seen = list[ComparedRun](), list[str](), set[Path]()
    for run in itertools.chain.from_iterable(map(runs_below, paths)):
        if isinstance(run, ConfigError):
            notes.append(str(run))
            continue
        if run.path.resolve() in seen:
            continue
        seen.add(run.path.resolve())
        compared = _read(run)
        if len(compared.training.steps) or len(compared.validation.steps):
            runs.append(compared)
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
    """Runs grouped by everything but their seeds, in the order of the first of each."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items())), []).append(run)
    settings = [members[0].settings for members in groups.values()]
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    differing = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
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
        empty = np.zeros(0)
        return Band(Curve(empty, empty, empty, empty), empty, empty)
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
    # Where a run is stored and how it is started changes no number; what it starts from does.
    for name in (*flat(config.run, "run."), *flat(config.launch, "launch.")):
        del settings[name]
    settings["run.init_from"] = config.run.init_from
    for name, value in read_object(run.path / "data.json").items():
        if name != "run_id":
            settings[f"data.json: {name}"] = value
    lines = read_metrics(run.path) if (run.path / FILE).exists() else []
    tokens = {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    training = _curve(lines, "loss", tokens)
    index, values = smoothed(training.values)
    return ComparedRun(
        listed=run,
        seed=config.run.seed,
        settings=settings,
        training=Curve(
            training.steps[index], training.tokens[index], training.seconds[index], values
        ),
        validation=_curve(lines, "val_loss", tokens),
        metrics={name: _curve(lines, name, tokens) for name in sorted(_further_metrics(lines))},
    )


def _further_metrics(lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names of the metrics of a run that have a panel beside those of the losses."""
    return {
        name
        for line in lines
        for name in line
        if name in FURTHER_METRICS or name.startswith(BY_SOURCE_OR_LAYER)
    }


def panels_of(groups: Sequence[Configuration]) -> list[Panel]:
    """The losses, and a panel for each further metric that a run has; those that differ in their
    layer alone, as "grad_norm/blocks.ffn.0" and "grad_norm/blocks.ffn.1", share one."""
    names = sorted({name for group in groups for run in group.runs for name in run.metrics})
    by_title: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        title, _, layer = name.rpartition(".")
        if not layer.isdecimal() or name.startswith(("loss/", "val_loss/")):
            title, layer = name, "0"
        by_title.setdefault(title, []).append((int(layer), name))
    losses = [
        Panel(f"{name} loss (nats per target; of preferences, per pair)", (name,))
        for name in LOSSES
    ]
    return losses + [
        Panel(
            f"{title}, faintest in the first layer" if len(layers) > 1 else title,
            tuple(name for _, name in sorted(layers)),
        )
        for title, layers in by_title.items()
    ]


def _curve(lines: list[dict[str, Any]], name: str, tokens: Mapping[int, float]) -> Curve:
    """A finite quantity by step, the last of each step. The tokens of a step at which none are
    logged are interpolated."""
    line_of_step = {line["step"]: line for line in lines if math.isfinite(line.get(name, math.nan))}
    steps = sorted(line_of_step)
    seconds = [line_of_step[step].get("seconds", math.nan) for step in steps]
    values = [line_of_step[step][name] for step in steps]
    logged = np.array([(0, 0), *sorted(tokens.items())], np.float64)  # steps and tokens
    return Curve(
        np.array(steps, np.float64),
        np.interp(np.array(steps, np.float64), logged[:, 0], logged[:, 1]),
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


def comparison_page(
    groups: Sequence[Configuration],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
) -> str:
    """A self-contained HTML page with a panel for each loss, over steps, tokens or seconds, and a
    table below them, in which `rows` has a row of cells for each configuration. Raises ConfigError
    where plotly is not installed."""
    try:
        import plotly.io
    except ImportError as error:
        raise ConfigError(
            f"comparing runs needs plotly, which cannot be imported ({error}): pip install"
            ' "jaxformer[compare]".'
        ) from None
    curves = plotly.io.to_html(
        _figure(groups),
        full_html=False,
        include_plotlyjs=True,
        div_id="curves",
        config={"displaylogo": False, "responsive": True},
    )
    content = {"title": html.escape(title), "curves": curves, "table": _table(columns, rows)}
    return filled_page("comparison.html", content)


def _figure(groups: Sequence[Configuration]) -> "Figure":
    """One panel below the other over one axis, which the buttons above them change."""
    from plotly.subplots import make_subplots

    panels = panels_of(groups)
    further = len(panels) - len(LOSSES)
    heights = [HEIGHTS["loss"]] * len(LOSSES) + [HEIGHTS["further"]] * further
    figure = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        vertical_spacing=0.12 / len(panels),
        row_heights=heights,
        subplot_titles=[html.escape(panel.title) for panel in panels],
    )
    axes: dict[str, list[np.ndarray]] = {name: [] for name in AXES_OF_RUNS}
    in_legend: set[str] = set()
    for row, panel in enumerate(panels, start=1):
        for trace, curve in _traces_of(panel, groups):
            figure.add_trace(trace, row=row, col=1)
            for name in axes:
                axes[name].append(getattr(curve, name))
            if trace["name"]:  # one entry in the legend for the lines of all panels
                figure.data[-1].showlegend = trace["name"] not in in_legend
                in_legend.add(trace["name"])
    to_axes = {
        label: ("update", [{"x": axes[name]}, {f"xaxis{len(panels)}.title.text": label}])
        for name, label in AXES_OF_RUNS.items()
    }
    scaled = ["yaxis", *(f"yaxis{row}" for row in range(2, len(panels) + 1))]
    to_scales = {
        kind: ("relayout", [{f"{axis}.type": kind for axis in scaled}])
        for kind in ("linear", "log")
    }
    figure.update_layout(
        template="simple_white",
        height=sum(heights) + 120,
        hovermode="x unified",
        margin={"l": 60, "r": 20, "t": 90, "b": 50},
        legend={"orientation": "h", "yanchor": "top", "y": -0.2 / len(panels)},
        updatemenus=[_buttons(to_axes, 0.0), _buttons(to_scales, 0.6)],
    )
    figure.update_xaxes(title_text=AXES_OF_RUNS["steps"], row=len(panels), col=1)
    figure.update_yaxes(showgrid=True, gridcolor="#eceef1")
    return figure


def _traces_of(
    panel: Panel, groups: Sequence[Configuration]
) -> Iterator[tuple[dict[str, Any], Curve]]:
    """The traces of a panel: of one quantity those of `_traces`; of several layers the mean of each
    configuration alone, the fainter the earlier the layer."""
    layers = len(panel.quantities)
    for number, group in enumerate(groups):
        for index, quantity in enumerate(panel.quantities):
            curves = group.curves(quantity)
            if quantity not in LOSSES and not any(len(curve.steps) for curve in curves):
                continue
            traces = _traces(group.name, curves, number)
            if layers > 1:
                trace, curve = traces[-1]
                text = f"%{{y:.4g}} {html.escape(quantity)}<extra></extra>"
                opacity = 0.25 + 0.75 * (index + 1) / layers
                traces = [(trace | {"opacity": opacity, "hovertemplate": text}, curve)]
            yield from traces


def _traces(name: str, curves: Sequence[Curve], number: int) -> list[tuple[dict[str, Any], Curve]]:
    """What plotly draws for a configuration, each with its points: the curves, faint,
    and the area between lowest and highest, where there are several; then the mean."""
    color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
    (mean, low, high), traces = band_of(curves), list[tuple[dict[str, Any], Curve]]()

    def draw(curve: Curve, **style: Any) -> None:
        """Adds a trace, on the axis that the page opens with."""
        points = {"name": "", "x": curve.steps, "y": curve.values}
        traces.append(({"type": "scatter", "legendgroup": str(number), **points, **style}, curve))

    quiet: dict[str, Any] = {"hoverinfo": "skip", "showlegend": False}
    if len(curves) > 1:
        thin = {"color": color, "width": 1}
        for curve in curves:
            draw(curve, mode="lines", opacity=0.35, line=thin, **quiet)
        # The outline of the area: forth along the highest values, and back along the lowest.
        outline = Curve(*(np.concatenate([points, points[::-1]]) for points in mean))
        outline = outline._replace(values=np.concatenate([high, low[::-1]]))
        draw(outline, mode="none", fill="toself", fillcolor=f"{color}26", **quiet)
    draw(
        mean,
        name=html.escape(name),
        mode="lines+markers" if len(mean.steps) <= MARKED_POINTS else "lines",
        line={"color": color, "width": 2, "dash": dash},
    )
    return traces


def _buttons(labels: Mapping[str, tuple[str, list[Any]]], left: float) -> dict[str, Any]:
    """A row of buttons above the panels, whose left edge is at a share of their width."""
    buttons = [
        {"label": label, "method": method, "args": args} for label, (method, args) in labels.items()
    ]
    return {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "pad": {"b": 30},
        "x": left,
        "xanchor": "left",
        "y": 1.0,
        "yanchor": "bottom",
    }


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = [f"<tr>{head}</tr>"]
    for number, row in enumerate(rows):
        color = f'<i style="background:{COLORS[number % len(COLORS)]}"></i>'
        name, *figures = (html.escape(cell) for cell in row)
        cells = "".join(f"<td>{cell}</td>" for cell in figures)
        lines.append(f'<tr><th scope="row">{color}{name}</th>{cells}</tr>')
    return "\n".join(lines)
