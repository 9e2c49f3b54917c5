"""A source: files in a fixed order, found by what a setting names, and the documents or records
that they hold."""

import collections
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from jaxformer.config.run import Malformed
from jaxformer.data.sources.records import (
    Fields,
    Record,
    RecordField,
    column_records,
    is_text,
    json_records,
    parallel_records,
    readable,
    tsv_records,
)
from jaxformer.data.sources.remote_files import files_below, matching_files
from jaxformer.data.sources.source_files import (
    PACKED,
    PYTHON,
    ErrorHandler,
    Skipped,
    SourceFile,
    TextPiece,
    Version,
    in_pieces,
    python_document,
    text_documents,
    unreadable,
)
from jaxformer.files import ConfigError, is_remote, located
from jaxformer.files.copies import local_copies

# The suffixes that a directory is searched for, and their formats. A file that is named by itself
# or by a glob may also be text of another suffix.
FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".tsv": "tsv",
    ".parquet": "parquet",
}

# Suffixes of files that are certainly not text.
NOT_TEXT = re.compile(r"\.(json|csv|arrow|feather|zip|tar|tgz|bz2|xz|7z|npz|pt|pdf|bin|npy)")

# Files and, of those of a URL, their versions.
Matches = Mapping[Path, Version | None]

HUB = "datasets:"
# The running Python's own modules, without its tests and installed packages.
STDLIB = "stdlib"
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

ALLOWED = (
    "give a .txt, .jsonl, .tsv or .parquet file (plain, .gz or .zst), a directory or a glob of"
    " them in quotes, token ids in a .npy or .bin file, line-aligned files as in"
    f" 'train.{{de,en}}', 'datasets:NAME', or {STDLIB}."
)

# A source of this field gives documents of text; one of others gives records.
TEXT: Fields = (RecordField("data.text_field", "text", "text"),)

# What reads a file, by its format.
TEXTS: dict[str, Callable[[SourceFile, ErrorHandler], Iterator[TextPiece]]] = {
    "text": text_documents,
    PYTHON: python_document,
}
RECORDS: dict[str, Callable[[SourceFile, Fields, ErrorHandler], Iterator[Record]]] = {
    "jsonl": json_records,
    "tsv": tsv_records,
    "parallel": parallel_records,
    "parquet": column_records,
    "arrow": column_records,
}


class Piece(NamedTuple):
    """A part of a document, the document's name within its source, and whether it ends here.

    A record is one piece: its fields, its texts, words and messages joined by line breaks, and
    its file and line, for messages.
    """

    text: str
    document: str
    ends: bool
    record: Record = ()
    location: str = ""


@dataclass(frozen=True)
class Source:
    """Files in a fixed order; `setting` and `spec` are what the user wrote, for messages.

    A document is named by its file alone: "<name of the file>#<index within it>", the name of a
    file that is one document, or only the index in a source of one file. So a `part` can be read
    separately, on any machine:

        skipped = Skipped()                     # {reason: (count, location of the first)}, a dict
        for piece in source.part(source.files[3:5]).pieces(skipped): ...
        total.merge(skipped)                    # in the order of the files, for total.lines()

    `left_out` describes the files of a directory that are not read; it is empty where all are.
    """

    setting: str
    spec: str
    files: tuple[SourceFile, ...]
    fields: Fields = TEXT
    policy: Malformed = "refuse"
    left_out: str = ""

    def __str__(self) -> str:
        return f"{self.setting}={self.spec}"

    @property
    def of_records(self) -> bool:
        return not is_text(self.fields)

    def part(self, files: Iterable[SourceFile]) -> "Source":
        """The source with some of its files, whose documents keep their names."""
        return replace(self, files=tuple(files))

    def pieces(self, skipped: Skipped | None = None) -> Iterator[Piece]:
        """Every document or record of every file, in order; what is skipped is counted in
        `skipped`."""
        handler = ErrorHandler(self.policy, Skipped() if skipped is None else skipped)
        read = self._records if self.of_records else self._documents
        for file in self.files:
            yield from read(file, handler)

    def _documents(self, file: SourceFile, handler: ErrorHandler) -> Iterator[Piece]:
        if file.format in TEXTS:
            pieces = TEXTS[file.format](file, handler)
        else:
            records = RECORDS[file.format](file, self.fields, handler)
            pieces = (piece for (text,) in records for piece in in_pieces(str(text)))
        index = 0
        for text, ends in pieces:
            yield Piece(text, file.document(index), ends)
            index += ends

    def _records(self, file: SourceFile, handler: ErrorHandler) -> Iterator[Piece]:
        kinds = [field.kind for field in self.fields]
        shown = [field for field, kind in enumerate(kinds) if kind not in ("label", "tags")]
        for index, record in enumerate(RECORDS[file.format](file, self.fields, handler)):
            text = "\n".join(readable(record[field], kinds[field]) for field in shown)
            yield Piece(text, file.document(index), True, record, handler.location)

    def signature(self) -> str:
        """A digest of the paths, sizes and modification times of the files, which are not read; of
        those in a store, of their URLs, sizes and versions."""
        files = [(str(f.path), f.format, f.name, f.sizes_and_times()) for f in self.files]
        return fingerprint(self.fields, self.policy, files)


