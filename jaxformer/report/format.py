"""Numbers and text as people read them."""

import math


def human_count(number: float) -> str:
    """`4,096`, `12.3k`, `123.6M`, `1.1B`, `15.0T`: a count in at most seven characters."""
    if not math.isfinite(number):
        return str(number)
    if abs(number) < 9_999.5:
        return f"{number:,.0f}"
    for unit in ("k", "M", "B"):
        number /= 1000
        if abs(number) < 999.95:
            return f"{number:.1f}{unit}"
    return f"{number / 1000:,.1f}T"


def human_bytes(number: float) -> str:
    """`812 B`, `1.5 GiB`: an amount of memory in powers of 1024."""
    if abs(number) < 1023.5:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if abs(number) < 1023.95:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def human_time(seconds: float) -> str:
    """`250 ms`, `3.2 s`, `1 min 20 s`, `3 h 05 min`, `2 d 4 h`: a duration in its two largest
    units; `?` if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def printable(text: str) -> str:
    """Text that is safe on a terminal: control characters, which a model may well emit, become the
    replacement mark."""
    lines = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(
        char if char == "\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for char in lines
    )
