"""What a run prints before its first step and after its last, and tables with aligned columns, as
plain text that also reads well in a file."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence

from jaxformer.config.format import human_time, printable

WIDTH = 100
INDENT = "  "


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of cells as lines with aligned columns; the columns numbered in `right` are aligned to
    the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def banner(summary: Mapping[str, str | Sequence[str]], title: str = "jaxformer") -> str:
    """A title and two aligned columns, names and values; a value of several lines stays in its
    column."""
    margin = max((len(name) for name in summary), default=0)
    width = WIDTH - margin - 2 * len(INDENT)
    lines = [title]
    for name, value in summary.items():
        for paragraph in [value] if isinstance(value, str) else value:
            wrapped = textwrap.wrap(
                paragraph, width, break_long_words=False, break_on_hyphens=False
            )
            for line in wrapped or [""]:
                lines.append(f"{INDENT}{name:<{margin}}{INDENT}{line}".rstrip())
                name = ""  # only the first line has it
    return "\n".join(lines)


def closing(
    *,
    seconds: float,
    results: Mapping[str, str],
    bits_per_byte: float | None,
    gzip_bits_per_byte: float | None,
    sample: tuple[str, str] | None,
    run_dir: str,
    next_command: str,
) -> str:
    """The last lines of a run: how well it predicts held-out text, a sample (prompt, continuation),
    and the next command.

    `results` are texts by name, as of `loss_text`. `gzip_bits_per_byte` is the size that `gzip -9`
    reaches on the same held-out bytes.
    """
    summary = dict(results)
    if bits_per_byte is not None:
        beside_gzip = _beside_gzip(bits_per_byte, gzip_bits_per_byte)
        summary["bits per byte"] = f"{bits_per_byte:.3f}{beside_gzip}"
    summary |= {"run directory": run_dir, "next": next_command}
    text = banner(summary, title=f"Done in {human_time(seconds)}")
    if sample is None:
        return text
    lines = ["Sample"]
    for row in printable("".join(sample)).strip("\n").split("\n"):
        for line in textwrap.wrap(row, WIDTH - 4, drop_whitespace=False) or [""]:
            lines.append(f"{INDENT}| {line}".rstrip())
    return "\n".join([*lines, "", text])


def loss_text(loss: float) -> str:
    """A loss in nats per target, and its perplexity."""
    value = math.inf if loss >= 700 else math.exp(loss)
    perplexity = f"{value:.2g}" if value >= 1e6 else f"{value:,.1f}"
    return f"{loss:.4f} nats per target (perplexity {perplexity})"


def _beside_gzip(bits: float, gzip_bits: float | None) -> str:
    if not gzip_bits:
        return ""
    difference = bits / gzip_bits - 1
    verdict = f"{abs(difference):.0%} {'fewer' if difference < 0 else 'more'}"
    if math.isnan(difference):
        verdict = "not comparable"
    return f" ({verdict} than gzip -9's {gzip_bits:.3f} on the same text)"
