"""The curves of several runs in one HTML page. Drawn by plotly, the extra `compare`."""

import html
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer.files import ConfigError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# The colors of Okabe and Ito, which people with each kind of color blindness can tell apart; after
# them the lines are dashed.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
DASHES = ("solid", "dash", "dot", "dashdot")
AXES_OF_RUNS = {"steps": "step", "tokens": "tokens", "seconds": "seconds"}
FEW_POINTS = 30  # up to so many are marked

Points = dict[str, np.ndarray]  # [P] on each axis


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


class Overlaid(NamedTuple):
    """A named line of a panel: the `curves` that it is made of, and their band."""

    name: str
    curves: Sequence[Curve]
    band: Band


def comparison_page(
    panels: Mapping[str, Sequence[Overlaid]],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
) -> str:
    """A self-contained HTML page with a panel for each quantity, over steps, tokens or seconds, and
    a table below them.

    Every panel holds the same lines in the same order, and `rows` has a row of cells for each of
    them. Raises ConfigError where plotly is not installed.
    """
    try:
        import plotly.io
    except ImportError as error:
        raise ConfigError(
            f"comparing runs needs plotly, which cannot be imported ({error}): pip install"
            ' "jaxformer[compare]".'
        ) from None
    drawn = plotly.io.to_html(
        _figure(panels),
        full_html=False,
        include_plotlyjs=True,
        div_id="curves",
        config={"displaylogo": False, "responsive": True},
    )
    parts = {"title": html.escape(title), "curves": drawn, "table": _table(columns, rows)}
    page = files("jaxformer.report").joinpath("comparison.html").read_text("utf-8")
    return re.sub("{{(.+?)}}", lambda found: parts[found[1]], page)


def _figure(panels: Mapping[str, Sequence[Overlaid]]) -> "Figure":
    """One panel below the other over one axis, which the buttons above them change."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(panels), shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[*panels]
    )
    axes: dict[str, list[np.ndarray]] = {name: [] for name in AXES_OF_RUNS}
    named: set[str] = set()
    for row, lines in enumerate(panels.values(), start=1):
        for number, line in enumerate(lines):
            for trace, points in _traces(line, number):
                figure.add_trace(trace, row=row, col=1)
                for name in axes:
                    axes[name].append(points[name])
                if trace["name"]:  # one entry in the legend for the lines of all panels
                    figure.data[-1].showlegend = trace["name"] not in named
                    named.add(trace["name"])
    last = "xaxis" if len(panels) == 1 else f"xaxis{len(panels)}"
    figure.update_layout(
        template="simple_white",
        height=360 * len(panels) + 120,
        hovermode="x unified",
        margin={"l": 60, "r": 20, "t": 90, "b": 50},
        legend={"orientation": "h", "yanchor": "top", "y": -0.1},
        updatemenus=[
            _buttons(
                {
                    label: ("update", [{"x": axes[name]}, {f"{last}.title.text": label}])
                    for name, label in AXES_OF_RUNS.items()
                },
                0.0,
            ),
            _buttons(
                {
                    kind: ("relayout", [{f"{axis}.type": kind for axis in _y_axes(len(panels))}])
                    for kind in ("linear", "log")
                },
                0.6,
            ),
        ],
    )
    figure.update_xaxes(title_text=AXES_OF_RUNS["steps"], row=len(panels), col=1)
    figure.update_yaxes(showgrid=True, gridcolor="#eceef1")
    return figure


def _traces(line: Overlaid, number: int) -> list[tuple[dict[str, Any], Points]]:
    """What plotly draws for a line, each with its points on each axis: the curves, faint, and the
    area between lowest and highest, where there are several; then the mean."""
    color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
    mean, found = line.band.mean, list[tuple[dict[str, Any], Points]]()

    def draw(points: Points, values: np.ndarray, **style: Any) -> None:
        """A trace, on the axis that the page opens with."""
        found.append(
            (
                {"type": "scatter", "legendgroup": str(number), "name": ""}
                | {"x": points["steps"], "y": values}
                | style,
                points,
            )
        )

    quiet: dict[str, Any] = {"hoverinfo": "skip", "showlegend": False}
    if len(line.curves) > 1:
        thin = {"color": color, "width": 1}
        for curve in line.curves:
            draw(_points(curve), curve.values, mode="lines", opacity=0.35, line=thin, **quiet)
        # There along the highest values and back along the lowest.
        around = {axis: np.concatenate([x, x[::-1]]) for axis, x in _points(mean).items()}
        edge = np.concatenate([line.band.high, line.band.low[::-1]])
        draw(around, edge, mode="none", fill="toself", fillcolor=f"{color}26", **quiet)
    draw(
        _points(mean),
        mean.values,
        name=html.escape(line.name),
        mode="lines+markers" if len(mean.steps) <= FEW_POINTS else "lines",
        line={"color": color, "width": 2, "dash": dash},
    )
    return found


def _points(curve: Curve) -> Points:
    return {axis: getattr(curve, axis) for axis in AXES_OF_RUNS}


def _buttons(labels: Mapping[str, tuple[str, list[Any]]], place: float) -> dict[str, Any]:
    """A row of buttons above the panels, from `place`, a share of their width."""
    rows = [
        {"label": label, "method": method, "args": args} for label, (method, args) in labels.items()
    ]
    where = {"x": place, "xanchor": "left", "y": 1.0, "yanchor": "bottom"}
    return {"type": "buttons", "direction": "right", "buttons": rows, "pad": {"b": 30}} | where


def _y_axes(panels: int) -> list[str]:
    return ["yaxis" if number == 1 else f"yaxis{number}" for number in range(1, panels + 1)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = [f"<tr>{head}</tr>"]
    for number, row in enumerate(rows):
        color = f'<i style="background:{COLORS[number % len(COLORS)]}"></i>'
        first, *others = (html.escape(cell) for cell in row)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{color}{first}</th>{cells}</tr>')
    return "\n".join(lines)
