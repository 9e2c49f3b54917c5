"""`loss.png`: the loss curves of a run, drawn from its metrics."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.files import ConfigError, replacing
from jaxformer.report.banner import LOSS_UNITS
from jaxformer.report.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE = "#2f6db5"
RED = "#c8502b"
INK = "#33373d"
FAINT = "#d9dce1"
LARGEST_DRAWN = 1e300
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#eceef1",
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def plot_losses(run_dir: Path) -> Path:
    """Draw training loss, validation loss and learning rate over tokens into loss.png."""
    lines = read_metrics(run_dir)
    if not any("loss" in line or "val_loss" in line for line in lines):
        raise ConfigError(
            f"{run_dir} holds no loss to plot: let the run reach its first logged step"
            " (train.log_every)."
        )

    path = run_dir / "loss.png"
    with panels(path, (8, 5), (5, 1)) as (top, bottom):
        draw_curve(top, lines, "loss", "training", BLUE)
        draw_curve(top, lines, "val_loss", "validation", RED)
        # The first losses are far above all others, and would flatten the rest.
        top.set_ylim(*limits(np.append(column(lines, "loss"), column(lines, "val_loss"))))
        top.set_title(run_dir.resolve().name, loc="left", fontweight="bold")
        logged = set[str]().union(*lines)
        unit = "nats per token"
        for name in logged.intersection(LOSS_UNITS):
            unit = LOSS_UNITS[name]
        top.set_ylabel(f"loss ({unit})")
        top.legend(loc="upper right")
        draw_curve(bottom, lines, "learning_rate", "", INK)
        bottom.set_ylabel("learning rate")
        bottom.yaxis.set_major_formatter("{x:g}")
        bottom.set_xlabel("tokens" if "tokens" in logged else "steps")
    return path


@contextlib.contextmanager
def panels(
    path: Path, size: tuple[float, float], heights: tuple[float, float]
) -> Iterator[tuple["Axes", "Axes"]]:
    """Yield two panels, one above the other over the same tokens, which are written as a PNG at the
    end of the block."""
    import matplotlib  # takes 0.2 s, and a run needs it once, at its end
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150)
        # Not a constrained layout, in which the labels of giant numbers leave no room for curves.
        figure.subplots_adjust(left=0.1, right=0.97, top=0.93, bottom=0.1, hspace=0.1)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        yield top, bottom
        bottom.xaxis.set_major_formatter(EngFormatter(sep=""))
        with replacing(path, follow=False) as file:
            figure.savefig(file, format="png")


def draw_curve(
    axes: "Axes", lines: list[dict[str, Any]], name: str, label: str, color: str
) -> None:
    """Draw a quantity of metrics.jsonl over tokens, or over steps where no line has tokens: of
    more than a hundred values the smoothed curve over a faint one. The last value is in the
    legend."""
    # Lines of evaluations have a step and no tokens, of which every step has as many.
    counted = [line["tokens"] / line["step"] for line in lines if line.get("tokens")]
    scale = 1.0
    if counted:
        scale = counted[-1]
    # [points]
    lines = [line for line in lines if name in line]
    values = column(lines, name)
    good = np.isfinite(values)
    # Beyond it matplotlib's ticks overflow.
    x = np.clip(column(lines, "step")[good] * scale, -LARGEST_DRAWN, LARGEST_DRAWN)
    values = np.clip(values[good], -LARGEST_DRAWN, LARGEST_DRAWN)
    if len(values) and label:
        label = f"{label} {values[-1]:.4f}"
    marker = ""
    if len(values) < 30:
        marker = "o"
    # Fewer points show no noise that hides the curve.
    if len(values) > 100:
        axes.plot(x, values, color=color, alpha=0.25, linewidth=0.8)
        values = smoothed(values)
    axes.plot(x, values, color=color, linewidth=1.6, marker=marker, markersize=3, label=label)


def column(lines: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return a quantity of lines of metrics.jsonl, float64 [lines], NaN where a line does not have
    it."""
    return np.array([line.get(name, np.nan) for line in lines], dtype=np.float64)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the median of each value with its neighbors, a hundredth of them to each side,
    [points]: a single spike does not bend it."""
    reach = max(len(values) // 100, 2)
    padded = np.pad(values, reach, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    return np.median(windows, axis=1)


def limits(losses: np.ndarray) -> tuple[float, float]:
    """Return the lowest and highest loss to show: all but the highest fiftieth, with a margin."""
    losses = np.clip(losses[np.isfinite(losses)], -LARGEST_DRAWN, LARGEST_DRAWN)
    if not len(losses):
        return 0.0, 1.0
    low = float(losses.min())
    high = float(np.percentile(losses, 98))
    margin = max(0.06 * (high - low), 0.1)
    return low - margin, high + margin
