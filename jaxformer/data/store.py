"""Tokenized text on disk: shards of a memory-mapped token stream, an index of documents, and a
manifest that joins them.

<store>/manifest.json       written last: the store is complete when it is there
<store>/00000.tokens        uint16, or uint32 for more than 65,536 entries; each document ends with
                            the end token
<store>/00000.documents     int64 [3, documents]: the offset in this shard after each end token; the
                            size of each document's text in bytes; its rank in the order in which
                            documents are held out, the bits of a float64
<store>/00000.json          counts and checksums of this shard, written after its two files, which
                            are then never written again
"""

import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.data.writing import replacing

MANIFEST = "manifest.json"
HASH_BYTES = 1 << 22
FILE_KINDS = ("tokens", "documents")


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes, when (nanoseconds since 1970), and a digest of
    it."""

    size: int
    time: int
    digest: str

    @classmethod
    def now(cls, path: Path, digest: str) -> "Written":
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, digest)

    def checked(self, path: Path, thorough: bool) -> "Written":
        """The same, as the file is now: read whole where its time is another, or `thorough`.

        Raises ConfigError where it is not what was written, FileNotFoundError where it is gone.
        """
        found = Written.now(path, self.digest)
        if found.size == self.size and (
            (found.time == self.time and not thorough) or digest(path) == self.digest
        ):
            return found
        how = (
            "its checksum is another"
            if found.size == self.size
            else f"it has {found.size:,} bytes of {self.size:,}"
        )
        raise ConfigError(
            f"{path} was altered since it was written ({how}): restore it, or remove it, and it is"
            " made again where the text is at hand."
        )


@dataclass(frozen=True)
class IdArray:
    """Ids in a file that is not the store's own: their type, the byte they begin at, how many."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int

    def mapped(self) -> np.ndarray:
        """The ids [count], mapped and not read."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)


@dataclass(frozen=True)
class Shard:
    """A part of a store: its path without a suffix, its counts, and its files by their suffix.

    Documents are those that end in it, bytes those of their text. A shard whose tokens are `ids`
    has no file of tokens.
    """

    path: Path
    tokens: int
    documents: int
    bytes: int
    files: dict[str, Written]
    ids: IdArray | None = None

    @classmethod
    def of(cls, folder: Path, entry: dict[str, Any]) -> "Shard":
        """A shard by its entry in a manifest."""
        files = {kind: Written(**written) for kind, written in entry["files"].items()}
        return cls(
            folder / entry["name"], entry["tokens"], entry["documents"], entry["bytes"], files
        )

    @classmethod
    def finished(cls, folder: Path, index: int, thorough: bool = False) -> "Shard | None":
        """The shard of this number, if it was written and nothing of it is missing. Raises
        ConfigError if it was altered."""
        try:
            shard = cls.of(folder, json.loads((folder / f"{index:05d}.json").read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return shard.checked(thorough)

    def entry(self) -> dict[str, Any]:
        """What a manifest says of it."""
        summary = asdict(self)
        del summary["path"], summary["ids"]
        return {"name": self.path.name} | summary

    def checked(self, thorough: bool = False) -> "Shard | None":
        """The shard with its files as they are now, None where one is gone. Raises ConfigError for
        one that was altered."""
        try:
            files = {
                kind: written.checked(self.path.with_suffix(f".{kind}"), thorough)
                for kind, written in self.files.items()
            }
        except FileNotFoundError:
            return None
        return replace(self, files=files)


class TokenStore:
    """Every token of a text, or of a part of it, by its place. Nothing is read before it is asked
    for, and no more.

    A part is runs of tokens of the shards, one after the other: run r holds `sizes[r]` tokens of
    shard `shards[r]` from `lows[r]` on. `fingerprint` is equal for equal tokens.
    """

    def __init__(self, shards: Sequence[Shard], dtype: np.dtype, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._shards, self._dtype = list(shards), dtype
        self._map = functools.lru_cache(most_maps())(
            self._open_map
        )  # on the instance, so that it goes when the store goes
        self._begins = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._take(np.zeros(1, np.int64), self._begins[-1:])
        self.documents = sum(shard.documents for shard in shards)
        self.bytes = sum(shard.bytes for shard in shards)

    @classmethod
    def open(cls, directory: Path, thorough: bool = False) -> "TokenStore | None":
        """The store in a directory, None where it is not complete. Raises ConfigError where a file
        was altered since."""
        try:
            manifest = json.loads((directory / MANIFEST).read_text())
            dtype, shards = (
                np.dtype(manifest["dtype"]),
                [Shard.of(directory, entry) for entry in manifest["shards"]],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found = [shard.checked(thorough) for shard in shards]
        whole = [shard for shard in found if shard]
        if len(whole) < len(shards):
            return None
        if whole != shards:  # files that were copied are read through once
            write_manifest(directory, manifest | {"shards": [shard.entry() for shard in whole]})
        return cls(whole, dtype, directory.name)

    @classmethod
    def joined(cls, stores: "Sequence[TokenStore]", fingerprint: str) -> "TokenStore":
        """Whole stores of one tokenizer, one after the other."""
        shards = [shard for store in stores for shard in store._shards]
        return stores[0] if len(stores) == 1 else cls(shards, stores[0]._dtype, fingerprint)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop (not included, at most the store's last): int32."""
        parts = [
            self._map(shard, "tokens")[low:high].astype(np.int32)
            for shard, low, high, _ in self._spans(start, stop)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Places p with start < p < stop at which a new document begins: int64, ascending."""
        found = []
        for shard, low, high, at in self._spans(start, stop):
            ends = self._map(shard, "documents")[0]
            first, last = np.searchsorted(ends, [low, high], side="right")
            found.append(ends[first:last] + (at - low))
        places = np.concatenate(found) if found else np.zeros(0, np.int64)
        return places[places < stop]

    def ends(self) -> np.ndarray:
        """The place after each document: int64, ascending, the last one `tokens` even where the
        text is cut there."""
        found = [np.zeros(0, np.int64)]
        for shard in range(len(self._shards)):
            ends = self._map(shard, "documents")[0]
            mine = slice(*np.searchsorted(self._runs, [shard, shard + 1]))
            lows, starts = self._lows[mine], self._starts[:-1][mine]
            if len(lows) and len(ends):
                run = np.searchsorted(lows, ends) - 1
                inside = (run >= 0) & (ends - lows[run] <= np.diff(self._starts)[mine][run])
                found.append((starts[run] + ends - lows[run])[inside])
        places = np.concatenate(found)
        last = int(places[-1]) if len(places) else 0
        return places if last == self.tokens else np.append(places, self.tokens)

    def held_out(self, fraction: float, inverse: bool = False) -> "TokenStore":
        """The documents whose place in the order is before `fraction`, or the others."""
        table = [self._map(shard, "documents").copy() for shard in range(len(self._shards))]
        ends = np.concatenate(
            [each[0] + begin for each, begin in zip(table, self._begins.tolist(), strict=False)]
        )
        taken = np.concatenate([each[2] for each in table]).view(np.float64) < fraction
        taken ^= inverse
        edges = np.diff(taken.astype(np.int8), prepend=0, append=0)
        begins = np.concatenate([[0], ends])
        size = int(np.concatenate([each[1] for each in table])[taken].sum())
        said = f"{self.fingerprint} {'without ' * inverse}{fraction:g} by document"
        return self._part(
            begins[:-1][edges[:-1] > 0], ends[edges[1:] < 0], (int(taken.sum()), size), said
        )

    def cut(self, fraction: float, after: bool) -> "TokenStore":
        """What comes after, or before, the border of the last `fraction` of the tokens; its bytes
        are an estimate.

        The end token of the last document does not count, so that one text of characters is cut as
        nanoGPT cuts it.
        """
        border = max(0, int((self.tokens - 1) * (1 - fraction)))
        start, stop = (border, self.tokens) if after else (0, border)
        count = len(self.boundaries(start, stop)) + (stop > start)
        size = round(self.bytes * (stop - start) / max(1, self.tokens))
        borders = np.array([[start], [stop]], np.int64)
        return self._part(
            borders[0],
            borders[1],
            (count, size),
            f"{self.fingerprint} {'after' if after else 'before'} {fraction:g}",
        )

    def _part(
        self, starts: np.ndarray, stops: np.ndarray, counts: tuple[int, int], name: str
    ) -> "TokenStore":
        found = TokenStore(
            self._shards, self._dtype, hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        )
        found._map = self._map
        found._take(starts, stops)
        found.documents, found.bytes = counts
        return found

    def _take(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Holds the tokens between these places of all shards, both ascending, parted where a shard
        ends."""
        runs, lows, sizes = [], [], []
        firsts = np.searchsorted(stops, self._begins[:-1], side="right").tolist()
        lasts = np.searchsorted(starts, self._begins[1:], side="left").tolist()
        for shard, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            begin, end = self._begins[shard], self._begins[shard + 1]
            low, high = (
                np.clip(starts[first:last], begin, end),
                np.clip(stops[first:last], begin, end),
            )
            some = high > low
            lows.append(low[some] - begin)
            sizes.append((high - low)[some])
            runs.append(np.full(len(lows[-1]), shard))
        none = np.zeros(0, np.int64)
        self._runs, self._lows = np.concatenate([none, *runs]), np.concatenate([none, *lows])
        self._starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        self.tokens = int(self._starts[-1])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Where tokens start to stop lie: the shard, the first and last place within it, and the
        first one's place here."""
        run, stop = (
            int(np.searchsorted(self._starts, start, side="right")) - 1,
            min(stop, self.tokens),
        )
        while start < stop:
            end = min(stop, int(self._starts[run + 1]))
            low = int(self._lows[run]) + start - int(self._starts[run])
            yield int(self._runs[run]), low, low + end - start, start
            start, run = end, run + 1

    def _open_map(self, shard: int, kind: str) -> np.ndarray:
        ids = self._shards[shard].ids
        if kind == "tokens" and ids:
            return ids.mapped()
        dtype, shape = (self._dtype, (-1,)) if kind == "tokens" else (np.dtype(np.int64), (3, -1))
        path = self._shards[shard].path.with_suffix(f".{kind}")
        if not path.stat().st_size:  # nothing can be mapped of an empty file
            return np.zeros([max(0, length) for length in shape], dtype)
        # A plain view: slices of np.memmap itself are several times slower to make.
        return np.memmap(path, dtype, "r").view(np.ndarray).reshape(shape)


def most_maps() -> int | None:
    """How many files a store keeps mapped: a quarter of those that this process may have open, None
    for no limit."""
    if sys.platform == "win32":
        return None
    import resource

    most: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most // 4


def missing_of(directory: Path) -> str:
    """The first file that a store lacks."""
    try:
        entries = json.loads((directory / MANIFEST).read_text())["shards"]
    except (OSError, ValueError, KeyError, TypeError):
        return MANIFEST
    paths = (directory / f"{entry['name']}.{kind}" for entry in entries for kind in FILE_KINDS)
    return next((path.name for path in paths if not path.exists()), MANIFEST)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes what makes a store complete, or renews it where that is possible."""
    try:
        with replacing(directory / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
    except ConfigError:
        if not (directory / MANIFEST).exists():
            raise


def digest(path: Path) -> str:
    """A digest of a file's bytes."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(HASH_BYTES):
            found.update(block)
    return found.hexdigest()
