"""The tokens of a text, in memory-mapped files: shards of tokens with an index of documents, and a
manifest that joins them.

<store>/manifest.json       written last: the store is complete when it is there
<store>/00000.tokens        uint16, or uint32 for more than 65,536 entries; each document ends with
                            the end token
<store>/00000.documents     int64 [3, documents]: the offset in this shard after each end token; the
                            size of each document's text in bytes; the hash of its name from 0 to 1,
                            in whose order documents are held out, as the bits of a float64
<store>/00000.json          counts and checksums of this shard, written after its two files, which
                            are then never written again
"""

import bisect
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.data.cache_files import MANIFEST, WRONG_RECORD, Written, on_disk, require_counts
from jaxformer.files import ConfigError, is_remote, read_object, write_text

NONE = np.zeros(0, np.int64)
# An even number, as the test for ids of another width needs.
BLOCK_IDS = 1 << 22
STORES_TOGETHER = 16  # stores of a URL that are opened at the same time
COUNTS = ("tokens", "documents", "bytes")


@dataclass(frozen=True)
class IdArray:
    """Ids in a file outside the store: their type, the byte at which they begin, their number, the
    file's name in its source, and the digest that `content` had when they were scanned."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int
    name: str = ""
    digest: str = ""

    def mapped(self) -> np.ndarray:
        """The ids [count], mapped and not read."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The ids by blocks, each with the place of its first."""
        ids = self.mapped()
        return ((start, ids[start : start + BLOCK_IDS]) for start in range(0, len(ids), BLOCK_IDS))

    def content(self) -> str:
        """A digest of the name and of the ids, whatever holds them."""
        digest = hashlib.blake2b(self.name.encode() + b"\xff", digest_size=16)
        for _, ids in self.blocks():
            digest.update(ids.astype("<u4").tobytes())
        return digest.hexdigest()

    def verify(self) -> None:
        """Compares the ids with their digest."""
        if self.content() != self.digest:
            raise ConfigError(
                f"{self.path} was altered since it was first read, though its size and time are as"
                " they were: restore it; or, if it was changed on purpose, `touch` it to have it"
                " read as new data."
            )


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
        require_counts(entry, *COUNTS)
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

    def here(self, kind: str) -> Path:
        """A file on this machine: itself, or the copy of that at a URL."""
        written = self.files.get(kind)
        return on_disk([self.file(kind)], [written.digest if written else ""])[0]

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


@dataclass(frozen=True)
class StoreManifest:
    """What joins the shards of a store: the type of its tokens, a digest of the tokenizer that made
    them, and the tokens with which documents begin."""

    dtype: np.dtype
    tokenizer: str
    beginning: tuple[int, ...]
    shards: list[Shard]

    @classmethod
    def read(cls, directory: Path) -> "StoreManifest | None":
        """The manifest of a store, None where there is none that can be read."""
        try:
            record = read_object(directory / MANIFEST)
            dtype, beginning = np.dtype(record["dtype"]), map(int, record.get("beginning", ()))
            shards = [Shard.of(directory, entry) for entry in record["shards"]]
            return cls(dtype, record["tokenizer"], tuple(beginning), shards)
        except WRONG_RECORD:
            return None

    def write(self, directory: Path) -> None:
        """Writes the file that makes a store complete; one that is there may stay as it is."""
        record: dict[str, Any] = {"dtype": self.dtype.name, "tokenizer": self.tokenizer}
        record |= {"beginning": [*self.beginning]} if self.beginning else {}
        entries = [shard.entry() for shard in self.shards]
        record |= {name: sum(entry[name] for entry in entries) for name in COUNTS}
        try:
            write_text(directory / MANIFEST, json.dumps(record | {"shards": entries}, indent=1))
        except ConfigError:
            if not (directory / MANIFEST).exists():
                raise


