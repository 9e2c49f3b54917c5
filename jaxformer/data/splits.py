"""What a text holds, and which of it is for training and which held out."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxformer.config import ConfigError
from jaxformer.data.sources import Piece, Source, fingerprint
from jaxformer.data.sources.error_policy import Skipped
from jaxformer.data.store import TokenStore
from jaxformer.data.tokenizing import ProgressNotes
from jaxformer.data.writing import make_folder, replacing
from jaxformer.settings import Log

# With fewer documents to hold out than this the choice by hash could miss, so the end of the text
# is held out.
FEWEST_HELD_OUT = 10

# Files are scanned and tokenized by units: as many neighbours as have this many bytes together, at
# least one.
GROUP_BYTES = 64 << 20


@dataclass(frozen=True)
class Scan:
    """A digest of all text of a source, wherever it lies and however it is compressed, and its
    size.

    `skipped` is what was left out: how often for each reason, and where first. `parts` are the
    scans of its units.
    """

    content: str
    documents: int
    bytes: int
    skipped: Skipped = field(default_factory=Skipped)
    parts: tuple["Scan", ...] = ()

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Scan":
        """A scan as JSON holds it."""
        skipped = Skipped()
        skipped.merge(record["skipped"])
        return cls(
            record["content"],
            record["documents"],
            record["bytes"],
            skipped,
            tuple(map(cls.read, record["parts"])),
        )

    @classmethod
    def joined(cls, parts: "list[Scan]") -> "Scan":
        """The scan of units, one after the other."""
        skipped = Skipped()
        for part in parts:
            skipped.merge(part.skipped)
        content = (
            parts[0].content if len(parts) == 1 else fingerprint([part.content for part in parts])
        )
        return cls(
            content,
            sum(part.documents for part in parts),
            sum(part.bytes for part in parts),
            skipped,
            tuple(parts),
        )


def file_groups(source: Source) -> list[Source]:
    """The files of a source in groups, which are scanned and tokenized apart from one another."""
    groups: list[list[Any]] = []
    size = 0
    for file in source.files:
        if not groups or size + file.size > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [source.part(tuple(group)) for group in groups]


def scan(source: Source, cache: Path, log: Log = lambda line: None) -> Scan:
    """Reads all of a source once, so that a fault shows before any work; recorded in `cache` until
    a file changes.

    Raises ConfigError for what cannot be read, and where there is no text at all.
    """
    found = Scan.joined([scan_group(group, cache, log) for group in file_groups(source)])
    if not found.documents:
        files = (
            source.files[0].path if len(source.files) == 1 else f"each of {len(source.files)} files"
        )
        passed = "".join(f" ({line})" for line in found.skipped.lines())
        raise ConfigError(
            f"{source.setting}: {files} is empty{passed}: there is no text to train on or to"
            " evaluate. Give one that has."
        )
    for line in (
        *([f"not read: {source.left_out}"] if source.left_out else []),
        *found.skipped.lines(),
    ):
        log(f"{source}: {line}")
    return found


def scan_group(group: Source, cache: Path, log: Log = lambda line: None) -> Scan:
    """The scan of some files of a source, made or found."""
    return cached_scan(cache / f"{group.signature()}.json", lambda: _read(group, log))


def cached_scan(record: Path, make: Callable[[], Scan]) -> Scan:
    """The scan that a file holds, or a new one, which is written there."""
    try:
        return Scan.read(json.loads(record.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        pass
    found = make()
    make_folder(record.parent)
    with replacing(record) as file:
        file.write(json.dumps(asdict(found)).encode())
    return found


def _read(group: Source, log: Log) -> Scan:
    """Reads some files of a source."""
    log(f"{group}: reading {len(group.files):,} new or changed file{'s' * (len(group.files) > 1)}")
    digest, documents, progress = (
        hashlib.blake2b(digest_size=16),
        0,
        ProgressNotes(log, work=f"{group}: read"),
    )
    skipped = Skipped()
    for text, name, ends, fields in group.pieces(skipped):
        raw = text.encode()
        digest.update(json.dumps(fields).encode() if fields else raw)
        progress.done += len(raw)
        if ends:
            progress.tell()
            digest.update(b"\xff" + name.encode() + b"\xff")  # a byte that UTF-8 never has
            documents += 1
    return Scan(digest.hexdigest(), documents, progress.done, skipped)


@dataclass(frozen=True)
class Split:
    """One side of a text: all of it, or what is kept for training, or the `fraction` held out for
    validation.

    Documents are chosen by a hash of their name (a path, or their number in their file), so that
    more text moves none of them. Few documents are not chosen among: the last `fraction` of the
    tokens, or of records, is held out.
    """

    source: Source
    scan: Scan
    side: Literal["all", "train", "validation"] = "all"
    fraction: float = 0.0

    @property
    def name(self) -> str:
        return (
            "validation" if self.side == "validation" else self.source.setting.removeprefix("data.")
        )

    @property
    def by_document(self) -> bool:
        return self.scan.documents * min(self.fraction, 1 - self.fraction) >= FEWEST_HELD_OUT

    @property
    def bytes(self) -> int:
        """Bytes of text on this side; an expectation where documents are chosen by hash."""
        share = {"all": 1.0, "train": 1 - self.fraction, "validation": self.fraction}
        return int(self.scan.bytes * share[self.side])

    def rule(self) -> str:
        """In words, what this side is."""
        if self.side == "all":
            return "all text"
        chosen = (
            f"{self.source.order} chosen by hash" if self.by_document else "the end of the text"
        )
        return f"{'without ' if self.side == 'train' else ''}{chosen}, {self.fraction:g} of it"

    def identity(self) -> str:
        """A digest of the text on this side, known without reading it."""
        return fingerprint(self.scan.content, self.rule())

    def of(self, store: TokenStore) -> TokenStore:
        """This side of the text's tokens."""
        if self.side == "all":
            return store
        held_out = self.side == "validation"
        if self.by_document:
            return store.held_out(self.fraction, inverse=not held_out)
        return store.cut(self.fraction, after=held_out)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of this side's documents, in order; where a document is cut, about as many
        bytes as `of` has tokens."""
        if self.side == "all":
            return self.source.pieces()
        held_out = self.side == "validation"
        if self.by_document:
            return (
                piece
                for piece in self.source.pieces()
                if (self.source.place(piece.document) < self.fraction) is held_out
            )
        if self.source.of_records:
            kept = round(self.scan.documents * (1 - self.fraction))
            return itertools.islice(self.source.pieces(), *((kept, None) if held_out else (kept,)))
        return _cut(self.source.pieces(), int(self.scan.bytes * (1 - self.fraction)), held_out)


# The texts of a run by what they are for: "train" and "validation", none of the latter where
# nothing is held out.
Sides = dict[str, list[Split]]


def _cut(pieces: Iterator[Piece], border: int, after: bool) -> Iterator[Piece]:
    """The text before, or after, a byte; a character that it parts goes to neither side."""
    for piece in pieces:
        raw = piece.text.encode()
        part = raw[max(0, border) :] if after else raw[: max(0, border)]
        if text := part.decode(errors="ignore"):
            yield piece._replace(text=text)
        border -= len(raw)
