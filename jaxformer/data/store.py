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
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxformer.config.settings import Log
from jaxformer.data.documents import Piece, hash_fraction, joint_fingerprint
from jaxformer.files import ConfigError, read_object, replacing, store_of, write_text
from jaxformer.files.stores import local_copies
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.words import in_batches

# Written last: what it describes is complete when it is there.
MANIFEST = "manifest.json"
# What comes of a JSON file that is missing (ConfigError, a ValueError) or of other content.
WRONG_RECORD = (ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError)
LARGEST_COUNT = 2**62


def claimed(directory: Path, log: Log) -> AbstractContextManager[bool]:
    """Make a directory and lock it against other processes of this machine during the block.

    Gives False where the file system cannot lock, and for a URL: work may then be done twice, with
    the same result.
    """
    make_folder(directory)
    waiting = f"waiting for another process that is at work in {directory}"
    return store_of(directory).alone(lambda: log(waiting))


def make_folder(directory: Path) -> None:
    """Make a directory of the cache."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {directory} cannot be made ({error.strerror or error}): set"
            " data.cache_dir to a directory that can be written."
        ) from None


def require_counts(record: Mapping[str, Any], *names: str) -> None:
    """Raise TypeError where one of these entries of a JSON object is no count."""
    for name in names:
        if type(record[name]) is not int or not 0 <= record[name] <= LARGEST_COUNT:
            raise TypeError(f"{name} is {reprlib.repr(record[name])}, not a count")


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes and a digest of its content."""

    size: int
    digest: str

    @functools.lru_cache(None)  # noqa: B019 (it is kept for the life of the process on purpose)
    def verify_once(self, path: Path) -> None:
        """Compare the whole file with its digest, the first time that this process asks."""
        if digest(path) != self.digest:
            raise _altered(path, "its checksum is another")


def _altered(path: Path, difference: str) -> ConfigError:
    return ConfigError(
        f"{path} was altered since it was written ({difference}): restore it, or remove it to have"
        " it made again from the text."
    )


def digest(path: Path) -> str:
    """Return a digest of a file's bytes."""
    with open(path, "rb") as file:
        blake2b = functools.partial(hashlib.blake2b, digest_size=16)
        return hashlib.file_digest(file, blake2b).hexdigest()


