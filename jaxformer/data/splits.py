"""What a text holds, and which part of it is for training and which is held out."""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxformer.config.settings import Log
from jaxformer.data.documents import (
    PACKED,
    Piece,
    Skipped,
    SourceFile,
    fingerprint,
    hash_fraction,
    joint_fingerprint,
)
from jaxformer.data.ids import documents_of_ids, open_ids
from jaxformer.data.source import Source
from jaxformer.data.store import (
    WRONG_RECORD,
    ProgressNotes,
    TokenStore,
    make_folder,
    require_counts,
)
from jaxformer.files import ConfigError, read_object, write_text
from jaxformer.tokenizer import Tokenizer

# With fewer documents to hold out than this the choice by hash could miss, so the end of the text
# is held out.
FEWEST_HELD_OUT = 10

# Files are scanned and tokenized in groups: as many neighbors as have this many bytes together, at
# least one.
GROUP_BYTES = 64 << 20

SideName = Literal["train", "validation"]


@dataclass(frozen=True)
class Scan:
    """A digest of all text of a source, wherever it is and however it is compressed, and its size.

    `skipped` is what was left out; `parts` are the scans of its file groups.
    """

    content: str
    documents: int
    bytes: int
    skipped: Skipped = field(default_factory=Skipped)
    parts: tuple["Scan", ...] = ()

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Scan":
        """A scan as JSON holds it. Raises one of WRONG_RECORD for a wrong record."""
        require_counts(record, "documents", "bytes")
        if not isinstance(record["content"], str):
            raise TypeError("content is no digest")
        skipped = Skipped()
        skipped.merge(record["skipped"])
        parts = tuple(map(cls.read, record["parts"]))
        return cls(**record | {"skipped": skipped, "parts": parts})

    @classmethod
    def joined(cls, parts: "list[Scan]") -> "Scan":
        """The scan of file groups, one after the other."""
        skipped = Skipped()
        for scan in parts:
            skipped.merge(scan.skipped)
        content = joint_fingerprint([scan.content for scan in parts])
        documents = sum(scan.documents for scan in parts)
        size = sum(scan.bytes for scan in parts)
        return cls(content, documents, size, skipped, tuple(parts))


def file_groups(source: Source) -> list[Source]:
    """The files of a source in groups, which are scanned and tokenized separately; each file of
    token ids is one."""
    groups: list[list[SourceFile]] = []
    size = 0
    for file in source.files:
        if not groups or source.of_ids or size + file.size > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [source.part(group) for group in groups]


def scan(
    source: Source, cache: Path, log: Log = lambda line: None, tokenizer: Tokenizer | None = None
) -> Scan:
    """Reads all of a source once, so that errors show before any work; kept in `cache` until a file
    changes. Token ids are read as those of `tokenizer`, and again for another one."""
    if source.of_ids and tokenizer is None:
        raise ConfigError(
            f"{source} holds token ids, and tokenizer.path is empty: set it to their"
            " tokenizer.json."
        )
    parts = []
    for group in file_groups(source):
        name = group.signature()
        read = functools.partial(scan_text, group, log)
        if group.of_ids and tokenizer:
            name = fingerprint(name, tokenizer.fingerprint())
            read = functools.partial(scan_ids, group, tokenizer, log)
        parts.append(cached_scan(cache / f"{name}.json", read))
    text_scan = Scan.joined(parts)
    skipped_lines = text_scan.skipped.lines()
    if not text_scan.documents:
        count = len(source.files)
        files = source.files[0].path if count == 1 else f"each of {count} files"
        reasons = "".join(f" ({line})" for line in skipped_lines)
        raise ConfigError(f"{source.setting}: {files} is empty{reasons}: give a source with text.")
    if source.left_out:
        log(f"{source}: not read: {source.left_out}")
    for line in skipped_lines:
        log(f"{source}: {line}")
    return text_scan