class TokenStore:
    """Every token of a text, or of a part of it, by its place. Only what is asked for is read.

    A part is a list of runs of tokens: run r holds the tokens of all shards from `_lows[r]` on, and
    they are places `_starts[r]` to `_starts[r + 1]` of the part. `fingerprint` is equal for
    equal tokens; `beginning` are the tokens before the text of each document, as a BOS. A file is
    compared with its digest when it is first read in a process.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        dtype: np.dtype,
        fingerprint: str,
        beginning: tuple[int, ...] = (),
    ) -> None:
        self.fingerprint, self.beginning = fingerprint, beginning
        self._shards, self._dtype = list(shards), dtype
        # A cache of the instance, so that maps are closed when the store goes.
        self._map = functools.lru_cache(most_maps())(self._open_map)
        # [shards + 1]: the place of the first token of each shard, and the number of all tokens
        self._begins = [*itertools.accumulate((shard.tokens for shard in shards), initial=0)]
        self._take(np.zeros(1, np.int64), np.array(self._begins[-1:], np.int64))
        self.documents = sum(shard.documents for shard in shards)
        self.bytes = sum(shard.bytes for shard in shards)
        # Whether a text was cut at a token, so that `bytes` is an estimate.
        self.is_cut = False

    @classmethod
    def open(cls, directory: Path, thorough: bool = False) -> "TokenStore | None":
        """The store in a directory, None where it is not complete. Raises ConfigError where a file
        was altered since."""
        manifest = StoreManifest.read(directory)
        checked = [shard.checked(thorough) for shard in manifest.shards] if manifest else []
        current = [shard for shard in checked if shard]
        if not manifest or len(current) < len(manifest.shards):
            return None
        if current != manifest.shards and not is_remote(directory):
            # Copied files have other times, and are not read as a whole again.
            replace(manifest, shards=current).write(directory)
        return cls(current, manifest.dtype, directory.name, manifest.beginning)

    @classmethod
    def joined(cls, stores: "Sequence[TokenStore]", fingerprint: str) -> "TokenStore":
        """Whole stores of one tokenizer, one after the other."""
        shards = [shard for store in stores for shard in store._shards]
        if len(stores) == 1:
            return stores[0]
        return cls(shards, stores[0]._dtype, fingerprint, stores[0].beginning)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop (not included, at most the store's last): int32."""
        spans = [
            self._map(shard, "tokens")[low:high].astype(np.int32)
            for shard, low, high, _ in self._spans(start, stop)
        ]
        return np.concatenate(spans) if spans else np.zeros(0, np.int32)

    def fetch(self) -> None:
        """Copies the files of a store at a URL to this machine, where they are mapped. Raises
        ConfigError where one cannot be read, or the disk has no room for all."""
        shard_files = [(shard, kind) for shard in self._shards for kind in shard.files]
        paths = [shard.file(kind) for shard, kind in shard_files]
        on_disk(paths, [shard.files[kind].digest for shard, kind in shard_files])

    def verify(self) -> None:
        """Compares every file with its digest. Raises ConfigError for one that was altered."""
        for shard in self._shards:
            for kind, written in shard.files.items():
                written.verify(shard.here(kind))
            if shard.ids:
                shard.ids.verify()

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Places p with start < p < stop at which a new document begins: int64, ascending."""
        ends_of_spans = [NONE]
        for shard, low, high, at in self._spans(start, stop):
            ends = self._map(shard, "documents")[0]
            first, last = np.searchsorted(ends, [low, high], side="right")
            ends_of_spans.append(ends[first:last] + (at - low))
        boundaries = np.concatenate(ends_of_spans)
        return boundaries[boundaries < stop]

    def is_text(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the places start to stop holds a token of a text or its end, rather than
        one of `beginning` or none: bool [stop - start]. Place 0 counts as the beginning of a
        document."""
        width, is_text = len(self.beginning), np.arange(start, stop) < self.tokens
        if width:
            earliest = max(0, start - width)
            firsts = self.boundaries(earliest, stop)
            for first in [0, *firsts.tolist()] if earliest == 0 else firsts.tolist():
                is_text[max(0, first - start) : max(0, first + width - start)] = False
        return is_text

    def ends(self) -> np.ndarray:
        """The place after each document: int64, ascending, the last one `tokens` even where the
        text is cut there."""
        ends_of_shards = [NONE]
        sizes = np.diff(self._starts)
        for shard in range(len(self._shards) if len(sizes) else 0):
            # [documents], places in all shards
            ends = self._map(shard, "documents")[0] + self._begins[shard]
            # The last run that begins before an end holds it, unless it stops earlier.
            run = np.searchsorted(self._lows, ends) - 1
            inside = (run >= 0) & (ends - self._lows[run] <= sizes[run])
            ends_of_shards.append((self._starts[run] + ends - self._lows[run])[inside])
        all_ends = np.concatenate(ends_of_shards)
        last = int(all_ends[-1]) if len(all_ends) else 0
        return all_ends if last == self.tokens else np.append(all_ends, self.tokens)

    def held_out(self, fraction: float, inverse: bool = False) -> "TokenStore":
        """The documents whose `hash_fraction` is below `fraction`, or the others."""
        # Copies, so that no more files are open at once than the cache of maps holds.
        tables = [self._map(shard, "documents").copy() for shard in range(len(self._shards))]
        begins = zip(tables, self._begins[:-1], strict=True)
        ends = np.concatenate([table[0] + begin for table, begin in begins])
        sizes = np.concatenate([table[1] for table in tables])
        order = np.concatenate([table[2] for table in tables]).view(np.float64)
        # chosen [documents]; neighbors that are chosen form one run, which begins where `chosen`
        # rises and ends where it falls. edges [documents + 1] is 1 at the former, -1 at the latter.
        chosen = (order < fraction) ^ inverse
        edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
        starts, stops = np.append(0, ends)[:-1][edges[:-1] > 0], ends[edges[1:] < 0]
        rule = f"{'without ' if inverse else ''}{fraction:g} by document"
        return self._part(starts, stops, (int(chosen.sum()), int(sizes[chosen].sum())), rule)

    def cut(self, fraction: float, after: bool) -> "TokenStore":
        """The last `fraction` of the tokens, or what is before; its bytes are an estimate.

        The end token of the last document does not count, so that one text of characters is cut as
        nanoGPT cuts it.
        """
        border = max(0, int((self.tokens - 1) * (1 - fraction)))
        start, stop = (border, self.tokens) if after else (0, border)
        documents = len(self.boundaries(start, stop)) + (stop > start)
        size = round(self.bytes * (stop - start) / max(1, self.tokens))
        starts, stops = np.array([[start], [stop]], np.int64)
        rule = f"{'after' if after else 'before'} {fraction:g}"
        side = self._part(starts, stops, (documents, size), rule)
        side.is_cut = True
        return side

    def _part(
        self, starts: np.ndarray, stops: np.ndarray, counts: tuple[int, int], rule: str
    ) -> "TokenStore":
        name = hashlib.blake2b(f"{self.fingerprint} {rule}".encode(), digest_size=16).hexdigest()
        part_store = TokenStore(self._shards, self._dtype, name, self.beginning)
        part_store._map = self._map
        part_store._take(starts, stops)
        part_store.documents, part_store.bytes = counts
        return part_store

    def _take(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Keeps the tokens from `starts` to `stops` (both [runs], ascending, places in all
        shards)."""
        some = stops > starts
        self._lows = starts[some]
        self._starts = np.append(0, np.cumsum(stops[some] - self._lows))
        self.tokens = int(self._starts[-1])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Where tokens start to stop are: the shard, the first place in it and the place after the
        last, and the first one's place in this store."""
        run = int(np.searchsorted(self._starts, start, side="right")) - 1
        stop = min(stop, self.tokens)
        while start < stop:
            run_end = int(self._starts[run + 1])
            # The place of token `start` in all shards.
            in_shards = int(self._lows[run]) + start - int(self._starts[run])
            shard = bisect.bisect_right(self._begins, in_shards) - 1
            low = in_shards - self._begins[shard]
            end = min(stop, run_end, start + self._begins[shard + 1] - in_shards)
            yield shard, low, low + end - start, start
            start, run = end, run + (end == run_end)

    def _open_map(self, number: int, kind: str) -> Any:
        """The tokens [tokens] or the index of documents [3, documents] of a shard."""
        shard = self._shards[number]
        if kind == "tokens" and shard.ids:
            return shard.ids.mapped()
        dtype = np.dtype(np.int64)
        shape: tuple[int, ...] = (3, -1)
        if kind == "tokens":
            dtype = self._dtype
            shape = (-1,)
        path = shard.here(kind)
        if kind in shard.files:
            shard.files[kind].verify(path)
        if not path.stat().st_size:
            # An empty file cannot be mapped.
            return np.zeros([max(0, length) for length in shape], dtype)
        # A plain view: slices of np.memmap itself are several times slower to make.
        return np.memmap(path, dtype, "r").view(np.ndarray).reshape(shape)


def open_stores(directories: Sequence[Path], thorough: bool = False) -> "list[TokenStore | None]":
    """The store in each directory, as `TokenStore.open` gives it; of a URL, several at a time."""
    opened = functools.partial(TokenStore.open, thorough=thorough)
    if not directories or not is_remote(directories[0]):
        return [*map(opened, directories)]
    with ThreadPoolExecutor(STORES_TOGETHER) as threads:
        return [*threads.map(opened, directories)]


def most_maps() -> int | None:
    """A quarter of the files that this process may have open, None for no limit."""
    if sys.platform == "win32":
        return None
    import resource

    open_files: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if open_files == resource.RLIM_INFINITY else open_files // 4
