"""`loss.png`: the curve of a run, drawn from its metrics alone."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.report.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, RED, INK, FAINT = "#2f6db5", "#c8502b", "#33373d", "#d9dce1"
TIME_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.markersize": 4,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def plot_losses(run_dir: str | Path) -> Path:
    """Draws training and validation loss and the learning rate over tokens into loss.png;
    ConfigError if none is logged."""
    lines = read_metrics(run_dir)
    train = [line for line in lines if "loss" in line]
    evals = [line for line in lines if "val_loss" in line]
    if not train and not evals:
        raise ConfigError(
            f"{run_dir} holds no loss to plot: let the run reach its first logged step"
            " (train.log_every)."
        )

    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), dpi=160, facecolor="white")
        FigureCanvasAgg(figure)
        _draw(figure, train, evals, Path(run_dir).resolve().name)
        return _save(figure, Path(run_dir) / "loss.png")


def _draw(
    figure: "Figure", train: list[dict[str, Any]], evals: list[dict[str, Any]], title: str
) -> None:
    top, bottom = figure.subplots(
        2, 1, sharex=True, height_ratios=(5, 1), gridspec_kw={"hspace": 0.1}
    )
    figure.subplots_adjust(left=0.06, right=0.92, top=0.835, bottom=0.105)
    figure.text(0.06, 0.95, title, fontsize=13, fontweight="bold", va="center")
    scale = _tokens_per_step(train)
    _losses(top, train, evals, scale)
    figure.legend(
        frameon=False, loc="center right", bbox_to_anchor=(0.93, 0.95), ncols=2, handlelength=1.6
    )

    steps, rates = _column(train, "step"), _column(train, "learning_rate")
    bottom.plot(steps * scale, rates, color=INK, linewidth=1.2, marker=_marker(train))
    bottom.set_ylim(0, max(np.nanmax(rates, initial=0.0) * 1.5, 1e-12))
    bottom.text(0.995, 0.95, "learning rate", transform=bottom.transAxes, ha="right", va="top")
    bottom.locator_params(axis="y", nbins=2)
    bottom.yaxis.set_major_formatter(
        lambda value, _: np.format_float_scientific(value, trim="-", exp_digits=1) if value else "0"
    )
    bottom.xaxis.set_major_formatter(lambda value, _: _short(value))
    bottom.set_xlabel("tokens" if scale != 1 else "steps")
    bottom.set_xlim(0, max(line["step"] for line in [*train, *evals]) * scale or 1)

    _above(top, [*train, *evals], scale)


def _above(axes: "Axes", lines: list[dict[str, Any]], scale: float) -> None:
    """The second axis: steps where the first counts tokens, and below each the time it took."""
    steps, seconds = (_column(lines, name) for name in ("step", "seconds"))
    order = np.argsort(steps, kind="stable")
    order = order[np.isfinite(seconds[order])]
    steps, seconds = np.append(0, steps[order]), np.append(0.0, seconds[order])
    timed = len(order) > 0
    size, unit = next((row for row in TIME_UNITS if seconds[-1] >= 2 * row[0]), TIME_UNITS[-1])
    named = ["steps"] * (scale != 1) + [unit] * timed
    if not named:
        return

    def tick(step: float, _: object) -> str:
        parts = [_short(step)] if scale != 1 else []
        if timed and step <= steps[-1]:
            parts.append(f"{np.interp(step, steps, seconds) / size:.3g}")
        return "\n".join(parts)

    def steps_of(x: Any) -> Any:
        return x / scale

    def place_of(step: Any) -> Any:
        return step * scale

    above = axes.secondary_xaxis("top", functions=(steps_of, place_of))
    above.set_xlabel(" and ".join(named), labelpad=6)
    above.xaxis.set_major_formatter(tick)
    above.spines["top"].set_visible(False)


def _losses(
    axes: "Axes", train: list[dict[str, Any]], evals: list[dict[str, Any]], scale: float
) -> None:
    x, loss = _column(train, "step") * scale, _column(train, "loss")
    marks, val = _column(evals, "step") * scale, _column(evals, "val_loss")
    places, smooth = _smooth(loss)
    axes.plot(x, loss, color=BLUE, alpha=0.28, linewidth=0.9)
    axes.plot(
        x[places],
        smooth,
        color=BLUE,
        linewidth=1.8,
        solid_capstyle="round",
        marker=_marker(train),
        label="training",
    )
    dots: dict[str, Any] = {
        "marker": "o",
        "markersize": 4.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
    }
    axes.plot(
        marks, val, color=RED, linewidth=1.0, **dots, clip_on=False, zorder=3, label="validation"
    )
    axes.text(0.995, 0.985, "loss (nats per token)", transform=axes.transAxes, ha="right", va="top")
    axes.set_ylim(_range(loss, val))
    _label_ends(axes, [(x[places], smooth, BLUE), (marks, val, RED)])


def _range(loss: np.ndarray, val: np.ndarray) -> tuple[float, float]:
    """Limits that hold the start, the end and the validation, and let a lone spike leave the
    picture."""
    seen = loss[np.isfinite(loss)]
    held = [
        *val[np.isfinite(val)],
        *seen[:1],
        *([seen.min(), np.percentile(seen, 98)] if len(seen) else []),
    ] or [0.0, 1.0]
    margin = max(0.06 * (max(held) - min(held)), 0.1)
    return min(held) - margin, max(held) + margin


def _label_ends(axes: "Axes", curves: list[tuple[np.ndarray, np.ndarray, str]]) -> None:
    """Writes each curve's last value beside its end, pushed apart where the two would overlap."""
    ends = [
        (xs[np.isfinite(ys)][-1], ys[np.isfinite(ys)][-1], color)
        for xs, ys, color in curves
        if np.isfinite(ys).any()
    ]
    low, high = axes.get_ylim()
    gap = 0.052 * (high - low)
    places = [min(end[1], high) for end in ends]
    if len(ends) == 2 and abs(places[0] - places[1]) < gap:
        middle, sign = sum(places) / 2, 1 if places[0] >= places[1] else -1
        places = [middle + sign * gap / 2, middle - sign * gap / 2]
    style: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "center",
        "fontweight": "bold",
        "annotation_clip": False,
    }
    for (x, value, color), y in zip(ends, places, strict=True):
        axes.annotate(f"{value:.3f}", (x, y), (7, 0), color=color, **style)


