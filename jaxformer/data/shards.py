"""The files of tokenized text: shards of tokens with an index of documents, and a manifest that
joins them.

<store>/manifest.json       written last: the store is complete when it is there
<store>/00000.tokens        uint16, or uint32 for more than 65,536 entries; each document ends with
                            the end token
<store>/00000.documents     int64 [3, documents]: the offset in this shard after each end token; the
                            size of each document's text in bytes; the hash of its name from 0 to 1,
                            in whose order documents are held out, as the bits of a float64
<store>/00000.json          counts and checksums of this shard, written after its two files, which
                            are then never written again
"""

import functools
import hashlib
import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.files import ConfigError, read_object, write_text

MANIFEST = "manifest.json"
HASH_BYTES = 1 << 22
BLOCK_IDS = 1 << 22  # an even number, as the test for ids of another width needs
FILE_KINDS = ("tokens", "documents")
# What comes of a JSON file that is missing (ConfigError, a ValueError) or of other content.
WRONG_RECORD = (ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError)
LARGEST_COUNT = 2**62


def require_counts(record: Mapping[str, Any], *names: str) -> None:
    """Raises TypeError where one of these entries of a JSON object is no count."""
    for name in names:
        if type(record[name]) is not int or not 0 <= record[name] <= LARGEST_COUNT:
            raise TypeError(f"{name} is {reprlib.repr(record[name])}, not a count")


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes, its modification time in nanoseconds, and a
    digest of its content."""

    size: int
    time: int
    digest: str

    @classmethod
    def now(cls, path: Path, digest: str) -> "Written":
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, digest)

    def checked(self, path: Path, thorough: bool) -> "Written":
        """The file as it is now. It is read whole where its time has changed, or if `thorough`.

        Raises ConfigError where its content has changed, FileNotFoundError where it is gone.
        """
        found = Written.now(path, self.digest)
        how = f"it has {found.size:,} bytes of {self.size:,}"
        if found.size == self.size:
            untouched = found.time == self.time and not thorough
            if untouched or digest(path) == self.digest:
                return found
            how = "its checksum is another"
        remedy = "restore it, or remove it to have it made again from the text"
        raise ConfigError(f"{path} was altered since it was written ({how}): {remedy}.")

    @functools.lru_cache(None)  # noqa: B019 (it is kept for the life of the process on purpose)
    def verify(self, path: Path) -> None:
        """Compares the whole file with its digest, the first time that this process asks. Raises
        ConfigError where its content has changed, whatever its size and time."""
        self.checked(path, thorough=True)


@dataclass(frozen=True)
class IdArray:
    """Ids in a file outside the store: their type, the byte at which they begin, their number."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int

    def mapped(self) -> np.ndarray:
        """The ids [count], mapped and not read."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The ids by blocks, each with the place of its first."""
        ids = self.mapped()
        return ((start, ids[start : start + BLOCK_IDS]) for start in range(0, len(ids), BLOCK_IDS))


@dataclass(frozen=True)
class Shard:
    """A part of a store: its path without a suffix, its counts, and its files by their suffix.

    `documents` counts those that end in it, `bytes` those of their text. A shard whose tokens are
    `ids` has no file of tokens.
    """

    path: Path
    tokens: int
    documents: int
    bytes: int
    files: dict[str, Written]
    ids: IdArray | None = None

    @classmethod
    def of(cls, folder: Path, entry: dict[str, Any]) -> "Shard":
        """A shard by its entry in a manifest. Raises KeyError or TypeError for a wrong entry."""
        counts = dict(entry)
        path, files = folder / counts.pop("name"), counts.pop("files")
        require_counts(entry, "tokens", "documents", "bytes")
        for file in files.values():
            require_counts(file, "size")
        return cls(path, files={kind: Written(**file) for kind, file in files.items()}, **counts)

    @classmethod
    def finished(cls, folder: Path, index: int, thorough: bool = False) -> "Shard | None":
        """The shard of this number, None where it is not complete."""
        try:
            shard = cls.of(folder, read_object(folder / f"{index:05d}.json"))
        except WRONG_RECORD:
            return None
        return shard.checked(thorough)

    def entry(self) -> dict[str, Any]:
        """Its entry in a manifest."""
        summary = asdict(self)
        del summary["path"], summary["ids"]
        return {"name": self.path.name} | summary

    def file(self, kind: str) -> Path:
        return self.path.with_suffix(f".{kind}")

    def checked(self, thorough: bool = False) -> "Shard | None":
        """The shard with its files as they are now, None where one is gone."""
        try:
            files = {
                kind: written.checked(self.file(kind), thorough)
                for kind, written in self.files.items()
            }
        except FileNotFoundError:
            return None
        return replace(self, files=files)


def read_manifest(directory: Path) -> tuple[dict[str, Any], list[Shard]] | None:
    """The manifest of a store and its shards, None where there is none that can be read."""
    try:
        manifest = read_object(directory / MANIFEST)
        np.dtype(manifest["dtype"])
        manifest["beginning"] = tuple(map(int, manifest.get("beginning", ())))
        return manifest, [Shard.of(directory, entry) for entry in manifest["shards"]]
    except WRONG_RECORD:
        return None


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest that makes a store complete; one that is there may stay as it is."""
    try:
        write_text(directory / MANIFEST, json.dumps(manifest, indent=1))
    except ConfigError:
        if not (directory / MANIFEST).exists():
            raise


def missing_of(directory: Path) -> str:
    """The name of the first file that a store lacks."""
    _, shards = read_manifest(directory) or ({}, [])
    paths = (shard.file(kind) for shard in shards for kind in FILE_KINDS)
    return next((path.name for path in paths if not path.exists()), MANIFEST)


def digest_of_ids(ids: np.ndarray, dtype: np.dtype) -> bytes:
    """A digest of ids (16 bytes) as `dtype` holds them, whatever holds them here; empty where it
    cannot hold them."""
    held = ids.astype(dtype, copy=False)
    if not np.array_equal(held, ids):
        return b""
    return hashlib.blake2b(held.tobytes(), digest_size=16).digest()


def digest(path: Path) -> str:
    """A digest of a file's bytes."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(HASH_BYTES):
            found.update(block)
    return found.hexdigest()
