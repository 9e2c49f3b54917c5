"""`loss.png`: the loss curves of a run, drawn from its metrics."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.files import ConfigError, located, replacing
from jaxformer.report.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = list[dict[str, Any]]

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
    """Draws training loss, validation loss and learning rate over tokens into loss.png.

    Raises ConfigError where no loss is logged.
    """
    lines = read_metrics(run_dir)
    train = [line for line in lines if "loss" in line]
    evals = [line for line in lines if "val_loss" in line]
    if not train and not evals:
        raise ConfigError(
            f"{run_dir} holds no loss to plot: let the run reach its first logged step"
            " (train.log_every)."
        )

    import matplotlib

    path = located(run_dir) / "loss.png"
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), dpi=160, facecolor="white")
        _draw(figure, train, evals, located(run_dir).resolve().name)
        with replacing(path, follow=False) as file:
            figure.savefig(file, format="png")
    return path


def _draw(figure: "Figure", train: Lines, evals: Lines, title: str) -> None:
    """Two panels over one axis of tokens: the losses, and below them the learning rate."""
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    figure.subplots_adjust(left=0.06, right=0.92, top=0.835, bottom=0.105, hspace=0.1)
    figure.text(0.06, 0.95, title, fontsize=13, fontweight="bold", va="center")
    tokens_per_step = [
        line["tokens"] / line["step"]
        for line in train
        if line.get("tokens", 0) >= 1 and line["step"]
    ]
    scale = tokens_per_step[-1] if tokens_per_step else 1.0  # without tokens the axis counts steps
    _losses(top, train, evals, scale)
    legend: dict[str, Any] = {"loc": "center right", "bbox_to_anchor": (0.93, 0.95)}
    figure.legend(frameon=False, ncols=2, handlelength=1.6, **legend)

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


def _above(axes: "Axes", lines: Lines, scale: float) -> None:
    """Adds the axis at the top: steps, where the lower axis counts tokens, and elapsed time."""
    steps, seconds = _column(lines, "step"), _column(lines, "seconds")
    order = np.argsort(steps, kind="stable")
    order = order[np.isfinite(seconds[order])]
    steps, seconds = np.append(0, steps[order]), np.append(0.0, seconds[order])
    timed = len(order) > 0
    size, unit = next((row for row in TIME_UNITS if seconds[-1] >= 2 * row[0]), TIME_UNITS[-1])
    names = ["steps"] if scale != 1 else []
    if timed:
        names.append(unit)
    if not names:
        return

    def tick(step: float, _: object) -> str:
        labels = [_short(step)] if scale != 1 else []
        if timed and step <= steps[-1]:
            labels.append(f"{np.interp(step, steps, seconds) / size:.3g}")
        return "\n".join(labels)

    def to_steps(x: Any) -> Any:
        return x / scale

    def from_steps(step: Any) -> Any:
        return step * scale

    above = axes.secondary_xaxis("top", functions=(to_steps, from_steps))
    above.set_xlabel(" and ".join(names), labelpad=6)
    above.xaxis.set_major_formatter(tick)
    above.spines["top"].set_visible(False)


def _losses(axes: "Axes", train: Lines, evals: Lines, scale: float) -> None:
    x, loss = _column(train, "step") * scale, _column(train, "loss")
    marks, val = _column(evals, "step") * scale, _column(evals, "val_loss")
    centers, smooth = smoothed(loss)
    line: dict[str, Any] = {"solid_capstyle": "round", "marker": _marker(train)}
    dots: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white"}
    dots |= {"markeredgewidth": 0.8, "clip_on": False, "zorder": 3}
    axes.plot(x, loss, color=BLUE, alpha=0.28, linewidth=0.9)
    axes.plot(x[centers], smooth, color=BLUE, linewidth=1.8, label="training", **line)
    axes.plot(marks, val, color=RED, linewidth=1.0, label="validation", **dots)
    unit = "per pair" if any("reward_margin" in line for line in train) else "nats per token"
    axes.text(0.995, 0.985, f"loss ({unit})", transform=axes.transAxes, ha="right", va="top")
    axes.set_ylim(_range(loss, val))
    _label_ends(axes, [(x[centers], smooth, BLUE), (marks, val, RED)])


def _range(loss: np.ndarray, val: np.ndarray) -> tuple[float, float]:
    """Limits that include the start, the end and the validation loss, but not a single spike."""
    seen = loss[np.isfinite(loss)]
    shown = [*val[np.isfinite(val)], *seen[:1]]
    shown += [seen.min(), np.percentile(seen, 98)] if len(seen) else []
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    margin = max(0.06 * (high - low), 0.1)
    return low - margin, high + margin


def _label_ends(axes: "Axes", curves: list[tuple[np.ndarray, np.ndarray, str]]) -> None:
    """Writes the last value of each curve beside its end, and moves two labels apart that would
    overlap."""
    ends = []
    for xs, ys, color in curves:
        if (good := np.isfinite(ys)).any():
            ends.append((xs[good][-1], ys[good][-1], color))
    low, high = axes.get_ylim()
    gap = 0.052 * (high - low)
    heights = [min(y, high) for _, y, _ in ends]
    if len(ends) == 2 and abs(heights[0] - heights[1]) < gap:
        middle, sign = sum(heights) / 2, 1 if heights[0] >= heights[1] else -1
        heights = [middle + sign * gap / 2, middle - sign * gap / 2]
    style: dict[str, Any] = {"va": "center", "fontweight": "bold", "annotation_clip": False}
    for (x, value, color), y in zip(ends, heights, strict=True):
        label, offset = f"{value:.3f}", (7, 0)
        axes.annotate(label, (x, y), offset, textcoords="offset points", color=color, **style)


def _marker(points: Lines) -> str:
    """The marker of a curve, which a curve of one point needs to be visible."""
    return "o" if len(points) == 1 else ""


def _short(value: float) -> str:
    """The short label of a tick: `0`, `250`, `2.5k`, `1.6M`, `10B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _column(lines: Lines, name: str) -> np.ndarray:
    return np.array([line.get(name, np.nan) for line in lines], dtype=np.float64)


def smoothed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of up to 500 values, and a smoothed value at each: int64 and float64 [points].

    It is the mean over a window of a hundredth of the run to each side, narrower at the start, in
    which the highest and lowest fifths are left out, so that a spike does not bend the curve. NaN
    and infinite values are skipped.
    """
    good = np.flatnonzero(np.isfinite(values))
    if not len(good):
        return good, values[good]
    reach = max(len(good) // 100, 2)
    centers = np.unique(np.linspace(0, len(good) - 1, 500).astype(int))
    means = []
    for center in centers:
        near = min(center, reach)
        window = np.sort(values[good[center - near : center + near + 1]])
        cut = len(window) // 5
        means.append(window[cut : len(window) - cut].mean())
    return good[centers], np.array(means)
