"""A source: files in a fixed order, found by what a setting names, the documents or records that
they hold, and what a first reading of them tells."""

import collections
import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxformer.config.run import Malformed
from jaxformer.config.settings import Log
from jaxformer.data.documents import (
    PACKED,
    PYTHON,
    ErrorHandler,
    Piece,
    Record,
    Skipped,
    SourceFile,
    fingerprint,
    in_pieces,
    joint_fingerprint,
    text_documents,
    unreadable,
)
from jaxformer.data.ids import documents_of_ids
from jaxformer.data.records import (
    Fields,
    RecordField,
    column_records,
    is_text,
    json_records,
    parallel_records,
    readable,
    tsv_records,
)
from jaxformer.data.store import (
    BATCH_CHARACTERS,
    WRONG_RECORD,
    ProgressNotes,
    ahead,
    require_counts,
)
from jaxformer.files import ConfigError, located, read_object, store_of, write_text
from jaxformer.files.stores import Matches, OnDisk, local_copies, with_versions
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.words import in_batches

# The suffixes that a directory is searched for, and their formats. A file that is named by itself
# or by a glob may also be text of another suffix.
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".tsv": "tsv",
    ".parquet": "parquet",
}

IDS = (".npy", ".bin")

# Suffixes of files that are certainly not text.
NOT_TEXT = re.compile(r"\.(json|csv|arrow|feather|zip|tar|tgz|bz2|xz|7z|npz|pt|pdf|bin|npy)")

# Files are scanned and tokenized in groups: as many neighbors as have this many bytes together, at
# least one.
GROUP_BYTES = 64 << 20

# What a text is known by before it is read: 4 KB at each of 256 places, 1 MB in all. More would
# cost a start on a disk that is slow to seek; a change between the places shows when it is read.
SAMPLES = 256
SAMPLE_BYTES = 1 << 12

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

# The formats of text, and what reads the files of others.
TEXTS = ("text", PYTHON)
RECORDS: dict[str, Callable[[SourceFile, Fields, ErrorHandler], Iterator[Record]]] = {
    "jsonl": json_records,
    "tsv": tsv_records,
    "parallel": parallel_records,
    "parquet": column_records,
    "arrow": column_records,
}


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

    @property
    def of_ids(self) -> bool:
        return bool(self.files) and self.files[0].format == "ids"

    @property
    def on_disk(self) -> bool:
        return all(isinstance(file.path, Path) for file in self.files)

    def part(self, files: Iterable[SourceFile]) -> "Source":
        """Return the source with some of its files, whose documents keep their names."""
        return replace(self, files=tuple(files))

    def pieces(self, skipped: Skipped | None = None) -> Iterator[Piece]:
        """Yield every document or record of every file, in order; what is skipped is counted in
        `skipped`."""
        handler = ErrorHandler(self.policy)
        if skipped is not None:
            handler.skipped = skipped
        for file in self.files:
            if self.of_records:
                yield from self._records(file, handler)
            else:
                yield from self._documents(file, handler)

    def _documents(self, file: SourceFile, handler: ErrorHandler) -> Iterator[Piece]:
        if file.format in TEXTS:
            if file.format == PYTHON:
                # The quickstart works with every Python, whose users cannot mend its modules.
                handler = ErrorHandler("skip", handler.skipped)
            pieces = text_documents(file, handler)
        else:
            records = RECORDS[file.format](file, self.fields, handler)
            pieces = itertools.chain.from_iterable(in_pieces(str(text)) for (text,) in records)
        index = 0
        for text, ends in pieces:
            yield Piece(text, file.document(index), ends)
            index += ends

    def _records(self, file: SourceFile, handler: ErrorHandler) -> Iterator[Piece]:
        for index, record in enumerate(RECORDS[file.format](file, self.fields, handler)):
            texts = []
            for (_, _, kind), value in zip(self.fields, record, strict=True):
                if kind not in ("label", "tags"):
                    texts.append(readable(value, kind))
            text = "\n".join(texts)
            yield Piece(text, file.document(index), True, record, handler.location)

    def first_row(self) -> object:
        """Return the first of some records with all of its fields."""
        file = self.files[0]
        handler = ErrorHandler(self.policy)
        next(RECORDS[file.format](file, (), handler), None)
        return handler.row

    def signature(self) -> str:
        """Return a digest of the paths, sizes and modification times of the files, which are not
        read; of those in a store, of their URLs, sizes and versions."""
        files = [(str(f.path), f.format, f.name, f.versions) for f in self.files]
        return fingerprint(self.fields, self.policy, files)


