"""Finds the files that one spec of `data.train` or `data.validation` names."""

import collections
import difflib
import functools
import glob
import hashlib
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from jaxformer.data.cache_files import make_folder
from jaxformer.data.sources.hub import dataset_files
from jaxformer.data.sources.remote_files import files_below, matching_files
from jaxformer.data.sources.source_files import (
    PACKED,
    PYTHON,
    READ_BYTES,
    SourceFile,
    Version,
    unreadable,
)
from jaxformer.files import ConfigError, is_remote, located, replacing
from jaxformer.files.copies import local_copies

# The suffixes that a directory is searched for, and their formats. A file that is named by itself
# or by a glob may also be text of another suffix.
FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".tsv": "tsv",
    ".parquet": "parquet",
}

# Suffixes of files that are certainly not text, and what to do about them.
REMEDIES = {
    ".json": "write one JSON object on each line of a .jsonl file",
    ".csv": "write the columns to a .tsv, .jsonl or .parquet file",
    ".arrow .feather": "give the directory that save_to_disk wrote, as 'datasets:DIRECTORY'",
    ".zip .tar .tgz .bz2 .xz .7z": "unpack it, or compress the text as .gz or .zst",
    ".npz .pt .pdf": "give the text that it was made from",
    ".bin .npy": "token ids are data.train or data.validation by themselves, and not compressed",
}
NOT_TEXT = {suffix: remedy for suffixes, remedy in REMEDIES.items() for suffix in suffixes.split()}

# Files and, of those of a URL, their versions.
Matches = Mapping[Path, Version | None]

# Files of token ids, which `ids.find_ids` reads.
ID_SUFFIXES = (".npy", ".bin")

# Specs of standard input, and their suffixes.
STANDARD_INPUT = {"-": ".txt", "-.jsonl": ".jsonl", "-.tsv": ".tsv"}
HUB = "datasets:"
# The running Python's own modules, without its tests and installed packages.
STDLIB = "stdlib"
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

ALLOWED = (
    "give a .txt, .jsonl, .tsv or .parquet file (plain, .gz or .zst), a directory or a glob of"
    " them in quotes, token ids in a .npy or .bin file, line-aligned files as in"
    f" 'train.{{de,en}}', - for standard input, 'datasets:NAME', or {STDLIB}."
)


def find_files(spec: str, setting: str, cache: Path) -> tuple[tuple[SourceFile, ...], str]:
    """The files in their order, and a description of those of a directory that are not read."""
    path = located(os.path.expanduser(spec))
    if spec == STDLIB:
        return _standard_library(), ""
    if spec in STANDARD_INPUT:
        file = spooled(f"{setting}={spec}", cache, STANDARD_INPUT[spec])
        return (_source_file(file, setting),), ""
    if spec.startswith(HUB):
        paths = dataset_files(spec.removeprefix(HUB), f"{setting}={spec}")
        return tuple(SourceFile(path, "arrow", path.name) for path in paths), ""
    if path.is_dir():
        return _in_directory(path, setting)
    if (group := re.search(r"\{([^{}]*,[^{}]*)\}", spec)) and not path.exists():
        before, after = spec[: group.start()], spec[group.end() :]
        return _aligned([before + name + after for name in group[1].split(",")], setting), ""
    root, matches = _matching(spec, setting)
    files = (_source_file(match, setting, version) for match, version in matches.items())
    return _named(files, root, setting), ""


def find_id_files(spec: str, setting: str) -> tuple[SourceFile, ...]:
    """The files of token ids that a path or a glob names; of those of a URL, their copies, since
    they are mapped into memory. Raises ConfigError for none."""
    root, matches = _matching(spec, setting)
    files = _named((SourceFile(path.absolute(), "ids") for path in matches), root, setting)
    if not is_remote(spec):
        return files
    copies = local_copies([file.path for file in files])
    return tuple(replace(file, path=copy) for file, copy in zip(files, copies, strict=True))


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
    matches = [_matching(side, setting) for side in sides]
    lists = [[*entries.items()] for _, entries in matches]
    if len({*map(len, lists)}) > 1:
        pairs = zip(sides, lists, strict=True)
        counts = " and ".join(f"{side} finds {len(entries)}" for side, entries in pairs)
        raise ConfigError(f"{setting}: {counts} files: give as many.")
    files = (_line_aligned(entries) for entries in zip(*lists, strict=True))
    return _named(files, matches[0][0], setting)


def _line_aligned(entries: Iterable[tuple[Path, Version | None]]) -> SourceFile:
    first, *beside = (path.absolute() for path, _ in entries)
    versions = tuple(version for _, version in entries if version)
    return SourceFile(first, "parallel", "", tuple(beside), versions)


def _in_directory(root: Path, setting: str) -> tuple[tuple[SourceFile, ...], str]:
    """The files of known suffixes below a directory."""
    paths = _below(root, setting)
    readable = {path: version for path, version in paths.items() if _suffix(path) in FORMATS}
    left_out = _counted([path for path in paths if path not in readable])
    if readable:
        files = (_source_file(path, setting, version) for path, version in readable.items())
        return _named(files, root, setting), left_out
    text = (path.suffix for path in paths if path.suffix and _suffix(path) not in NOT_TEXT)
    remedy = "give one that has"
    if common := collections.Counter(text).most_common(1):
        remedy = f'name text of another suffix by a glob, as in "{root}/**/*{common[0][0]}"'
    raise ConfigError(
        f"{setting}: the directory {root} has no file of a known suffix"
        f" ({', '.join(FORMATS)}; seen: {left_out or 'no file at all'}): {remedy}."
    )


