"""Makes stores: text becomes shards whose borders depend on the text alone, so that work can stop
anywhere and continue."""

import hashlib
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from jaxformer.config.settings import Log
from jaxformer.data.cache_files import Written, claimed
from jaxformer.data.sources import Piece
from jaxformer.data.sources.source_files import hash_fraction
from jaxformer.data.store import Shard, TokenStore
from jaxformer.files import replacing, write_text
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.words import in_batches

SHARD_CHARACTERS = 64 << 20
BATCH_CHARACTERS = 1 << 21  # enough to keep all cores encoding
SECONDS_BETWEEN_NOTES = 5.0

Item = TypeVar("Item")
# Of each document of a shard: the place after its end (int64), the bytes of its text (int64), and
# the `hash_fraction` of its name (float64).
DocumentIndex = tuple["array | np.ndarray", "array | np.ndarray", "array | np.ndarray"]


class ShardPiece(NamedTuple):
    """A piece of text, a number that is equal for the pieces of a shard, the bytes of its document
    up to its end, and whether it is the first one of its document."""

    piece: Piece
    shard: int
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
) -> TokenStore:
    """The finished store in a directory, or a new one, which keeps the shards that an earlier
    attempt finished.

    Each document begins with the tokens `beginning`. A second process on this machine waits and
    then reuses.
    """
    if (store := TokenStore.open(directory)) is not None:
        return store
    progress = progress or ProgressNotes()
    with claimed(directory, progress.log) as alone:
        if (store := TokenStore.open(directory)) is not None:
            return store
        for draft in directory.glob("*.tmp") if alone else ():
            draft.unlink(missing_ok=True)
        shards = []
        groups = itertools.groupby(_by_shard(pieces(), progress), lambda entry: entry.shard)
        # The pieces of a shard that is there are read and passed over.
        for index, (_, group) in enumerate(groups):
            shard = Shard.finished(directory, index)
            if not shard:
                shard = _write_shard(directory / f"{index:05d}", group, tokenizer, beginning)
            progress.tell()
            shards.append(shard)
        return TokenStore.complete(directory, shards, tokenizer.dtype, beginning)


def _by_shard(pieces: Iterable[Piece], progress: ProgressNotes) -> Iterator[ShardPiece]:
    """The pieces with what is counted over several of them."""
    size = 0
    characters = 0
    begins = True
    for piece in pieces:
        piece_size = len(piece.text.encode())
        size = size + piece_size
        progress.done = progress.done + piece_size
        characters += len(piece.text)
        yield ShardPiece(piece, (characters - 1) // SHARD_CHARACTERS, size, begins)
        size = 0 if piece.ends else size
        begins = piece.ends


def _write_shard(
    path: Path, pieces: Iterable[ShardPiece], tokenizer: Tokenizer, beginning: tuple[int, ...]
) -> Shard:
    before = np.array(beginning, np.uint32)
    tokens = 0
    ends = array("q")
    sizes = array("q")
    hashes = array("d")
    read = hashlib.blake2b(digest_size=16)
    end = np.array([tokenizer.end_token], np.uint32)
    batches = in_batches(pieces, lambda entry: len(entry.piece.text), BATCH_CHARACTERS)
    with replacing(path.with_suffix(".tokens")) as file:
        for batch in _ahead(batches):
            rows = []
            encoded = tokenizer.encode_arrays([entry.piece.text for entry in batch])
            for (piece, _, size, begins), ids in zip(batch, encoded, strict=True):
                first = before if begins else before[:0]
                rows += [first, ids, end[: piece.ends]]
                tokens += len(first) + len(ids) + piece.ends
                if piece.ends:
                    ends.append(tokens)
                    sizes.append(size)
                    hashes.append(hash_fraction(piece.document))
            raw = np.concatenate(rows).astype(tokenizer.dtype).tobytes()
            read.update(raw)
            file.write(raw)
    written = Written(tokens * tokenizer.dtype.itemsize, read.hexdigest())
    return write_index(path, tokens, (ends, sizes, hashes), {"tokens": written})


def write_index(path: Path, tokens: int, table: DocumentIndex, files: dict[str, Written]) -> Shard:
    """Writes a shard's index of documents, and then that the shard is finished.

    `files` are those of the shard that are written already.
    """
    ends, sizes, _ = table
    files = files | {"documents": write_arrays(path.with_suffix(".documents"), table)}
    shard = Shard(path, tokens, len(ends), int(np.sum(sizes)), files)
    write_text(path.with_suffix(".json"), json.dumps(shard.entry()))
    return shard


def write_arrays(path: Path, arrays: "Iterable[array | np.ndarray]") -> Written:
    """Writes arrays one after the other to a file."""
    raw = b"".join(each.tobytes() for each in arrays)
    with replacing(path) as file:
        file.write(raw)
    return Written(len(raw), hashlib.blake2b(raw, digest_size=16).hexdigest())


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; a thread makes the next one while one is in use."""
    end = object()
    with ThreadPoolExecutor(1) as behind:
        waiting = behind.submit(next, items, end)
        while (item := waiting.result()) is not end:
            waiting = behind.submit(next, items, end)
            yield item  # type: ignore[misc]
