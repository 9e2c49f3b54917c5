"""The running Python's own modules as text, and a small task to classify: which package a piece of
code comes from."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxformer.data.sources.error_policy import ErrorHandler
from jaxformer.data.sources.reading import SourceFile, python_document
from jaxformer.data.sources.records import Fields, Record

# Tables and texts rather than code, which would be told apart at a glance.
NOT_CODE = ("encodings", "pydoc_data")
PACKAGES = 12
FEWEST_FILES = 7
FEWEST_LINES, MOST_LINES = 10, 40


def standard_library() -> tuple[SourceFile, ...]:
    """The running Python's own modules, without its tests and what was installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    named = sorted((path.relative_to(root).as_posix(), path) for path in found)
    return tuple(SourceFile(path, "python", name) for name, path in named)


def packages() -> tuple[SourceFile, ...]:
    """Its largest packages, to be told apart, as far as they have files enough to hold some out.

    In an order by hash the files of each package lie evenly from 0 to 1.
    """
    found: dict[str, list[SourceFile]] = {}
    for file in standard_library():
        package, _, inner = file.name.partition("/")
        if inner and package not in NOT_CODE:
            found.setdefault(package, []).append(file)
    whole = [files for files in found.values() if len(files) >= FEWEST_FILES]
    whole.sort(key=lambda files: -sum(file.path.stat().st_size for file in files))
    placed = [
        replace(file, format="snippets", place=(rank + 0.5) / len(files))
        for files in whole[:PACKAGES]
        for rank, file in enumerate(sorted(files, key=lambda file: hashed(file.name)))
    ]
    return tuple(sorted(placed, key=lambda file: file.name))


def snippets(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Pieces of 10 to 40 lines of a module with its package's name, which no line that is kept
    contains."""
    package = file.name.partition("/")[0]
    text = "".join(piece for piece, _ in python_document(file, handler))
    lines = [line for line in text.splitlines(keepends=True) if package.lower() not in line.lower()]
    start = number = 0
    while len(lines) - start >= FEWEST_LINES:
        stop = start + FEWEST_LINES + 7 * number % (MOST_LINES - FEWEST_LINES + 1)
        yield "".join(lines[start:stop]), package
        start, number = stop, number + 1


def hashed(name: str) -> float:
    """A number from 0 to 1 that a name alone decides."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