def find_source(
    spec: str, setting: str, fields: Fields = TEXT, policy: Malformed = "refuse"
) -> Source:
    """Return the source that one spec names: a file, a directory, a glob, line-aligned files by
    braces ('train.{de,en}.gz'), a data set ('datasets:NAME:SPLIT'), or `stdlib`. ConfigError where
    there are no such files, or they cannot hold the fields."""
    try:
        files, left_out = _find_files(spec, setting)
    except OSError as error:
        raise unreadable(f"{setting}: {spec}", error) from None
    needed = " and ".join(map(str, fields))
    for file in files:
        if file.format in (*TEXTS, "ids") and not is_text(fields):
            raise ConfigError(
                f"{setting}={spec}: {file.path} is plain text, or ids of it, and data.objective"
                f" needs records of {needed}: give a .jsonl, .tsv or .parquet file, or line-aligned"
                " files as in 'train.{de,en}'."
            )
        count = len(file.beside) + 1
        if file.format == "parallel" and count != len(fields):
            raise ConfigError(
                f"{setting}={spec} names {count} line-aligned files, and data.objective takes"
                f" {len(fields)}: {needed}."
            )
    return Source(setting, spec, files, fields, policy, left_out)


def _find_files(spec: str, setting: str) -> tuple[tuple[SourceFile, ...], str]:
    """Return the files in their order, and a description of those of a directory that are not
    read."""
    if spec.startswith(HUB):
        arrow_files = []
        for each in dataset_files(spec.removeprefix(HUB), f"{setting}={spec}"):
            versions = tuple(with_versions([each]).values())
            arrow_files.append(SourceFile(each, "arrow", each.name, versions=versions))
        return tuple(arrow_files), ""
    path = located(spec)
    root: Path | None = path
    # Of each side the files in order; those of the same place are read together.
    sides: list[Matches] = [{}]
    file_format = ""
    left_out = ""
    if (group := re.search(r"\{([^{}]*,[^{}]*)\}", spec)) and not path.exists():
        file_format = "parallel"
        specs = [spec[: group.start()] + name + spec[group.end() :] for name in group[1].split(",")]
        found = [_matching(each, setting) for each in specs]
        root = found[0][0]
        sides = [matches for _, matches in found]
        counts = [*map(len, sides)]
        if len({*counts}) > 1:
            raise ConfigError(
                f"{setting}: {' and '.join(specs)} find {' and '.join(map(str, counts))} files:"
                " give as many of each."
            )
    elif spec == STDLIB:
        file_format = PYTHON
        root = Path(sysconfig.get_path("stdlib"))
        for file, version in store_of(root).files_below(NOT_STDLIB.__contains__).items():
            if file.suffix == ".py":
                sides[0][file] = version
    elif path.is_dir():
        # The files of known suffixes below it, without hidden ones.
        others = collections.Counter[str]()
        for file, version in store_of(path).files_below().items():
            suffix = _suffix(file)
            if suffix in FORMATS:
                sides[0][file] = version
            else:
                others[suffix or "without a suffix"] += 1
        left_out = ", ".join(f"{count:,} {suffix}" for suffix, count in others.most_common(5))
        if not sides[0]:
            raise ConfigError(
                f"{setting}: the directory {path} has no file of a known suffix"
                f" ({', '.join(FORMATS)}; its files are {left_out or 'none'}): name text of another"
                f' suffix by a glob, as in "{path}/**/*.py".'
            )
    else:
        root, sides[0] = _matching(spec, setting)
        if path.suffix.lower() in IDS:
            file_format = "ids"
    files: dict[str, SourceFile] = {}
    for entries in zip(*(side.items() for side in sides), strict=True):
        paths, versions = zip(*entries, strict=True)
        first, *beside = [path.absolute() for path in paths]
        suffix = _suffix(first)
        if not file_format and NOT_TEXT.fullmatch(suffix):
            raise ConfigError(
                f"{setting}: {paths[0]} is not a .txt, .jsonl, .tsv or .parquet file (plain, .gz or"
                " .zst): convert or unpack it. Token ids (.npy, .bin) are named by themselves, and"
                " not compressed."
            )
        # A single file has no name, so that its tokens are found again after it was renamed; those
        # of several do not depend on compression.
        name = ""
        if root is not None:
            name = first.relative_to(root.absolute()).as_posix()
            if first.suffix.lower() in PACKED:
                name = name.removesuffix(first.suffix)
        if name in files:
            raise ConfigError(
                f"{setting}: {files[name].path} and {first} are the same but for compression: keep"
                " one."
            )
        read_as = file_format or FORMATS.get(suffix, "text")
        files[name] = SourceFile(first, read_as, name, tuple(beside), versions)
    if file_format == "ids":
        # They are mapped into memory, and so those of a URL are copied.
        copies = local_copies([file.path for file in files.values()])
        for name, copy in zip(files, copies, strict=True):
            files[name] = replace(files[name], path=copy)
    return tuple(files.values()), left_out


