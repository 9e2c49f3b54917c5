"""Numbers and text as people read them."""

import math
from collections.abc import Callable, Sequence


def human_count(number: float) -> str:
    """`4,096`, `12.3k`, `123.6M`, `1.1B`, `15.0T`: a count in at most seven characters."""
    if not math.isfinite(number):
        return str(number)
    if abs(number) < 9_999.5:
        return f"{number:,.0f}"
    return _in_units(number, 1000, ("k", "M", "B", "T"))


def human_bytes(number: float) -> str:
    """`812 B`, `1.5 GiB`: an amount of memory in powers of 1024."""
    if abs(number) < 1023.5:
        return f"{number:.0f} B"
    return _in_units(number, 1024, (" KiB", " MiB", " GiB", " TiB"))


def _in_units(number: float, base: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        number /= base
        if abs(number) < base - 0.05:
            return f"{number:.1f}{unit}"
    return f"{number / base:,.1f}{units[-1]}"


def human_time(seconds: float) -> str:
    """`250 ms`, `3.2 s`, `1 min 20 s`, `3 h 05 min`, `2 d 4 h`: a duration in its two largest
    units; `?` if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def printable(text: str) -> str:
    """Text that is safe on a terminal: control characters, which a model may generate, are replaced
    by U+FFFD."""
    lines = text.replace("\r\n", "\n").expandtabs(4)
    return _with_replaced(lines, lambda _: "\N{REPLACEMENT CHARACTER}")


def escaped(text: str) -> str:
    """Text with every character that is not printable, other than line breaks, as its escape, such
    as `\\x1b`, so that the text of a downloaded file cannot move the cursor or change the terminal.
    """
    return _with_replaced(text, lambda char: ascii(char)[1:-1])


def _with_replaced(text: str, replacement: Callable[[str], str]) -> str:
    """Return a text with something else for each character that is not printable, but for line
    breaks."""
    characters = []
    for char in text:
        if char != "\n" and not char.isprintable():
            char = replacement(char)
        characters.append(char)
    return "".join(characters)
