"""Tokenized text on disk: shards of a memory-mapped token stream, where each document ends, and a manifest that joins them.

    <store>/manifest.json     written last: the store is complete when it is there
    <store>/00000.tokens      uint16, or uint32 for more than 65,536 entries; each document ends with the end token
    <store>/00000.ends        int64: the place in this shard after each end token
    <store>/00000.json        counts of this shard, written after its two files: a finished shard is never made again

Shards depend on the text and the tokenizer alone, so that work stopped anywhere goes on, and work done twice is the same.
"""

import bisect
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jaxformer.data.sources import Piece
from jaxformer.data.writing import claimed, replacing
from jaxformer.tokenizer import Tokenizer

SHARD_CHARACTERS = 64 << 20
BATCH_CHARACTERS = 1 << 21
SECONDS_BETWEEN_NOTES = 20.0


@dataclass(frozen=True)
class Shard:
    """Counts of one shard: its tokens, the documents that end in it, and the bytes of their text."""

    tokens: int
    documents: int
    bytes: int


class TokenStore:
    """Every token of a split, by its place. Nothing is read before it is asked for, and no more than that."""

    def __init__(self, directory: Path, dtype: np.dtype, shards: list[Shard]) -> None:
        self.directory = directory
        self.tokens = sum(shard.tokens for shard in shards)
        self.documents = sum(shard.documents for shard in shards)
        self.bytes = sum(shard.bytes for shard in shards)
        self._dtype = dtype
        self._starts = list(itertools.accumulate((shard.tokens for shard in shards), initial=0))
        self._map = functools.cache(self._open_map)  # on the instance, so that it goes when the store goes

    @classmethod
    def open(cls, directory: Path) -> "TokenStore | None":
        """The store in a directory, or None where it is not complete or a file has not the size it was written with."""
        try:
            manifest = json.loads((directory / "manifest.json").read_text())
            dtype, shards = np.dtype(manifest["dtype"]), [Shard(**entry) for entry in manifest["shards"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        whole = all(_is_whole(directory, index, shard, dtype) for index, shard in enumerate(shards))
        return cls(directory, dtype, shards) if whole else None

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop (not included, at most the store's last): int32."""
        parts = [self._map(shard, "tokens")[low:high] for shard, low, high in self._spans(start, stop)]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Places p with start < p < stop at which a new document begins: int64, ascending."""
        found = []
        for shard, low, high in self._spans(start, stop):
            ends = self._map(shard, "ends")
            first, last = np.searchsorted(ends, [low, high], side="right")
            found.append(ends[first:last] + self._starts[shard])
        places = np.concatenate(found) if found else np.zeros(0, np.int64)
        return places[places < stop]

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that hold tokens start to stop, each with the first and last place within it."""
        shard, stop = bisect.bisect_right(self._starts, start) - 1, min(stop, self.tokens)
        while start < stop:
            base, end = self._starts[shard], self._starts[shard + 1]
            if start < end:
                yield shard, start - base, min(stop, end) - base
            start, shard = max(start, end), shard + 1

    def _open_map(self, shard: int, kind: str) -> np.ndarray:
        dtype = self._dtype if kind == "tokens" else np.dtype(np.int64)
        path = _path(self.directory, shard, kind)
        # A plain view: slices of np.memmap itself are several times slower to make.
        return np.memmap(path, dtype, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, dtype)


def open_or_build(
    directory: Path,
    pieces: Callable[[], Iterable[Piece]],
    tokenizer: Tokenizer,
    say: Callable[[str], None] = lambda line: None,
    total_bytes: int = 0,
) -> TokenStore:
    """The finished store in a directory, or a new one: shards that an earlier attempt finished are kept.

    `say` hears of progress (beside `total_bytes`) now and then. A second process on this machine waits and then reuses.
    """
    if store := TokenStore.open(directory):
        return store
    with claimed(directory, say) as alone:
        if store := TokenStore.open(directory):
            return store
        for draft in directory.glob("*.tmp") if alone else ():
            draft.unlink(missing_ok=True)
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        progress = _Progress(say, total_bytes)
        shards: list[Shard] = []
        for index, group in enumerate(_groups(pieces())):
            shards.append(_finished(directory, index, dtype) or _write_shard(directory, index, group, tokenizer, dtype))
            progress.add(shards[-1].bytes)
        manifest = {
            "dtype": dtype.name,
            "tokenizer": tokenizer.fingerprint(),
            **{name: sum(getattr(shard, name) for shard in shards) for name in ("tokens", "documents", "bytes")},
            "shards": [asdict(shard) for shard in shards],
        }
        with replacing(directory / "manifest.json") as file:
            file.write(json.dumps(manifest, indent=1).encode())
    return TokenStore(directory, dtype, shards)


def _groups(pieces: Iterable[Piece]) -> Iterator[Iterable[Piece]]:
    """The pieces of each shard; one that is not consumed is passed over."""
    seen = 0

    def shard(piece: Piece) -> int:
        nonlocal seen
        seen += len(piece.text)
        return (seen - 1) // SHARD_CHARACTERS

    return (group for _, group in itertools.groupby(pieces, shard))


def _write_shard(directory: Path, index: int, pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> Shard:
    tokens, size, ends = 0, 0, []
    with replacing(_path(directory, index, "tokens")) as file:
        for batch in in_batches(pieces):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                if piece.ends:
                    ids.append(tokenizer.end_token)
                    ends.append(tokens + len(ids))
                tokens += len(ids)
                size += len(piece.text.encode())
                file.write(np.array(ids, dtype).tobytes())
    with replacing(_path(directory, index, "ends")) as file:
        file.write(np.array(ends, np.int64).tobytes())
    shard = Shard(tokens, len(ends), size)
    with replacing(_path(directory, index, "json")) as file:
        file.write(json.dumps(asdict(shard)).encode())
    return shard


def in_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces, each large enough to keep all cores encoding."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _finished(directory: Path, index: int, dtype: np.dtype) -> Shard | None:
    try:
        shard = Shard(**json.loads(_path(directory, index, "json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return shard if _is_whole(directory, index, shard, dtype) else None


def _is_whole(directory: Path, index: int, shard: Shard, dtype: np.dtype) -> bool:
    try:
        tokens, ends = (_path(directory, index, kind).stat().st_size for kind in ("tokens", "ends"))
    except OSError:
        return False
    return tokens == shard.tokens * dtype.itemsize and ends == shard.documents * 8


def _path(directory: Path, index: int, kind: str) -> Path:
    return directory / f"{index:05d}.{kind}"


class _Progress:
    """Says how far the work is, at most every 20 seconds."""

    def __init__(self, say: Callable[[str], None], total: int) -> None:
        self._say, self._total, self._done = say, total, 0
        self._began = self._said = time.monotonic()

    def add(self, size: int) -> None:
        now = time.monotonic()
        self._done += size
        if now - self._said < SECONDS_BETWEEN_NOTES:
            return
        self._said, rate = now, self._done / (now - self._began)
        left = max(0, self._total - self._done) / rate / 60
        self._say(
            f"tokenized {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s, {left:.0f} min left"
        )