def find_source(
    spec: str, setting: str, fields: Fields = TEXT, policy: Malformed = "refuse"
) -> Source:
    """The source that one spec names: a file, a directory, a glob, line-aligned files by braces
    ('train.{de,en}.gz'), a data set ('datasets:NAME:SPLIT'), or `stdlib`. ConfigError where there
    are no such files, or they cannot hold the fields."""
    try:
        files, left_out = _find_files(spec, setting)
    except OSError as error:
        raise unreadable(f"{setting}: {spec}", error) from None
    needed = " and ".join(map(str, fields))
    for file in files:
        if file.format in TEXTS and not is_text(fields):
            raise ConfigError(
                f"{setting}={spec}: {file.path} is plain text, and data.objective needs records of"
                f" {needed}: give a .jsonl, .tsv or .parquet file, or line-aligned files as in"
                " 'train.{de,en}'."
            )
        count = len(file.beside) + 1
        if file.format == "parallel" and count != len(fields):
            raise ConfigError(
                f"{setting}={spec} names {count} line-aligned files, and data.objective takes"
                f" {len(fields)}: {needed}."
            )
    return Source(setting, spec, files, fields, policy, left_out)


def fingerprint(*summary: object) -> str:
    """A short digest of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(summary).encode(), digest_size=16).hexdigest()


def _find_files(spec: str, setting: str) -> tuple[tuple[SourceFile, ...], str]:
    """The files in their order, and a description of those of a directory that are not read."""
    path = located(os.path.expanduser(spec))
    if spec == STDLIB:
        return _standard_library(), ""
    if spec.startswith(HUB):
        paths = dataset_files(spec.removeprefix(HUB), f"{setting}={spec}")
        return tuple(SourceFile(path, "arrow", path.name) for path in paths), ""
    if path.is_dir():
        return _in_directory(path, setting)
    if (group := re.search(r"\{([^{}]*,[^{}]*)\}", spec)) and not path.exists():
        before = spec[: group.start()]
        after = spec[group.end() :]
        return _aligned([before + name + after for name in group[1].split(",")], setting), ""
    root, matches = _matching(spec, setting)
    files = (_source_file(match, setting, version) for match, version in matches.items())
    return _named(files, root, setting), ""


def find_id_files(spec: str, setting: str) -> tuple[SourceFile, ...]:
    """The files of token ids that a path or a glob names; of those of a URL, their copies, since
    they are mapped into memory."""
    root, matches = _matching(spec, setting)
    files = _named((SourceFile(path.absolute(), "ids") for path in matches), root, setting)
    if not is_remote(spec):
        return files
    copies = local_copies([file.path for file in files])
    return tuple(replace(file, path=copy) for file, copy in zip(files, copies, strict=True))


def dataset_files(name: str, where: str) -> list[Path]:
    """The Arrow files of a data set, which the library `datasets` downloads, converts, or wrote.
    `name` is what follows "datasets:", and `where` the setting, for messages."""
    grammar = (
        "Write 'datasets:NAME', 'datasets:NAME:SPLIT' or 'datasets:NAME:CONFIG:SPLIT', as in"
        " 'datasets:Salesforce/wikitext:wikitext-103-raw-v1:train', where NAME may be a directory"
        " of this machine; a split is read whole, and is train if none is given. Files at a URL are"
        " named without 'datasets:'."
    )
    parts = name.split(":")
    if is_remote(name) or len(parts) > 3 or not all(parts) or "[" in name:
        raise ConfigError(f"{where} names no split of a data set. {grammar}")
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            f"{where} needs the library `datasets`, which is not installed: pip install"
            " 'jaxformer[datasets]'."
        ) from None
    config = parts[1] if len(parts) == 3 else None
    split = parts[-1] if len(parts) > 1 else "train"
    folder = Path(os.path.expanduser(parts[0]))
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(str(folder))
            if not isinstance(saved, dict):
                # It has one split, which may lack a name.
                saved = {str(saved.split or split) if len(parts) > 1 else split: saved}
            if config or split not in saved:
                raise ValueError(
                    f"it was written by save_to_disk, has the splits {', '.join(map(str, saved))},"
                    " and no configurations"
                )
            dataset = saved[split]
        else:
            known = str(folder) if folder.is_dir() else parts[0]
            dataset = datasets.load_dataset(known, config, split=split)
    except Exception as error:
        # The library's own errors, Arrow's, and those of its HTTP client.
        raise ConfigError(
            f"{where} cannot be loaded by the library `datasets` ({error}). {grammar} Without a"
            " network only what is in its cache (HF_HOME) can be loaded."
        ) from None
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise ConfigError(
            f"{where} is empty, or in memory only: save it by save_to_disk, and name that"
            " directory."
        )
    return files


def _standard_library() -> tuple[SourceFile, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                paths[path.relative_to(root).as_posix()] = path
    return tuple(SourceFile(paths[name], PYTHON, name) for name in sorted(paths))


def _aligned(sides: list[str], setting: str) -> tuple[SourceFile, ...]:
    """Line-aligned files: file n of each side belongs to file n of the others."""
    roots, matches = zip(*(_matching(side, setting) for side in sides), strict=True)
    counts = [len(entries) for entries in matches]
    if len({*counts}) > 1:
        raise ConfigError(
            f"{setting}: {' and '.join(sides)} find {' and '.join(map(str, counts))} files: give as"
            " many of each."
        )
    files = []
    for entries in zip(*(entries.items() for entries in matches), strict=True):
        first, *beside = (path.absolute() for path, _ in entries)
        versions = tuple(version for _, version in entries if version)
        files.append(SourceFile(first, "parallel", "", tuple(beside), versions))
    return _named(files, roots[0], setting)


def _in_directory(root: Path, setting: str) -> tuple[tuple[SourceFile, ...], str]:
    """The files of known suffixes below a directory, without hidden ones; links are followed
    once."""
    paths: Matches
    if is_remote(root):
        paths = files_below(root)
    else:
        found: list[Path] = []
        folders_read: set[str] = set()

        def refuse(error: OSError) -> None:
            raise unreadable(f"{setting}: {error.filename}", error)

        for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
            real = os.path.realpath(folder)
            if real in folders_read:
                folders.clear()
                continue
            folders_read.add(real)
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(folder, name) for name in names if not name.startswith(".")]
        files = [path for path in found if path.is_file()]
        in_order = sorted(files, key=lambda path: path.relative_to(root).as_posix())
        paths = dict.fromkeys(in_order)
    readable = {path: version for path, version in paths.items() if _suffix(path) in FORMATS}
    others = collections.Counter(
        _suffix(path) or "without a suffix" for path in paths if path not in readable
    )
    left_out = ", ".join(f"{count:,} {suffix}" for suffix, count in others.most_common(5))
    if not readable:
        raise ConfigError(
            f"{setting}: the directory {root} has no file of a known suffix"
            f" ({', '.join(FORMATS)}; its files are {left_out or 'none'}): name text of another"
            f' suffix by a glob, as in "{root}/**/*.py".'
        )
    sources = (_source_file(path, setting, version) for path, version in readable.items())
    return _named(sources, root, setting), left_out


def _matching(spec: str, setting: str) -> tuple[Path | None, Matches]:
    """The file of that name; or the fixed part of a glob, and the sorted files that it finds."""
    if is_remote(spec):
        return matching_files(spec, setting, ALLOWED)
    path = Path(os.path.expanduser(spec))
    if path.is_file():
        return None, {path: None}
    if path.exists():
        raise ConfigError(
            f"{setting}: {path} is neither a file nor a directory: write its text to a file."
        )
    if not glob.has_magic(spec):
        raise ConfigError(f"{setting}: {path} does not exist (seen from {os.getcwd()}); {ALLOWED}")
    root = Path(*itertools.takewhile(lambda name: not glob.has_magic(name), path.parts[:-1]))
    matches = {Path(name) for name in glob.glob(str(path), recursive=True)}
    files = sorted(match for match in matches if match.is_file())
    if not files:
        raise ConfigError(
            f"{setting}: no file matches the glob {spec!r} (seen from {os.getcwd()}); {ALLOWED}"
        )
    return root, dict.fromkeys(files)


def _named(files: Iterable[SourceFile], root: Path | None, setting: str) -> tuple[SourceFile, ...]:
    """The files with their names within `root`, which do not depend on compression."""
    if root is None:
        return tuple(files)
    named: dict[str, SourceFile] = {}
    for file in files:
        name = file.path.relative_to(root.absolute()).as_posix()
        if file.path.suffix.lower() in PACKED:
            name = name[: -len(file.path.suffix)]
        if name in named:
            raise ConfigError(
                f"{setting}: {named[name].path} and {file.path} are the same but for compression:"
                " keep one."
            )
        named[name] = replace(file, name=name)
    return tuple(named.values())


def _source_file(path: Path, setting: str, version: Version | None = None) -> SourceFile:
    suffix = _suffix(path)
    if NOT_TEXT.fullmatch(suffix):
        raise ConfigError(
            f"{setting}: {path} is not a .txt, .jsonl, .tsv or .parquet file (plain, .gz or .zst):"
            " convert or unpack it. Token ids (.npy, .bin) are named by themselves, and not"
            " compressed."
        )
    versions = (version,) if version else ()
    return SourceFile(path.absolute(), FORMATS.get(suffix, "text"), versions=versions)


def _suffix(path: Path) -> str:
    """The last suffix of a file, or the one before .gz or .zst, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in PACKED:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""