def _marker(points: list[dict[str, Any]]) -> str:
    """A line of one point is seen only by its marker."""
    return "o" if len(points) == 1 else ""


def _short(value: float) -> str:
    """`0`, `250`, `2.5k`, `1.6M`, `10B`: a tick in as few characters as it takes."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _tokens_per_step(train: list[dict[str, Any]]) -> float:
    """Tokens of one step, from the last line that tells; 1 where none does, and then the axis
    counts steps."""
    known = [line["tokens"] / line["step"] for line in train if line.get("tokens") and line["step"]]
    return known[-1] if known else 1.0


def _column(lines: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([line.get(name, np.nan) for line in lines], dtype=np.float64)


def _smooth(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At up to 500 places, their indices and the mean of a hundredth of the run to each side, less
    at its start.

    The highest and lowest fifths are left out, so a spike does not bend the curve.
    """
    good = np.flatnonzero(np.isfinite(values))
    if not len(good):
        return good, values[good]
    reach = max(len(good) // 100, 2)
    places = np.unique(np.linspace(0, len(good) - 1, 500).astype(int))
    windows = [values[good[i - min(i, reach) : i + min(i, reach) + 1]] for i in places]
    return good[places], np.array(
        [np.sort(w)[len(w) // 5 : len(w) - len(w) // 5].mean() for w in windows]
    )


def _save(figure: "Figure", path: Path) -> Path:
    """Saves through a temporary file, so that a viewer never opens half a picture."""
    part = path.with_name(f".{path.name}.new")
    figure.savefig(part, format="png")
    os.replace(part, path)
    return path