def dataset_files(name: str, where: str) -> list[Path]:
    """Return the Arrow files of a data set, which the library `datasets` downloads, converts, or
    wrote. `name` is what follows "datasets:", and `where` the setting, for messages."""
    grammar = (
        "Write 'datasets:NAME', 'datasets:NAME:SPLIT' or 'datasets:NAME:CONFIG:SPLIT', as in"
        " 'datasets:Salesforce/wikitext:wikitext-103-raw-v1:train', where NAME may be a directory"
        " of this machine; a split is read whole, and is train if none is given. Files at a URL are"
        " named without 'datasets:'."
    )
    parts = name.split(":")
    if "://" in name or len(parts) > 3 or not all(parts) or "[" in name:
        raise ConfigError(f"{where} names no split of a data set. {grammar}")
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            f"{where} needs the library `datasets`, which is not installed: pip install"
            " 'jaxformer[datasets]'."
        ) from None
    config = None
    split = "train"
    if len(parts) > 1:
        split = parts[-1]
    if len(parts) == 3:
        config = parts[1]
    folder = Path(os.path.expanduser(parts[0]))
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(str(folder))
            if not isinstance(saved, dict):
                saved = {str(saved.split or "train"): saved}
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


def _matching(spec: str, setting: str) -> tuple[Path | None, Matches]:
    """Return the file of that name; or the fixed part of a glob, and the files that it finds, in
    order."""
    path = located(spec)
    if version := store_of(path).version():
        return None, {path: version}
    seen_from = "" if path.is_absolute() else f" (seen from {os.getcwd()})"
    if not glob.has_magic(spec):
        if path.exists():
            raise ConfigError(
                f"{setting}: {path} is neither a file nor a directory: write its text to a file."
            )
        raise ConfigError(f"{setting}: {path} does not exist{seen_from}; {ALLOWED}")
    root = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    matches = store_of(path).files_matching(root)
    if not matches:
        raise ConfigError(f"{setting}: no file matches the glob {spec!r}{seen_from}; {ALLOWED}")
    return root, matches


def _suffix(path: Path) -> str:
    """Return the last suffix of a file, or the one before .gz or .zst, in lower case."""
    suffix = path.suffix.lower()
    if suffix in PACKED:
        return path.with_suffix("").suffix.lower() or suffix
    return suffix


@dataclass(frozen=True)
class Scan:
    """A digest of all text of a source, wherever it is and however it is compressed, and its size.

    `skipped` is what was left out; `parts` are the scans of its file groups, none for a group.
    Where only samples were read (`is_sampled`), `content` is a digest of them, and as long as the
    rest is not read there are no parts and no documents, and `bytes` are those of the files.
    """

    content: str
    documents: int
    bytes: int
    skipped: Skipped = field(default_factory=Skipped)
    parts: tuple["Scan", ...] = ()
    is_sampled: bool = False

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Scan":
        """Return the scan of a file group as JSON holds it. Raises one of WRONG_RECORD for a wrong
        one."""
        require_counts(record, "documents", "bytes")
        if not isinstance(record["content"], str):
            raise TypeError("content is no digest")
        skipped = Skipped()
        skipped.merge(record["skipped"])
        return cls(record["content"], record["documents"], record["bytes"], skipped)

    @classmethod
    def joined(cls, parts: "list[Scan]") -> "Scan":
        """Return the scan of file groups, one after the other."""
        skipped = Skipped()
        for scan in parts:
            skipped.merge(scan.skipped)
        content = joint_fingerprint([scan.content for scan in parts])
        documents = sum(scan.documents for scan in parts)
        size = sum(scan.bytes for scan in parts)
        return cls(content, documents, size, skipped, tuple(parts))


def file_groups(source: Source) -> list[Source]:
    """Return the files of a source in groups, which are scanned and tokenized separately; each file
    of token ids is one."""
    # Neighbors together, because a store of its own for each of many small files would be mostly
    # manifests; and no more, because a changed file costs its whole group.
    groups: list[list[SourceFile]] = []
    size = 0
    for file in source.files:
        if not groups or source.of_ids or size + file.size > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [source.part(group) for group in groups]


def scan(
    source: Source, cache: Path, log: Log = lambda line: None, tokenizer: Tokenizer | None = None
) -> Scan:
    """Read all of a source once, so that errors show before any work; kept in `cache` until a file
    changes. Token ids are read as those of `tokenizer`, and again for another one."""
    if source.of_ids and tokenizer is None:
        raise ConfigError(
            f"{source} holds token ids, and tokenizer.path is empty: set it to their"
            " tokenizer.json."
        )
    groups = file_groups(source)
    text_scan = Scan.joined([scan_group(group, cache, log, tokenizer) for group in groups])
    skipped_lines = text_scan.skipped.lines()
    if not text_scan.documents:
        count = len(source.files)
        files = source.files[0].path if count == 1 else f"each of {count} files"
        reasons = "".join(f" ({line})" for line in skipped_lines)
        raise ConfigError(f"{source.setting}: {files} is empty{reasons}: give a source with text.")
    if source.left_out:
        log(f"{source}: not read: {source.left_out}")
    for line in skipped_lines:
        log(f"{source}: {line}")
    return text_scan