def cached_scan(record: Path, make: Callable[[], Scan]) -> Scan:
    """The scan that a file holds, or a new one, which is written there."""
    try:
        return Scan.read(read_object(record))
    except WRONG_RECORD:
        made = make()
    make_folder(record.parent)
    write_text(record, json.dumps(asdict(made)))
    return made


def scan_text(group: Source, log: Log) -> Scan:
    """Reads some files of a source."""
    count = len(group.files)
    log(f"{group}: reading {count:,} new or changed {'file' if count == 1 else 'files'}")
    is_plain = all(f.format == "text" and f.path.suffix not in PACKED for f in group.files)
    # The bytes of the text, where they are those of its files.
    size = sum(file.size for file in group.files) if is_plain else 0
    digest = hashlib.blake2b(digest_size=16)
    progress = ProgressNotes(log, size, f"{group}: read")
    documents = 0
    skipped = Skipped()
    for text, name, ends, fields, _ in group.pieces(skipped):
        raw = text.encode()
        digest.update(json.dumps(fields).encode() if fields else raw)
        progress.done += len(raw)
        progress.tell()
        if ends:
            # 0xff is a byte that UTF-8 never has.
            digest.update(b"\xff" + name.encode() + b"\xff")
            documents += 1
    return Scan(digest.hexdigest(), documents, progress.done, skipped)


def scan_ids(source: Source, tokenizer: Tokenizer, log: Log) -> Scan:
    """Reads and checks every id of a file."""
    (file,) = source.files
    try:
        array = open_ids(file, tokenizer)
        log(f"{source}: reading {file.path}, {array.dtype.name}")
        _, sizes = documents_of_ids(array, tokenizer, log)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return Scan(array.content(), len(sizes), int(sizes.sum()))


@dataclass(frozen=True)
class Split:
    """One side of a text: all of it, or what is kept for training, or the `fraction` held out for
    validation.

    Documents are chosen by a hash of their name (a path, or their number in their file), so that
    more text moves none of them. Where there are few documents, the last `fraction` of the tokens,
    or of the records, is held out.
    """

    source: Source
    scan: Scan
    side: Literal["all", SideName] = "all"
    fraction: float = 0.0

    @property
    def name(self) -> str:
        if self.side == "validation":
            return self.side
        return self.source.setting.removeprefix("data.")

    @property
    def by_document(self) -> bool:
        return self.scan.documents * min(self.fraction, 1 - self.fraction) >= FEWEST_HELD_OUT

    @property
    def bytes(self) -> int:
        """Bytes of text on this side; an expectation where documents are chosen by hash."""
        fractions = {"all": 1.0, "train": 1 - self.fraction, "validation": self.fraction}
        return int(self.scan.bytes * fractions[self.side])

    def rule(self) -> str:
        """A description of this side, for messages and digests."""
        if self.side == "all":
            return "all text"
        chosen = "documents chosen by hash" if self.by_document else "the end of the text"
        without = "without " if self.side == "train" else ""
        return f"{without}{chosen}, {self.fraction:g} of it"

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
        pieces = self.source.pieces()
        train_fraction = 1 - self.fraction
        held_out = self.side == "validation"
        if self.side == "all":
            yield from pieces
        elif self.by_document:
            for piece in pieces:
                if (hash_fraction(piece.document) < self.fraction) is held_out:
                    yield piece
        elif self.source.of_records:
            border = round(self.scan.documents * train_fraction)
            start, stop = (border, None) if held_out else (0, border)
            yield from itertools.islice(pieces, start, stop)
        else:
            # A character that the border cuts goes to neither side.
            border = int(self.scan.bytes * train_fraction)
            for piece in pieces:
                raw = piece.text.encode()
                side = raw[max(0, border) :] if held_out else raw[: max(0, border)]
                if text := side.decode(errors="ignore"):
                    yield piece._replace(text=text)
                border -= len(raw)


# The texts of a run by what they are for; none for validation where nothing is held out.
Sides = dict[SideName, list[Split]]
