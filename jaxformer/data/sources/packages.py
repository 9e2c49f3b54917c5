"""Named sources for demonstrations: the modules of the running Python as text, and a small task
to classify, which package a piece of code comes from.

`NAMED_SOURCES` is all that the other files know. A row gives the files of a source, and raises
ConfigError where they do not hold the fields that are asked for; `NAMED_TEXTS` and `NAMED_RECORDS`
read the formats of these files.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxformer.data.sources.documents import TextPiece, in_pieces
from jaxformer.data.sources.error_policy import ErrorHandler
from jaxformer.data.sources.reading import READ_BYTES, SourceFile, hashed, is_blank, unreadable
from jaxformer.data.sources.records import Fields, Record, is_text
from jaxformer.files import ConfigError

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Tables and texts rather than code, which would be told apart at a glance.
NOT_CODE = ("encodings", "pydoc_data")
PACKAGES = 12
FEWEST_FILES = 7
FEWEST_LINES, MOST_LINES = 10, 40


def standard_library(where: str, fields: Fields) -> tuple[SourceFile, ...]:
    """The running Python's own modules, without its tests and installed packages."""
    if fields and not is_text(fields):
        wanted = " and ".join(map(str, fields))
        raise ConfigError(f"{where} is plain text, and data.objective needs records of {wanted}.")
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        found |= {path.relative_to(root).as_posix(): path for path in paths}
    return tuple(
        SourceFile(path, "python", name, place=hashed(name)) for name, path in sorted(found.items())
    )


def packages(where: str, fields: Fields) -> tuple[SourceFile, ...]:
    """The files of its largest packages that have enough files to hold some out.

    In the order by hash the files of each package are spread evenly from 0 to 1.
    """
    if [field.kind for field in fields] != ["text", "label"]:
        remedy = "set data.objective=classes (model.head=classes)"
        raise ConfigError(f"{where} holds pieces of code and their packages: {remedy}.")
    found: dict[str, list[SourceFile]] = {}
    for file in standard_library(where, ()):
        package, _, inner = file.name.partition("/")
        if inner and package not in NOT_CODE:
            found.setdefault(package, []).append(file)
    whole = [files for files in found.values() if len(files) >= FEWEST_FILES]
    whole.sort(key=lambda files: -sum(file.path.stat().st_size for file in files))
    placed = []
    for files in whole[:PACKAGES]:
        for rank, file in enumerate(sorted(files, key=lambda file: hashed(file.name))):
            place, order = (rank + 0.5) / len(files), "files of each package"
            placed.append(replace(file, format="snippets", place=place, order=order))
    return tuple(sorted(placed, key=lambda file: file.name))


def python_document(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """A Python file as one document; one that is not UTF-8 is skipped."""
    try:
        with open(file.path, encoding="utf-8", newline="", buffering=READ_BYTES) as opened:
            text = opened.read()
    except UnicodeDecodeError:
        handler.skipped.add("files that are not UTF-8", str(file.path))
        return
    except OSError as error:
        raise unreadable(file.path, error) from None
    if is_blank(text):
        handler.blank(str(file.path))
    else:
        yield from in_pieces(text)


def snippets(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Pieces of 10 to 40 lines of a module, without those that name its package, and the name."""
    package = file.name.partition("/")[0]
    text = "".join(piece for piece, _ in python_document(file, handler))
    lines = [line for line in text.splitlines(keepends=True) if package.lower() not in line.lower()]
    start = number = 0
    while len(lines) - start >= FEWEST_LINES:
        stop = start + FEWEST_LINES + 7 * number % (MOST_LINES - FEWEST_LINES + 1)
        yield "".join(lines[start:stop]), package
        start, number = stop, number + 1


NAMED_SOURCES = {"stdlib": standard_library, "stdlib_packages": packages}
NAMED_TEXTS = {"python": python_document}
NAMED_RECORDS = {"snippets": snippets}