ID_DTYPES = ("uint16", "uint32")
INDEX_DTYPE = np.dtype(np.int64)
NONE = np.zeros(0, INDEX_DTYPE)
MOST_MAPS = 128  # files that are open at a time


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a store: its path without a suffix, its counts, and its files by their suffix.

    `documents` counts those that end in it, `bytes` those of their text. `arrays` give what is in
    no file of the store: ids of the user's, or what is in memory.
    """

    path: Path
    tokens: int
    documents: int
    bytes: int
    files: dict[str, Written]
    arrays: Mapping[str, Callable[[], np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, entry: dict[str, Any]) -> "Shard":
        """Return a shard by its entry in a manifest; one of WRONG_RECORD for a wrong entry."""
        require_counts(entry, "tokens", "documents", "bytes")
        files = {}
        for kind, file in entry["files"].items():
            require_counts(file, "size")
            files[kind] = Written(file["size"], file["digest"])
        path = folder / entry["name"]
        return cls(path, entry["tokens"], entry["documents"], entry["bytes"], files)

    @classmethod
    def finished(cls, folder: Path, index: int) -> "Shard | None":
        """Return the shard of this number, None where it is not complete."""
        try:
            shard = cls.of(folder, read_object(folder / f"{index:05d}.json"))
        except WRONG_RECORD:
            return None
        return shard if shard.is_there() else None

    def entry(self) -> dict[str, Any]:
        """Return its entry in a manifest."""
        return {
            "name": self.path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "files": {kind: asdict(written) for kind, written in self.files.items()},
        }

    def file(self, kind: str) -> Path:
        return self.path.with_suffix(f".{kind}")

    def is_there(self) -> bool:
        """Return whether its files are. ConfigError where one has another size."""
        for kind, written in self.files.items():
            path = self.file(kind)
            version = store_of(path).version()
            if version is None:
                return False
            if version.size != written.size:
                raise _altered(path, f"it has {version.size:,} bytes of {written.size:,}")
        return True

    # Shared by all stores, since each map holds a file open.
    @functools.lru_cache(MOST_MAPS)  # noqa: B019
    def mapped(self, kind: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array in a file, which is mapped, after it was compared with its digest."""
        if 0 in shape:
            # An empty file cannot be mapped.
            return np.zeros(shape, dtype)
        if kind in self.arrays:
            return self.arrays[kind]()
        path = store_of(self.file(kind)).local_copy(self.files[kind].digest)
        self.files[kind].verify_once(path)
        # A plain view: slices of np.memmap itself are several times slower to make.
        return np.memmap(path, dtype, "r", 0, shape).view(np.ndarray)

    def index(self) -> np.ndarray:
        """Return the file of its documents: [3, documents]."""
        return self.mapped("documents", INDEX_DTYPE, (3, self.documents))


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
        self.fingerprint = fingerprint
        self.beginning = beginning
        self._shards = list(shards)
        self._dtype = dtype
        # [shards + 1]: the place of the first token of each shard, and the number of all tokens
        self._begins = [*itertools.accumulate((shard.tokens for shard in shards), initial=0)]
        self._take_all()
        self.documents = sum(shard.documents for shard in shards)
        self.bytes = sum(shard.bytes for shard in shards)
        # Whether a text was cut at a token, so that `bytes` is an estimate.
        self.is_cut = False

    @classmethod
    def open(cls, directory: Path) -> "TokenStore | None":
        """Return the store in a directory, None where it is not complete. ConfigError where a file
        has another size than it was written with."""
        try:
            record = read_object(directory / MANIFEST)
            beginning = tuple(map(int, record.get("beginning", ())))
            shards = [Shard.of(directory, entry) for entry in record["shards"]]
            dtype = np.dtype(record["dtype"])
            if dtype.name not in ID_DTYPES:
                return None
            for shard in shards:
                if shard.files["tokens"].size != shard.tokens * dtype.itemsize:
                    return None
            store = cls(shards, dtype, directory.name, beginning)
        except WRONG_RECORD:
            return None
        return store if all(shard.is_there() for shard in shards) else None

    @classmethod
    def joined(cls, stores: "Sequence[TokenStore]") -> "TokenStore":
        """Join whole stores of one tokenizer, one after the other."""
        shards = [shard for store in stores for shard in store._shards]
        name = joint_fingerprint([store.fingerprint for store in stores])
        return cls(shards, stores[0]._dtype, name, stores[0].beginning)

    @property
    def tokens(self) -> int:
        return self.held(sys.maxsize)

    def held(self, stop: int) -> int:
        """Return the number of the tokens before place `stop`: `stop`, unless the store ends
        there."""
        return min(stop, int(self._starts[-1]))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens start to stop (not included, at most the store's last): int32."""
        spans = [
            shard.mapped("tokens", self._dtype, (shard.tokens,))[low:high].astype(np.int32)
            for shard, low, high, _ in self._spans(start, stop)
        ]
        return np.concatenate([*spans, np.zeros(0, np.int32)])

    def fetch(self) -> None:
        """Copy the files of a store at a URL to this machine, where they are mapped. Raises
        ConfigError where one cannot be read, or the disk has no room for all."""
        paths = []
        digests = []
        for shard in self._shards:
            for kind, written in shard.files.items():
                paths.append(shard.file(kind))
                digests.append(written.digest)
        local_copies(paths, digests)

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Return the places p with start < p < stop at which a new document begins: int64,
        ascending."""
        ends_of_spans = [NONE]
        for shard, low, high, at in self._spans(start, stop):
            ends = shard.index()[0]
            first, last = np.searchsorted(ends, [low, high], side="right")
            ends_of_spans.append(ends[first:last] + (at - low))
        boundaries = np.concatenate(ends_of_spans)
        return boundaries[boundaries < stop]

    def is_text(self, start: int, stop: int) -> np.ndarray:
        """Return whether each of the places start to stop holds a token of a text or its end,
        rather than one of `beginning` or none: bool [stop - start]. Place 0 counts as the beginning
        of a document."""
        width = len(self.beginning)
        is_text = np.arange(start, stop) < self.held(stop)
        if width:
            earliest = max(0, start - width)
            firsts = self.boundaries(earliest, stop).tolist()
            if earliest == 0:
                firsts.insert(0, 0)
            for first in firsts:
                is_text[max(0, first - start) : max(0, first + width - start)] = False
        return is_text

    def ends(self) -> np.ndarray:
        """Return the place after each document: int64, ascending, the last one `tokens` even where
        the text is cut there."""
        tokens = self.tokens
        if not tokens:
            return NONE
        ends = self._ends_in_shards()
        # The last run that begins before an end holds it, unless it stops earlier.
        run = np.searchsorted(self._lows, ends) - 1
        ends = self._starts[run] + ends - self._lows[run]
        ends = ends[(run >= 0) & (ends <= self._starts[run + 1])]
        return ends if len(ends) and ends[-1] == tokens else np.append(ends, tokens)

    def _column(self, row: int) -> np.ndarray:
        """Return a row of the index of every shard: [documents]."""
        # Copies, so that no more files are open at once than the cache of maps holds.
        return np.concatenate([NONE, *(shard.index()[row].copy() for shard in self._shards)])

    def _ends_in_shards(self) -> np.ndarray:
        """Return the place after each document of every shard, in all shards: int64 [documents]."""
        documents = [shard.documents for shard in self._shards]
        return self._column(0) + np.repeat(np.array(self._begins[:-1], np.int64), documents)

    def held_out(self, fraction: float, inverse: bool = False) -> "TokenStore":
        """Return the documents whose `hash_fraction` is below `fraction`, or the others."""
        ends = self._ends_in_shards()
        sizes = self._column(1)
        order = self._column(2).view(np.float64)
        # chosen [documents]; neighbors that are chosen form one run, which begins where `chosen`
        # rises and ends where it falls. edges [documents + 1] is 1 at the former, -1 at the latter.
        chosen = (order < fraction) ^ inverse
        edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
        starts = np.append(0, ends)[:-1][edges[:-1] > 0]
        stops = ends[edges[1:] < 0]
        rule = f"{'without ' if inverse else ''}{fraction:g} by document"
        return self._part(starts, stops, (int(chosen.sum()), int(sizes[chosen].sum())), rule)

    def cut(self, fraction: float, after: bool) -> "TokenStore":
        """Return the last `fraction` of the tokens, or what is before; its bytes are an estimate.

        The end token of the last document does not count, so that one text of characters is cut as
        nanoGPT cuts it.
        """
        border = max(0, int((self.tokens - 1) * (1 - fraction)))
        start = 0
        stop = border
        if after:
            start = border
            stop = self.tokens
        documents = len(self.boundaries(start, stop)) + (stop > start)
        size = round(self.bytes * (stop - start) / max(1, self.tokens))
        rule = f"{'after' if after else 'before'} {fraction:g}"
        side = self._part(np.array([start]), np.array([stop]), (documents, size), rule)
        side.is_cut = True
        return side

    def _part(
        self, starts: np.ndarray, stops: np.ndarray, counts: tuple[int, int], rule: str
    ) -> "TokenStore":
        name = hashlib.blake2b(f"{self.fingerprint} {rule}".encode(), digest_size=16).hexdigest()
        part_store = TokenStore(self._shards, self._dtype, name, self.beginning)
        part_store._take(starts, stops)
        part_store.documents, part_store.bytes = counts
        return part_store

    def _take_all(self) -> None:
        """Keep the tokens of all shards, as one run."""
        self._take(np.zeros(1, np.int64), np.array(self._begins[-1:], np.int64))

    def _take(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Keep the tokens from `starts` to `stops` (both [runs], ascending, places in all
        shards)."""
        some = stops > starts
        self._lows = starts[some]
        self._starts = np.append(0, np.cumsum(stops[some] - self._lows))

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        """Yield where tokens start to stop are: the shard, the first place in it and the place
        after the last, and the first one's place in this store."""
        run = int(np.searchsorted(self._starts, start, side="right")) - 1
        stop = self.held(stop)
        while start < stop:
            run_end = int(self._starts[run + 1])
            # The place of token `start` in all shards.
            in_shards = int(self._lows[run]) + start - int(self._starts[run])
            shard = bisect.bisect_right(self._begins, in_shards) - 1
            low = in_shards - self._begins[shard]
            end = min(stop, run_end, start + self._begins[shard + 1] - in_shards)
            yield self._shards[shard], low, low + end - start, start
            start = end
            run = run + (end == run_end)


class GrowingStore(TokenStore):
    """The tokens of a text while a thread makes them, shard by shard: what is read is waited for,
    and so are all tokens by what depends on their number. The `head` is a store of the first of
    them, which is there. `build` makes the rest, after it has told the directories of the stores.
    `documents` is 0, and `bytes` the size of the files, where the text was not read before.

    Another process may be the one that makes them. What stops the thread is raised by the next
    read.
    """

    def __init__(
        self, head: TokenStore, build: Callable[[Callable[[list[Path]], None]], object]
    ) -> None:
        super().__init__([], head._dtype, "", head.beginning)
        self._head = head
        # None as long as they are not known.
        self._directories: list[Path] | None = None
        self._taken = 0  # shards of the first of the directories that are left
        self._error: Exception | None = None
        self._lock = threading.Lock()

        def work() -> None:
            try:
                build(self._expect)
            except Exception as error:
                self._error = error

        # A run that ends before does not wait for it; the next one goes on from its last shard.
        self._thread = threading.Thread(target=work, daemon=True)

    def _expect(self, directories: list[Path]) -> None:
        self._directories = [*directories]

    def _is_in_head(self, stop: int) -> bool:
        # The thread takes all cores, and would double the time of imports and compilation before
        # the first step. So it begins when a part of the head is read, and ends its first shard
        # before the rest is.
        with self._lock:
            if stop > self._head.tokens // HEAD_PARTS and self._thread.ident is None:
                self._thread.start()
        return stop <= self._head.tokens

    def held(self, stop: int) -> int:
        if self._is_in_head(stop):
            return stop
        with self._lock:
            while self._starts[-1] < stop and self._directories != []:
                if self._error:
                    raise self._error
                if not self._directories:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    continue
                # The files say how far the work is, whichever process does it. The manifest is
                # written after the shards, so it is looked for before them.
                is_complete = (self._directories[0] / MANIFEST).exists()
                if shard := Shard.finished(self._directories[0], self._taken):
                    self._taken += 1
                    self._shards.append(shard)
                    self._begins.append(self._begins[-1] + shard.tokens)
                    self._take_all()
                elif is_complete:
                    self._directories.pop(0)
                    self._taken = 0
                else:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        return super().held(stop)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        if self._is_in_head(stop):
            return self._head._spans(start, stop)
        return super()._spans(start, stop)

    def fetch(self) -> None:
        """Leave each file of a URL to the first read of it."""


SHARD_CHARACTERS = 64 << 20
HEAD_CHARACTERS = 4 << 20  # 0.2 s on two cores, where a shard takes 3 s
HEAD_PARTS = 8  # of which the first is read before a thread makes what follows the head
BATCH_CHARACTERS = 1 << 21  # enough to keep all cores encoding
SECONDS_BETWEEN_NOTES = 5.0
SECONDS_BETWEEN_LOOKS = 0.05  # for a shard that another thread or process makes

Item = TypeVar("Item")


class CountedPiece(NamedTuple):
    """A piece of text, the characters of the text up to its end, the bytes of its document up to
    its end, and whether it is the first one of its document."""

    piece: Piece
    characters: int
    size: int
    begins: bool


class ProgressNotes:
    """Reports, at most every 5 seconds, how much of `total` bytes of text is done; 0 is unknown."""

    def __init__(
        self, log: Log = lambda line: None, total: int = 0, work: str = "tokenized"
    ) -> None:
        self.log = log
        self.done = 0
        self._total = total
        self._work = work
        self._began = self._last_note = time.monotonic()

    def tell(self) -> None:
        now = time.monotonic()
        if now - self._last_note < SECONDS_BETWEEN_NOTES:
            return
        self._last_note = now
        rate = self.done / (now - self._began)
        of_total = left = ""
        if self._total and rate:
            of_total = f" of {self._total / 1e9:.2f}"
            left = f", {max(0, self._total - self.done) / rate / 60:.0f} min left"
        self.log(f"{self._work} {self.done / 1e9:.2f}{of_total} GB, {rate / 1e6:.1f} MB/s{left}")


def open_or_build(
    directory: Path,
    pieces: Callable[[], Iterable[Piece]],
    tokenizer: Tokenizer,
    progress: ProgressNotes | None = None,
    beginning: tuple[int, ...] = (),
    check: Callable[[int, int], None] = lambda documents, size: None,
) -> TokenStore:
    """Return the finished store in a directory, or a new one, which keeps the shards that an
    earlier attempt finished.

    Each document begins with the tokens `beginning`. `check` is called with the number of documents
    and their bytes before the store is complete. A second process on this machine waits and then
    reuses.
    """
    if (store := TokenStore.open(directory)) is not None:
        return store
    progress = progress or ProgressNotes()
    with claimed(directory, progress.log) as alone:
        if (store := TokenStore.open(directory)) is not None:
            return store
        if alone:
            # What a process that was killed had begun to write.
            for draft in directory.glob("*.tmp"):
                draft.unlink(missing_ok=True)
        shards = []
        counted = _counted(pieces(), progress)
        groups = itertools.groupby(counted, lambda each: (each.characters - 1) // SHARD_CHARACTERS)
        # The pieces of a shard that is there are read and passed over.
        for index, (_, group) in enumerate(groups):
            shard = Shard.finished(directory, index)
            if not shard:
                path = directory / f"{index:05d}"
                tokens, table = _encoded(group, tokenizer, beginning)
                files = {"tokens": write_array(path.with_suffix(".tokens"), tokens)}
                shard = write_index(path, len(tokens), table, files)
            progress.tell()
            shards.append(shard)
        store = TokenStore(shards, tokenizer.dtype, directory.name, beginning)
        check(store.documents, store.bytes)
        entries = [shard.entry() for shard in shards]
        record = {"dtype": tokenizer.dtype.name, "beginning": [*beginning], "shards": entries}
        write_text(directory / MANIFEST, json.dumps(record, indent=1))
        return store


def head_of(
    pieces: Iterable[Piece], tokenizer: Tokenizer, beginning: tuple[int, ...]
) -> TokenStore:
    """Return the tokens of the first `HEAD_CHARACTERS` of a text, in memory."""
    counted = _counted(pieces, ProgressNotes())
    first = itertools.takewhile(lambda each: each.characters <= HEAD_CHARACTERS, counted)
    tokens, index = _encoded(first, tokenizer, beginning)
    arrays = {"tokens": lambda: tokens, "documents": lambda: index}
    _, sizes, _ = index
    shard = Shard(Path(), len(tokens), len(sizes), int(sizes.sum()), {}, arrays)
    return TokenStore([shard], tokenizer.dtype, "", beginning)


def _counted(pieces: Iterable[Piece], progress: ProgressNotes) -> Iterator[CountedPiece]:
    """Yield the pieces with what is counted over several of them."""
    size = 0
    characters = 0
    begins = True
    for piece in pieces:
        piece_size = len(piece.text.encode())
        size += piece_size
        progress.done += piece_size
        characters += len(piece.text)
        yield CountedPiece(piece, characters, size, begins)
        begins = piece.ends
        if begins:
            size = 0


def _encoded(
    pieces: Iterable[CountedPiece], tokenizer: Tokenizer, beginning: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of pieces, and the index [3, documents] of the documents that end in them,
    as `Shard.index` has it."""
    before = np.array(beginning, np.uint32)
    end = np.array([tokenizer.end_token], np.uint32)
    # In the tokenizer's own type, since all of a shard are held: 40 MB of 64 million characters.
    blocks = [np.zeros(0, tokenizer.dtype)]
    tokens = 0
    ends = []
    sizes = []
    hashes = []
    # While one batch is encoded on all cores, the next one is read on a thread.
    for batch in ahead(in_batches(pieces, lambda each: len(each.piece.text), BATCH_CHARACTERS)):
        rows = []
        encoded = tokenizer.encode_arrays([each.piece.text for each in batch])
        for (piece, _, size, begins), ids in zip(batch, encoded, strict=True):
            first = before
            if not begins:
                first = before[:0]
            rows += [first, ids, end[: piece.ends]]
            tokens += len(first) + len(ids) + piece.ends
            if piece.ends:
                ends.append(tokens)
                sizes.append(size)
                hashes.append(hash_fraction(piece.document))
        blocks.append(np.concatenate(rows).astype(tokenizer.dtype))
    table = np.array([ends, sizes, np.array(hashes, np.float64).view(INDEX_DTYPE)], INDEX_DTYPE)
    return np.concatenate(blocks), table


def write_index(path: Path, tokens: int, table: np.ndarray, files: dict[str, Written]) -> Shard:
    """Write a shard's index of documents [3, documents], and then that the shard is finished.

    `files` are those of the shard that are written already.
    """
    files = files | {"documents": write_array(path.with_suffix(".documents"), table)}
    _, sizes, _ = table
    shard = Shard(path, tokens, len(sizes), int(sizes.sum()), files)
    write_text(path.with_suffix(".json"), json.dumps(shard.entry()))
    return shard


def write_array(path: Path, array: np.ndarray) -> Written:
    """Write the values of an array to a file."""
    # The bytes themselves, since `tobytes` would copy them.
    raw = array.ravel().view(np.uint8).data
    with replacing(path) as file:
        file.write(raw)
    return Written(len(raw), hashlib.blake2b(raw, digest_size=16).hexdigest())


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items; a thread makes the next one while one is in use."""
    end = object()
    with ThreadPoolExecutor(1) as behind:
        waiting = behind.submit(next, items, end)
        while (item := waiting.result()) is not end:
            waiting = behind.submit(next, items, end)
            yield item  # type: ignore[misc]
