"""Finds the files that a URL, a glob of URLs, or the URL of a directory names, with their versions,
by as few listings of the store as there are."""

import contextlib
import glob
import itertools
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, located, store_errors
from jaxformer.files.copies import ObjectVersion, version_in


def files_below(root: Path) -> dict[Path, ObjectVersion]:
    """Every file below the URL of a directory, sorted, without hidden ones."""
    store: Any = root
    with store_errors(root, "listed"):
        entries = store.fs.find(store.path, detail=True)
    return _visible(root, entries)


def matching_files(
    spec: str, setting: str, allowed: str
) -> tuple[Path | None, dict[Path, ObjectVersion]]:
    """The file of that URL; or the fixed part of a glob, and the sorted files that it finds. Raises
    ConfigError for none, with what is `allowed` instead."""
    path = located(spec)
    store: Any = path
    # Not path.is_file(), for which an object that may not be read is none.
    with store_errors(path, "read"), contextlib.suppress(FileNotFoundError):
        entry = store.fs.info(store.path)
        if entry["type"] == "file":
            return None, {path: version_in(entry)}
    if not glob.has_magic(spec):
        raise ConfigError(f"{setting}: {path} does not exist; {allowed}")
    scheme, _, pattern = spec.partition("://")
    fixed = itertools.takewhile(lambda name: not glob.has_magic(name), pattern.split("/")[:-1])
    root = located(f"{scheme}://{'/'.join(fixed)}")
    entries: dict[str, dict[str, Any]] = {}
    with store_errors(root, "listed"), contextlib.suppress(FileNotFoundError):
        entries = store.fs.glob(store.path, detail=True)
    files = _visible(root, entries)
    if not files:
        raise ConfigError(f"{setting}: no file matches the glob {spec!r}; {allowed}")
    return root, files


def _visible(root: Path, entries: dict[str, dict[str, Any]]) -> dict[Path, ObjectVersion]:
    """The files of a listing of fsspec, by their names within `root`."""
    store: Any = root
    files: dict[str, ObjectVersion] = {}
    for key, entry in entries.items():
        name = key.removeprefix(store.path).lstrip("/")
        if entry["type"] == "file" and not any(part.startswith(".") for part in name.split("/")):
            files[name] = version_in(entry)
    return {root / name: files[name] for name in sorted(files)}
