"""What a run says before its first step and after its last, as plain text that also reads well in a
file."""

import math
import textwrap
from collections.abc import Mapping, Sequence

from jaxformer.report.format import human_time, printable

WIDTH = 100
INDENT = "  "


def banner(summary: Mapping[str, str | Sequence[str]], title: str = "jaxformer") -> str:
    """A title and two aligned columns, names and facts; a fact of several lines stays in its
    column."""
    margin = max((len(name) for name in summary), default=0)
    lines = [title]
    for name, value in summary.items():
        paragraphs = [value] if isinstance(value, str) else value
        wrapped = [
            line
            for text in paragraphs
            for line in _wrap(text, WIDTH - margin - 2 * len(INDENT)) or [""]
        ]
        heads = [name] + [""] * (len(wrapped) - 1)
        lines += [
            f"{INDENT}{head:<{margin}}{INDENT}{line}".rstrip()
            for head, line in zip(heads, wrapped, strict=True)
        ]
    return "\n".join(lines)


def closing(
    *,
    seconds: float,
    val_loss: float | None,
    bits_per_byte: float | None,
    accuracy: float | None = None,
    gzip_bits_per_byte: float | None,
    sample: tuple[str, str] | None,
    run_dir: str,
    next_command: str,
) -> str:
    """The end of a run in plain text: how well it predicts held-out text, a sample (prompt,
    continuation), what to do next.

    `val_loss` is in nats per target, None where nothing was held out. `gzip_bits_per_byte` is that
    of `gzip -9` on the same held-out bytes.
    """
    summary: dict[str, str | Sequence[str]] = {}
    if val_loss is not None:
        summary["validation loss"] = (
            f"{val_loss:.4f} nats per target (perplexity {_perplexity(val_loss)})"
        )
    if accuracy is not None:
        summary["accuracy"] = f"{accuracy:.2%} of the held-out targets"
    if bits_per_byte is not None:
        summary["bits per byte"] = (
            f"{bits_per_byte:.3f}{_beside_gzip(bits_per_byte, gzip_bits_per_byte)}"
        )
    summary |= {"run directory": run_dir, "next": next_command}
    blocks = [banner(summary, title=f"Done in {human_time(seconds)}")]
    if sample is not None:
        blocks.insert(0, _quote("Sample", printable("".join(sample))))
    return "\n\n".join(blocks)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _perplexity(loss: float) -> str:
    value = math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
    return f"{value:,.1f}" if value < 1e6 else f"{value:.2g}"


def _beside_gzip(bits: float, gzip_bits: float | None) -> str:
    if gzip_bits is None or not gzip_bits:
        return ""
    share = bits / gzip_bits
    verdict = (
        f"{1 - share:.0%} fewer"
        if share < 1
        else f"{share - 1:.0%} more"
        if share >= 1
        else "not comparable"
    )
    return f" ({verdict} than gzip -9's {gzip_bits:.3f} on the same text)"


def _quote(title: str, text: str) -> str:
    lines = [
        line
        for row in text.strip("\n").split("\n")
        for line in textwrap.wrap(row, WIDTH - 4, drop_whitespace=False) or [""]
    ]
    return "\n".join([title, *(f"{INDENT}| {line}".rstrip() for line in lines)])