def sample(source: Source, cache: Path) -> Scan:
    """Return the scan of a text on the disk that is read while a run trains: known by the names
    and sizes of its files and the bytes at `SAMPLES` places, so by all of it up to 1 MB."""
    digest = hashlib.blake2b(json.dumps([source.fields, source.policy]).encode(), digest_size=16)
    size = sum(file.size for file in source.files)
    for file in source.files:
        digest.update(f"{file.name} {file.size} ".encode())
        try:
            with open(file.path, "rb") as opened:
                for place in range(0, file.size, max(SAMPLE_BYTES, size // SAMPLES)):
                    opened.seek(place)
                    digest.update(opened.read(SAMPLE_BYTES))
        except OSError as error:
            raise unreadable(file.path, error) from None
    content = digest.hexdigest()
    # What an earlier start has read.
    with contextlib.suppress(*WRONG_RECORD):
        records = [cache / f"{group.signature()}.json" for group in file_groups(source)]
        whole = Scan.joined([Scan.read(read_object(record)) for record in records])
        return replace(whole, content=content, is_sampled=True)
    return Scan(content, 0, size, is_sampled=True)


def whole_parts(source: Source, earlier: Scan, cache: Path, log: Log) -> tuple[Scan, ...]:
    """Return the scans of the file groups of a source; of a text that was sampled, which is read
    now if it was not before, ConfigError where it is another than when it was read first."""
    parts = earlier.parts or scan(source, cache, log).parts
    if earlier.is_sampled:
        content = {"content": [part.content for part in parts]}
        record = cache / f"{earlier.content}.json"
        if not record.exists():
            write_text(record, json.dumps(content))
        elif read_object(record) != content:
            raise ConfigError(
                f"{source} was altered, in places by which it is not known, since a run began to"
                f" read it: restore it; or remove {record} if no such run is to be continued."
            )
    return parts


def scan_group(group: Source, cache: Path, log: Log, tokenizer: Tokenizer | None) -> Scan:
    """Return the scan of a file group, which is read where `cache` has none of it."""
    name = group.signature()
    if not group.of_ids:
        tokenizer = None
    if tokenizer:
        name = fingerprint(name, tokenizer.fingerprint())
    record = cache / f"{name}.json"
    with contextlib.suppress(*WRONG_RECORD):
        return Scan.read(read_object(record))
    if tokenizer:
        (file,) = group.files
        try:
            _, sizes, content = documents_of_ids(file, tokenizer, log)
        except ConfigError as error:
            raise ConfigError(f"{group}: {error}") from None
        made = Scan(content, len(sizes), int(sizes.sum()))
    else:
        made = scan_text(group, log)
        # An object of a store that is replaced meanwhile is refused by its reader.
        if group.on_disk:
            for file in group.files:
                versions = [OnDisk(path).version() for path in (file.path, *file.beside)]
                if versions != [*file.versions]:
                    raise changed(group)
    write_text(record, json.dumps(asdict(made)))
    return made


def changed(group: Source) -> ConfigError:
    """Return the error for files that were written to while they were read."""
    return ConfigError(
        f"{group}: its files changed while they were read: run again when they no longer change."
    )


def scan_text(group: Source, log: Log) -> Scan:
    """Read some files of a source."""
    count = len(group.files)
    log(f"{group}: reading {count:,} new or changed {'file' if count == 1 else 'files'}")
    # The bytes of the text, where they are those of its files.
    size = sum(file.size for file in group.files)
    for file in group.files:
        if file.format != "text" or file.path.suffix in PACKED:
            size = 0
    digest = hashlib.blake2b(digest_size=16)
    progress = ProgressNotes(log, size, f"{group}: read")
    documents = 0
    skipped = Skipped()
    pieces = group.pieces(skipped)
    # While one batch is read, the one before is hashed, for which no lock of Python is held.
    for batch in ahead(in_batches(pieces, lambda piece: len(piece.text), BATCH_CHARACTERS)):
        for text, name, ends, fields, _ in batch:
            raw = text.encode()
            progress.done += len(raw)
            if fields:
                raw = json.dumps(fields).encode()
            digest.update(raw)
            if ends:
                # 0xff is a byte that UTF-8 never has.
                digest.update(b"\xff" + name.encode() + b"\xff")
                documents += 1
        progress.tell()
    return Scan(digest.hexdigest(), documents, progress.done, skipped)
