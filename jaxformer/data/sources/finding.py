"""Finds the files that one spec of `data.train` or `data.validation` names."""

import collections
import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from jaxformer.data.sources.remote_files import files_below, matching_files
from jaxformer.data.sources.source_files import PACKED, PYTHON, SourceFile, Version, unreadable
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

# Files of token ids, which `ids.find_ids` reads.
ID_SUFFIXES = (".npy", ".bin")

HUB = "datasets:"
# The running Python's own modules, without its tests and installed packages.
STDLIB = "stdlib"
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

ALLOWED = (
    "give a .txt, .jsonl, .tsv or .parquet file (plain, .gz or .zst), a directory or a glob of"
    " them in quotes, token ids in a .npy or .bin file, line-aligned files as in"
    f" 'train.{{de,en}}', 'datasets:NAME', or {STDLIB}."
)


def find_files(spec: str, setting: str) -> tuple[tuple[SourceFile, ...], str]:
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
        before, after = spec[: group.start()], spec[group.end() :]
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
