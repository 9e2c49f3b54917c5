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

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.data.cache_files import MANIFEST, WRONG_RECORD, Written, require_counts
from jaxformer.files import ConfigError, read_object, write_text

if TYPE_CHECKING:
    from jaxformer.data.ids import IdArray

FILE_KINDS = ("tokens", "documents")


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
    ids: "IdArray | None" = None

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
