"""Tables as people read them."""

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of cells as lines with aligned columns, those numbered in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = []
        for number, (cell, width) in enumerate(zip(line, widths, strict=True)):
            cells.append(cell.rjust(width) if number in right else cell.ljust(width))
        shown.append("  ".join(cells).rstrip())
    return shown