def _below(root: Path, setting: str) -> Matches:
    """Every file below a directory, sorted, without hidden ones; links are followed once."""
    if is_remote(root):
        return files_below(root)
    paths: list[Path] = []
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise unreadable(f"{setting}: {error.filename}", error)

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        if real not in seen:
            paths += [Path(folder, name) for name in names if not name.startswith(".")]
        seen.add(real)
    files = [path for path in paths if path.is_file()]
    in_order = sorted(files, key=lambda path: path.relative_to(root).as_posix())
    return dict.fromkeys(in_order)


def _matching(spec: str, setting: str) -> tuple[Path | None, Matches]:
    """The file of that name; or the fixed part of a glob, and the sorted files that it finds."""
    if is_remote(spec):
        return matching_files(spec, setting, ALLOWED)
    path = Path(os.path.expanduser(spec))
    if path.is_file():
        return None, {path: None}
    if path.exists():
        raise ConfigError(
            f"{setting}: {path} is neither a file nor a directory: give -, and pipe the text into"
            " it."
        )
    seen_from = f"(seen from {os.getcwd()})"
    if not glob.has_magic(spec):
        raise ConfigError(
            f"{setting}: {path} does not exist {seen_from}{_similar(path)}; {ALLOWED}"
        )
    root = Path(*itertools.takewhile(lambda name: not glob.has_magic(name), path.parts[:-1]))
    matches = {Path(name) for name in glob.glob(str(path), recursive=True)}
    files = sorted(match for match in matches if match.is_file())
    if files:
        return root, dict.fromkeys(files)
    if matches:
        raise ConfigError(
            f"{setting}: the glob {spec!r} matches directories only"
            f" ({', '.join(sorted(map(str, matches))[:3])}): end it as in '{spec}/*.txt'."
        )
    hint = _similar(root)
    if root.is_dir():
        seen = [path for path in root.iterdir() if path.is_file() and not path.name.startswith(".")]
        hint = f"; {root} has {_counted(seen) or 'no files'}"
    raise ConfigError(f"{setting}: no file matches the glob {spec!r} {seen_from}{hint}; {ALLOWED}")


def _similar(path: Path) -> str:
    """A question for a path that does not exist: whether one of similar name was meant."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    try:
        near = [*os.listdir(missing.parent), *([STDLIB] if str(path) == path.name else [])]
    except OSError:
        return ""
    close = [str(missing.with_name(name)) for name in difflib.get_close_matches(missing.name, near)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _named(files: Iterable[SourceFile], root: Path | None, setting: str) -> tuple[SourceFile, ...]:
    """The files with their names within `root`, which do not depend on compression."""
    if root is None:
        return tuple(files)
    named: dict[str, SourceFile] = {}
    for file in files:
        name = file.path.relative_to(root.absolute()).as_posix()
        name = name[: -len(file.path.suffix)] if file.path.suffix.lower() in PACKED else name
        if name in named:
            raise ConfigError(
                f"{setting}: {named[name].path} and {file.path} are the same but for compression:"
                " keep one."
            )
        named[name] = replace(file, name=name)
    return tuple(named.values())


def _source_file(path: Path, setting: str, version: Version | None = None) -> SourceFile:
    suffix = _suffix(path)
    if suffix in NOT_TEXT:
        raise ConfigError(
            f"{setting}: {path} is not a .txt, .jsonl, .tsv or .parquet file (plain, .gz or .zst):"
            f" {NOT_TEXT[suffix]}."
        )
    versions = (version,) if version else ()
    return SourceFile(path.absolute(), FORMATS.get(suffix, "text"), versions=versions)


def _suffix(path: Path) -> str:
    """The last suffix of a file, or the one before .gz or .zst, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in PACKED:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def _counted(paths: list[Path]) -> str:
    """The number of files, and their most common suffixes; empty where there are none."""
    counts = collections.Counter(_suffix(path) or "without a suffix" for path in paths)
    common = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(5))
    files = "file" if len(paths) == 1 else "files"
    return f"{len(paths):,} {files} ({common})" if paths else ""


def spooled(where: str, cache: Path, suffix: str) -> Path:
    """The file of a suffix below `cache` that holds all of standard input, named by a digest of it.
    `where` is the setting, for messages."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        state = "a terminal" if sys.stdin and not sys.stdin.closed else "closed"
        raise ConfigError(
            f"{where} is standard input, which is {state}: pipe text into it, as in `zcat"
            " corpus.txt.gz | ...`."
        )
    return _spooled(sys.stdin.buffer, where, cache / "stdin", suffix)


# Cached, since the stream ends with its first reading, and a source may be asked for twice.
@functools.cache
def _spooled(stream: BinaryIO, where: str, folder: Path, suffix: str) -> Path:
    make_folder(folder)
    draft, digest = folder / f"{os.getpid()}{suffix}", hashlib.blake2b(digest_size=16)
    with replacing(draft, "see data.cache_dir") as file:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            file.write(block)
        if not file.tell():
            raise ConfigError(
                f"{where} is standard input, which is empty: pipe text into it, for one setting"
                " only."
            )
    path = folder / f"{digest.hexdigest()}{suffix}"
    if path.exists():
        # It keeps its modification time, and with it what was made of it.
        draft.unlink()
    else:
        draft.replace(path)
    return path
