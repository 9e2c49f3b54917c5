"""What a run prints before its first step and after its last, and tables with aligned columns, as
plain text that also reads well in a file."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence

from jaxformer.config.format import printable

WIDTH = 100
INDENT = "  "
# Beside the loss: the title of a metric of an evaluation, and the format of its value.
RESULTS = {
    "val_accuracy": ("accuracy", ".2%"),
    "val_bits_per_byte": ("bits per byte", ".3f"),
    "val_reward_margin": ("reward margin", ".4f"),
    "val_reward_accuracy": ("reward accuracy", ".2%"),
    "val_reward": ("reward", ".4f"),
    "val_kl": ("KL to the reference", ".4f"),
}
# What a loss is of that is not of targets, by a metric that is beside it.
LOSS_UNITS = {
    "reward_margin": "per pair",
    "reward_desirable": "per completion",
    "reward": "per answer",
}


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns; the columns numbered in `right` are
    aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def banner(summary: Mapping[str, str | Sequence[str]], title: str = "jaxformer") -> str:
    """Return a title and two aligned columns, names and values; a value of several lines stays in
    its column."""
    margin = max((len(name) for name in summary), default=0)
    width = WIDTH - margin - 2 * len(INDENT)
    lines = [title]
    for name, value in summary.items():
        # A value that is longer than its column goes on below itself.
        for paragraph in [value] if isinstance(value, str) else value:
            wrapped = textwrap.wrap(
                paragraph, width, break_long_words=False, break_on_hyphens=False
            )
            for line in wrapped or [""]:
                lines.append(f"{INDENT}{name:<{margin}}{INDENT}{line}".rstrip())
                name = ""  # only the first line has it
    return "\n".join(lines)


def framed(text: str) -> str:
    """Return a text of a model behind a bar, in lines that fit the width."""
    lines = []
    for row in printable(text).strip("\n").split("\n"):
        for line in textwrap.wrap(row, WIDTH - 4, drop_whitespace=False) or [""]:
            lines.append(f"{INDENT}| {line}".rstrip())
    return "\n".join(lines)


def result_lines(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return what an evaluation found, by what it is; empty where it has no loss."""
    if "val_loss" not in metrics:
        return {}
    loss = metrics["val_loss"]
    for name, unit in LOSS_UNITS.items():
        if f"val_{name}" in metrics:
            text = f"{loss:.4f} {unit}"
            break
    else:
        value = math.inf
        if not loss >= 700:  # exp overflows beyond 709
            value = math.exp(loss)
        perplexity = f"{value:.2g}" if value >= 1e6 else f"{value:,.1f}"
        text = f"{loss:.4f} nats per target (perplexity {perplexity})"
    lines = {"validation loss": text}
    for name, (title, style) in RESULTS.items():
        if name in metrics:
            lines[title] = format(metrics[name], style)
    # The accuracies of heads beside the first, by the names of the heads.
    for name, value in metrics.items():
        head, is_accuracy, _ = name.removeprefix("val_").partition("_accuracy")
        if is_accuracy and name not in RESULTS:
            lines[f"{head.replace('_', '-')} accuracy"] = f"{value:.2%}"
    return lines
