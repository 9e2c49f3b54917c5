"""Finds what `data.train` and `data.validation` name, and gives its documents in a fixed order."""

import functools
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.data.packages import largest_packages, snippets
from jaxformer.data.reading import BLOCK_BYTES, TextPiece, in_pieces, text_documents
from jaxformer.data.records import Field, Fields, Record, json_records, parallel_records, tsv_records

# Suffixes that are certainly not text with one document after the other, and what to do about them.
NOT_TEXT = {
    ".json": "write one JSON object on each line of a .jsonl file",
    **dict.fromkeys((".csv", ".parquet", ".arrow", ".feather"), "write the columns to a .tsv or .jsonl file"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z"), "unpack it, or compress the text as .gz or .zst"),
    **dict.fromkeys((".bin", ".npy", ".npz", ".pt", ".pdf"), "give the text that it was made from"),
}


# A source of one field gives documents of text; one of several gives records.
TEXT: Fields = (Field("data.text_field", "text", "text"),)

Format = Literal["text", "python", "jsonl", "tsv", "parallel", "snippets"]
TEXTS = ("text", "python")


class Piece(NamedTuple):
    """A part of a document, the document's name within its source, and whether it ends here.

    A record is one piece: its fields, and its texts and words joined by line breaks.
    """

    text: str
    document: str
    ends: bool
    record: Record = ()


@dataclass(frozen=True)
class SourceFile:
    """A file, its format, its name within the source (used where a file is a document), and the files that run beside it."""

    path: Path
    format: Format
    name: str = ""
    beside: tuple[Path, ...] = ()

    def documents(self) -> Iterator[TextPiece]:
        """The documents of a file of text, in pieces."""
        return text_documents(self.path) if self.format == "text" else _python_document(self.path)

    def records(self, fields: Fields) -> Iterator[Record]:
        """The fields of each record of a file of records."""
        if self.format == "snippets":
            text = "".join(piece for piece, _ in self.documents())
            return snippets(text, self.name.partition("/")[0])
        return RECORDS[self.format]((self.path, *self.beside), fields)


@dataclass(frozen=True)
class Source:
    """Files in a fixed order; `setting` and `spec` are what the user wrote, for messages."""

    setting: str
    spec: str
    files: tuple[SourceFile, ...]
    fields: Fields = TEXT

    def __str__(self) -> str:
        return f"{self.setting}={self.spec}"

    @property
    def of_records(self) -> bool:
        return len(self.fields) > 1

    def pieces(self) -> Iterator[Piece]:
        """Every document or record of every file, in order. Raises ConfigError for what cannot be read."""
        count = 0
        for file in self.files:
            for piece in self._records(file) if self.of_records else self._documents(file):
                yield piece._replace(document=file.name or str(count))
                count += piece.ends

    def _documents(self, file: SourceFile) -> Iterator[Piece]:
        if file.format not in TEXTS:
            texts = (str(text) for (text,) in file.records(self.fields))
            return (Piece(piece, "", ends) for text in texts if text.strip() for piece, ends in in_pieces(text))
        return (Piece(text, "", ends) for text, ends in file.documents())

    def _records(self, file: SourceFile) -> Iterator[Piece]:
        shown = [index for index, field in enumerate(self.fields) if field.kind in ("text", "words")]
        for record in file.records(self.fields):
            texts = (record[index] for index in shown)
            yield Piece("\n".join(text if isinstance(text, str) else " ".join(text) for text in texts), "", True, record)

    @property
    def order(self) -> str:
        """In words, what `place` puts in order."""
        return "files of each package" if self._places else "documents"

    def place(self, document: str) -> float:
        """Where a document comes in an order by hash, from 0 to 1; pieces of code among the files of their own package."""
        return self._places.get(document, _hashed(document))

    @functools.cached_property
    def _places(self) -> dict[str, float]:
        packages: dict[str, list[str]] = {}
        for file in sorted(self.files, key=lambda file: _hashed(file.name)):
            if file.format == "snippets":
                packages.setdefault(file.name.partition("/")[0], []).append(file.name)
        return {name: (rank + 0.5) / len(names) for names in packages.values() for rank, name in enumerate(names)}

    def signature(self) -> str:
        """Changes when a file does, as far as its path, size and time of change tell; reads no content."""
        files = [(str(f.path), f.format, f.name, *map(_size_and_time, (f.path, *f.beside))) for f in self.files]
        return fingerprint(self.fields, files)


def find_source(spec: str, setting: str, fields: Fields = TEXT) -> Source:
    """What a setting names: a named source, a file, a glob, or line-aligned files by braces ('train.{de,en}.gz').

    Raises ConfigError where there are none, or they do not hold the fields that are asked for.
    """
    if spec in NAMED:
        files: tuple[SourceFile, ...] = NAMED[spec]()
    elif (group := re.search(r"\{([^{}]*,[^{}]*)\}", spec)) and not Path(spec).exists():
        sides = [_paths(spec[: group.start()] + name + spec[group.end() :], setting) for name in group[1].split(",")]
        if len({len(paths) for paths in sides}) > 1:
            raise ConfigError(
                f"{setting}: {spec} finds {' and '.join(str(len(paths)) for paths in sides)} files: give as many."
            )
        files = tuple(SourceFile(first.absolute(), "parallel", "", tuple(rest)) for first, *rest in zip(*sides, strict=True))
    else:
        files = tuple(_source_file(found.absolute(), setting) for found in _paths(spec, setting))
    for file in files:
        _check(file, f"{setting}={spec}", fields)
    return Source(setting, spec, files, fields)


def _paths(spec: str, setting: str) -> list[Path]:
    path = Path(spec).expanduser()
    allowed = (
        f"give a .txt, .jsonl or .tsv file, plain, .gz or .zst, a glob of them in quotes, line-aligned files as in "
        f"'train.{{de,en}}', or a named source ({', '.join(NAMED)})."
    )
    if path.is_file():
        return [path]
    if path.is_dir():
        raise ConfigError(f'{setting}: {path} is a directory: name its files by a glob, for example "{path}/*.txt".')
    if not glob.has_magic(spec):
        raise ConfigError(f"{setting}: {path} does not exist (seen from {os.getcwd()}); {allowed}")
    paths = sorted(found for name in glob.glob(str(path), recursive=True) if (found := Path(name)).is_file())
    if not paths:
        raise ConfigError(f"{setting}: no file matches the glob {spec!r} (seen from {os.getcwd()}); {allowed}")
    return paths


def _check(file: SourceFile, where: str, fields: Fields) -> None:
    """Raises ConfigError where a file's format cannot hold the fields."""
    wanted = " and ".join(f"{field.kind} ({field.setting}={field.name})" for field in fields)
    if file.format in TEXTS and len(fields) > 1:
        raise ConfigError(
            f"{where}: {file.path} is plain text, and data.objective needs records of {wanted}: give a .jsonl or .tsv file "
            "with these fields, or line-aligned files as in 'train.{de,en}'."
        )
    if file.format == "parallel" and len(file.beside) + 1 != len(fields):
        raise ConfigError(
            f"{where} names {len(file.beside) + 1} line-aligned files, and data.objective takes {len(fields)}: {wanted}."
        )
    if file.format == "snippets" and [field.kind for field in fields] != ["text", "label"]:
        raise ConfigError(
            f"{where} holds pieces of code and their packages: set data.objective=classes (model.head=classes)."
        )


def _hashed(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(*facts: object) -> str:
    """A short digest of plain facts: numbers, strings, lists of them."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _source_file(path: Path, setting: str) -> SourceFile:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = suffixes[-2] if suffixes[-1:] in ([".gz"], [".zst"]) and len(suffixes) > 1 else "".join(suffixes[-1:])
    if suffix in NOT_TEXT:
        raise ConfigError(f"{setting}: {path} is not a .txt, .jsonl or .tsv file (plain, .gz or .zst): {NOT_TEXT[suffix]}.")
    return SourceFile(path, FORMATS.get(suffix, "text"))


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


def _packages() -> tuple[SourceFile, ...]:
    """Its largest packages, to be told apart."""
    files = largest_packages([(file.name, file.path) for file in _standard_library()])
    return tuple(SourceFile(path, "snippets", name) for name, path in files)


def _python_document(path: Path) -> Iterator[TextPiece]:
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


NAMED = {"stdlib": _standard_library, "stdlib_packages": _packages}
FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv"}
RECORDS = {"jsonl": json_records, "tsv": tsv_records, "parallel": parallel_records}
