"""What a source holds, and which of it is for training and which held out."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from jaxformer.config import ConfigError
from jaxformer.data.sources import Piece, Source, fingerprint
from jaxformer.data.writing import make_folder, replacing

# With fewer documents to hold out than this the choice by hash could miss, so the end of the text is held out.
FEWEST_HELD_OUT = 10


@dataclass(frozen=True)
class Survey:
    """A digest of all text of a source, wherever it lies and however it is compressed, and its size."""

    content: str
    documents: int
    bytes: int


def survey(source: Source, cache: Path, say: Callable[[str], None] = lambda line: None) -> Survey:
    """Reads all of a source once, so that a fault shows before any work; recorded in `cache` until a file changes.

    Raises ConfigError for what cannot be read, and where there is no text at all.
    """
    record = cache / f"{source.signature()}.json"
    try:
        return Survey(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    say(f"{source}: reading {len(source.files):,} new or changed file{'s' * (len(source.files) > 1)}")
    digest, documents, size = hashlib.blake2b(digest_size=16), 0, 0
    for text, name, ends, fields in source.pieces():
        raw = text.encode()
        digest.update(json.dumps(fields).encode() if fields else raw)
        size += len(raw)
        if ends:
            digest.update(b"\xff" + name.encode() + b"\xff")  # a byte that UTF-8 never has
            documents += 1
    if not documents:
        files = source.files[0].path if len(source.files) == 1 else f"each of {len(source.files)} files"
        raise ConfigError(
            f"{source.setting}: {files} is empty: there is no text to train on or to evaluate. Give one that has."
        )
    found = Survey(digest.hexdigest(), documents, size)
    make_folder(cache)
    with replacing(record) as file:
        file.write(json.dumps(asdict(found)).encode())
    return found


@dataclass(frozen=True)
class Split:
    """One side of a source: all of it, or what is kept for training, or the `fraction` held out for validation.

    Documents are chosen by a hash of their name (a path, or their index), so that more text moves none of them. Few
    documents are not chosen among: the last `fraction` of their bytes, or of records, is held out.
    """

    source: Source
    survey: Survey
    side: Literal["all", "train", "validation"] = "all"
    fraction: float = 0.0

    @property
    def name(self) -> str:
        return "validation" if self.side == "validation" else self.source.setting.removeprefix("data.")

    @property
    def by_document(self) -> bool:
        return self.survey.documents * min(self.fraction, 1 - self.fraction) >= FEWEST_HELD_OUT

    @property
    def bytes(self) -> int:
        """Bytes of text on this side; an expectation where documents are chosen by hash."""
        share = {"all": 1.0, "train": 1 - self.fraction, "validation": self.fraction}
        return int(self.survey.bytes * share[self.side])

    def rule(self) -> str:
        """In words, what this side is."""
        if self.side == "all":
            return "all text"
        chosen = f"{self.source.order} chosen by hash" if self.by_document else "the end of the text"
        return f"{'without ' if self.side == 'train' else ''}{chosen}, {self.fraction:g} of it"

    def identity(self) -> str:
        """A digest of the text on this side, known without reading it."""
        return fingerprint(self.survey.content, self.rule())

    def pieces(self) -> Iterator[Piece]:
        """The pieces of this side's documents, in order."""
        if self.side == "all":
            return self.source.pieces()
        if self.by_document:
            held_out = self.side == "validation"
            return (
                piece for piece in self.source.pieces() if (self.source.place(piece.document) < self.fraction) is held_out
            )
        if self.source.of_records:
            kept = round(self.survey.documents * (1 - self.fraction))
            return itertools.islice(self.source.pieces(), *((kept,) if self.side == "train" else (kept, None)))
        border = int(self.survey.bytes * (1 - self.fraction))
        return _before(self.source.pieces(), border) if self.side == "train" else _after(self.source.pieces(), border)


def _before(pieces: Iterator[Piece], border: int) -> Iterator[Piece]:
    """The text before a byte, up to the whole character; the document that it cuts ends there."""
    for piece in pieces:
        raw = piece.text.encode()
        if len(raw) >= border:
            if text := raw[: _character(raw, border)].decode():
                yield Piece(text, piece.document, True)
            return
        border -= len(raw)
        yield piece


def _after(pieces: Iterator[Piece], border: int) -> Iterator[Piece]:
    """The text from a byte on."""
    for piece in pieces:
        raw = piece.text.encode()
        if len(raw) > border and (text := raw[_character(raw, border) :].decode()):
            yield Piece(text, piece.document, piece.ends)
        border = max(0, border - len(raw))


def _character(raw: bytes, border: int) -> int:
    """The first byte of a character at or after `border`."""
    while border < len(raw) and raw[border] & 0xC0 == 0x80:
        border += 1
    return border
