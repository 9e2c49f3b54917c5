"""Finds what `data.train` and `data.validation` name, and gives its documents in a fixed order."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.data.reading import BLOCK_BYTES, in_pieces, json_documents, text_documents

# Suffixes that are certainly not text with one document after the other, and what to do about them.
NOT_TEXT = {
    ".json": "write one JSON object on each line of a .jsonl file",
    **dict.fromkeys((".csv", ".tsv", ".parquet", ".arrow", ".feather"), "write the column of text to a .jsonl file"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z"), "unpack it, or compress the text as .gz or .zst"),
    **dict.fromkeys((".bin", ".npy", ".npz", ".pt", ".pdf"), "give the text that it was made from"),
}


class Piece(NamedTuple):
    """A part of a document, the document's name within its source, and whether it ends here."""

    text: str
    document: str
    ends: bool


@dataclass(frozen=True)
class SourceFile:
    """A file, its format, and its name within the source (used only where a file is a document)."""

    path: Path
    format: Literal["text", "jsonl", "python"]
    name: str = ""


@dataclass(frozen=True)
class Source:
    """Files of text in a fixed order; `setting` and `spec` are what the user wrote, for messages."""

    setting: str
    spec: str
    files: tuple[SourceFile, ...]
    text_field: str = "text"

    def __str__(self) -> str:
        return f"{self.setting}={self.spec}"

    def pieces(self) -> Iterator[Piece]:
        """Every document of every file, in order. Raises ConfigError for what cannot be read."""
        count = 0
        for file in self.files:
            if file.format == "text":
                documents = text_documents(file.path)
            elif file.format == "jsonl":
                documents = json_documents(file.path, self.text_field)
            else:
                documents = iter(_python_document(file.path))
            for text, ends in documents:
                yield Piece(text, file.name or str(count), ends)
                count += ends

    def signature(self) -> str:
        """Changes when a file does, as far as its path, size and time of change tell; reads no content."""
        return fingerprint(self.text_field, [(str(f.path), f.format, f.name, *_size_and_time(f.path)) for f in self.files])


def find_source(spec: str, setting: str, text_field: str = "text") -> Source:
    """The files that a setting names: a named source, a file, or a glob. Raises ConfigError where there are none."""
    if spec in NAMED:
        return Source(setting, spec, NAMED[spec](), text_field)
    path = Path(spec).expanduser()
    allowed = (
        f"give a .txt or .jsonl file, plain, .gz or .zst, a glob of them in quotes, or a named source ({', '.join(NAMED)})."
    )
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        raise ConfigError(f'{setting}: {path} is a directory: name its files by a glob, for example "{path}/*.txt".')
    elif glob.has_magic(spec):
        paths = sorted(found for name in glob.glob(str(path), recursive=True) if (found := Path(name)).is_file())
        if not paths:
            raise ConfigError(f"{setting}: no file matches the glob {spec!r} (seen from {os.getcwd()}); {allowed}")
    else:
        raise ConfigError(f"{setting}: {path} does not exist (seen from {os.getcwd()}); {allowed}")
    return Source(setting, spec, tuple(_source_file(found.absolute(), setting) for found in paths), text_field)


def fingerprint(*facts: object) -> str:
    """A short digest of plain facts: numbers, strings, lists of them."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _source_file(path: Path, setting: str) -> SourceFile:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = suffixes[-2] if suffixes[-1:] in ([".gz"], [".zst"]) and len(suffixes) > 1 else "".join(suffixes[-1:])
    if suffix in NOT_TEXT:
        raise ConfigError(f"{setting}: {path} is not a .txt or .jsonl file (plain, .gz or .zst): {NOT_TEXT[suffix]}.")
    return SourceFile(path, "jsonl" if suffix in (".jsonl", ".ndjson") else "text")


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    return status.st_size, status.st_mtime_ns


def _standard_library() -> tuple[SourceFile, ...]:
    """The running Python's own modules, without its tests and what was installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    named = sorted((path.relative_to(root).as_posix(), path) for path in found)
    return tuple(SourceFile(path, "python", name) for name, path in named)


def _python_document(path: Path) -> Iterator[tuple[str, bool]]:
    """A Python file as one document; one that is empty or not UTF-8 is none."""
    try:
        with open(path, encoding="utf-8", newline="", buffering=BLOCK_BYTES) as file:
            text = file.read()
    except UnicodeDecodeError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    if text.strip():
        yield from in_pieces(text)


NAMED = {"stdlib": _standard_library}
