"""A small task to classify: which package of the standard library a piece of code comes from."""

from collections.abc import Iterator
from pathlib import Path

from jaxformer.data.records import Record

# Tables and texts rather than code, which would be told apart at a glance.
NOT_CODE = ("encodings", "pydoc_data")
PACKAGES = 12
FEWEST_FILES = 7
FEWEST_LINES, MOST_LINES = 10, 40


def largest_packages(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Of the standard library's files those of its largest packages, as far as they have files enough to hold some out."""
    packages: dict[str, list[tuple[str, Path]]] = {}
    for name, path in files:
        package, _, inner = name.partition("/")
        if inner and package not in NOT_CODE:
            packages.setdefault(package, []).append((name, path))
    whole = [found for found in packages.values() if len(found) >= FEWEST_FILES]
    whole.sort(key=lambda found: -sum(path.stat().st_size for _, path in found))
    return sorted(file for found in whole[:PACKAGES] for file in found)


def snippets(text: str, package: str) -> Iterator[Record]:
    """Pieces of 10 to 40 lines of a module with its package's name, which no line that is kept contains."""
    lines = [line for line in text.splitlines(keepends=True) if package.lower() not in line.lower()]
    start = number = 0
    while len(lines) - start >= FEWEST_LINES:
        stop = start + FEWEST_LINES + 7 * number % (MOST_LINES - FEWEST_LINES + 1)
        yield "".join(lines[start:stop]), package
        start, number = stop, number + 1
