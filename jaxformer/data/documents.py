"""Reads files, plain, .gz or .zst, as blocks of bytes, as lines, and as documents in pieces, in
bounded memory; and what is done about input that cannot be used: it stops the run with one message,
or it is skipped and counted by reason."""

import codecs
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config.run import Malformed
from jaxformer.files import ConfigError, store_of
from jaxformer.files.stores import ObjectVersion

READ_BYTES = 1 << 20
PACKED = (".gz", ".zst")
PACKED_BLOCK_BYTES = 1 << 16
# The format of the files of `stdlib`.
PYTHON = "python"
REPLACEMENT = "\ufffd"
UTF8_REMEDY = (
    "Convert it, for example by `iconv -f LATIN1 -t UTF-8` (or -f UTF-16); end the name of a"
    " compressed file in .gz or .zst; or set data.malformed=replace or skip."
)

# `datasets` cuts text at line breaks, at blank lines or at the end of a file alone.
SEPARATOR = re.compile(r"(<\|endoftext\|>)(?:\r?\n)?")
LONGEST_SEPARATOR = len("\r\n<|endoftext|>\r\n")
PIECE_CHARACTERS = 1 << 16

# A text, a label, the words of a text or their tags, messages as the JSON of each, or a prompt and
# completions (not empty), which are texts or messages; a record has one for each field.
Value = str | tuple[str, ...]
Record = tuple[Value, ...]
# A piece of a document, and whether the document ends with it.
TextPiece = tuple[str, bool]


class Piece(NamedTuple):
    """A part of a document, the document's name within its source, and whether it ends here.

    A record is one piece: its fields, its texts, words and messages joined by line breaks, and
    its file and line, for messages.
    """

    text: str
    document: str
    ends: bool
    record: Record = ()
    location: str = ""


class Skipped(dict[str, tuple[int, str]]):
    """What one reading skipped or changed: for each reason the number of times, and the first
    location."""

    def add(self, reason: str, location: str, count: int = 1) -> None:
        earlier_count, first_location = self.get(reason, (0, location))
        self[reason] = (earlier_count + count, first_location)

    def merge(self, later: Mapping[str, Sequence]) -> None:
        """Add what a later part of the source skipped; JSON gives lists instead of tuples."""
        for reason, (count, location) in later.items():
            self.add(reason, location, count)

    def lines(self) -> list[str]:
        """Return a line for each reason."""
        return [
            f"{reason}: {count:,}, the first in {location}"
            for reason, (count, location) in self.items()
        ]


class RecordError(Exception):
    """A record that cannot be used: the reason, by which it is counted, and the remedy; `index` is
    that of the record among those that are encoded together."""

    def __init__(self, reason: str, remedy: str, index: int = 0) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason = reason
        self.index = index


@dataclass
class ErrorHandler:
    """Applies data.malformed during one reading of a source; `location` is the file and the line
    of the record that was read last, and `row` all of its fields."""

    policy: Malformed = "refuse"
    skipped: Skipped = field(default_factory=Skipped)
    location: str = ""
    row: object = None

    def malformed(self, error: RecordError) -> None:
        """Stop at the record that was read last, or count it."""
        if self.policy == "refuse":
            raise ConfigError(
                f"{self.location}: {error} Or skip such records by data.malformed=skip."
            )
        self.skipped.add(error.reason, self.location)

    def blank(self, location: str) -> None:
        """Count a document without text."""
        self.skipped.add("blank documents", location)

    def decoded(self, raw: bytes, where: str, offset: int) -> str | None:
        """Return UTF-8 text, None where it is skipped; `offset` is that of its first byte."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            position = offset + error.start
            if self.policy == "refuse":
                raise ConfigError(
                    f"{where} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset"
                    f" {position} ({error.reason}). {UTF8_REMEDY}"
                ) from None
        location = f"{where}, byte {position}"
        if self.policy == "skip":
            self.skipped.add("records with bytes that are not UTF-8", location)
            return None
        text = raw.decode(errors="replace")
        count = text.count(REPLACEMENT) - raw.count(REPLACEMENT.encode())
        self.skipped.add("bytes that are not UTF-8, replaced by U+FFFD", location, count)
        return text


@dataclass(frozen=True)
class SourceFile:
    """A file, its format (a key of the tables of readers), and its name within its source, which is
    empty for a source of one file.

    `beside` are the files that are read in parallel with it, line by line; `versions` are those of
    all of them when they were found.
    """

    path: Path
    format: str
    name: str = ""
    beside: tuple[Path, ...] = ()
    versions: tuple[ObjectVersion, ...] = ()

    def document(self, index: int) -> str:
        """Return the name of the document with that index; a Python file is one, and gives its
        name."""
        if self.format == PYTHON:
            return self.name
        if not self.name:
            return str(index)
        return f"{self.name}#{index}"

    @property
    def size(self) -> int:
        """Bytes on the disk, or in the store."""
        return sum(size for size, _ in self.versions)


def hash_fraction(name: str) -> float:
    """Return a number from 0 to 1 that depends on a name alone; documents are held out in its
    order."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(*summary: object) -> str:
    """Return a short digest of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(summary).encode(), digest_size=16).hexdigest()


def joint_fingerprint(names: list[str]) -> str:
    """Return the fingerprint of what has these fingerprints, one after the other."""
    return names[0] if len(names) == 1 else fingerprint(names)


def is_blank(text: str) -> bool:
    """Return whether a text is empty or only white space."""
    return not text or text.isspace()


def unreadable(what: Path | str, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be opened or read."""
    reason = error.strerror or error
    return ConfigError(f"{what} cannot be read: {reason}. Check its permissions and its disk.")


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, a block at a time, decompressed by its suffix."""
    suffix = path.suffix.lower()
    if suffix not in PACKED:
        yield from _raw_blocks(path, READ_BYTES)
        return
    unpacker: Any = None
    damaged: type[Exception] = Exception
    for block in _raw_blocks(path, PACKED_BLOCK_BYTES):
        while block:
            # A file is a sequence of gzip members or zstd frames.
            if unpacker is None and suffix == ".gz":
                unpacker = zlib.decompressobj(wbits=31)
                damaged = zlib.error
            elif unpacker is None:
                import zstandard  # its start takes 50 ms, and few files are .zst

                unpacker = zstandard.ZstdDecompressor().decompressobj()
                damaged = zstandard.ZstdError
            try:
                yield unpacker.decompress(block)
            except damaged as error:
                raise ConfigError(
                    f"{path} is damaged, or not a {suffix} file ({error}): make or fetch it again."
                ) from None
            block = b""
            if unpacker.eof:
                # What follows is padding, or the next member.
                block = unpacker.unused_data.lstrip(b"\0")
                unpacker = None
    if unpacker is not None:
        # The stream reader of zstandard would take a truncated file for one that ends there.
        raise ConfigError(f"{path} is truncated: make or fetch it again.")


def _raw_blocks(path: Path, size: int) -> Iterator[bytes]:
    if path.is_char_device():
        raise ConfigError(
            f"{path} is a device, which may never end: name a file, or - for standard input."
        )
    try:
        yield from store_of(path).blocks(size)
    except OSError as error:
        raise unreadable(path, error) from None


def _text_blocks(path: Path) -> Iterator[bytes]:
    """Yield the blocks of a file of text, and an empty one after the last."""
    beginning = b""
    for block in itertools.chain(read_blocks(path), [b""]):
        beginning = beginning or block[:4]
        # As those of UTF-16, of UTF-32, and of files that were reserved and never written do; as
        # UTF-8 they would be read without an error.
        if b"\0" in beginning:
            raise ConfigError(f"{path} is not UTF-8 text: it begins with zero bytes. {UTF8_REMEDY}")
        yield block


def text_lines(path: Path, handler: ErrorHandler) -> Iterator[tuple[int, str | None]]:
    """Yield (number from 1, text without its line break) of each line; None for text that is
    skipped."""
    number = offset = 0
    begun = b""
    for block in _text_blocks(path):
        *lines, begun = (begun + block).split(b"\n")
        if not block and begun:
            lines.append(begun)
        for raw in lines:
            number += 1
            text = handler.decoded(raw, f"{path}, line {number}", offset)
            yield number, text and text.removeprefix("\ufeff").removesuffix("\r")
            offset += len(raw) + 1


def text_documents(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """Yield the documents of a text file that are not blank, separated by a literal <|endoftext|>
    (with one line break on either side)."""
    pieces = _documents(file.path, handler)
    # Only to skip one is a whole document held in memory.
    if handler.policy != "skip":
        yield from pieces
        return
    document: list[TextPiece] = []
    for text, ends in pieces:
        document.append((text, ends))
        if not ends:
            continue
        try:
            for piece, _ in document:
                piece.encode()
        except UnicodeEncodeError:
            # It holds bytes that were escaped.
            handler.skipped.add("documents with bytes that are not UTF-8", str(file.path))
        else:
            yield from document
        document = []


def in_pieces(document: str) -> Iterator[TextPiece]:
    """Yield a document in pieces that a byte-level tokenizer encodes to the same ids as the
    whole."""
    *first, last = _cut_up(document)
    yield from ((piece, False) for piece in first)
    yield last, True


def _documents(path: Path, handler: ErrorHandler) -> Iterator[TextPiece]:
    """Yield the documents of a file, whose separators and pieces do not depend on how it is
    read."""
    # The rest of the text that was read, the number of its document, and whether that was begun.
    pending = ""
    number = 1
    begun = False
    for text, final in _decoded(path, handler):
        pending += text
        start = 0
        for match in SEPARATOR.finditer(pending):
            # The two characters after a separator may be a line break that belongs to it.
            if not final and match.end(1) + 2 > len(pending):
                break
            document = pending[start : match.start()]
            start = match.end()
            if document.endswith("\n"):
                document = document[:-1].removesuffix("\r")
            if begun or not is_blank(document):
                yield from in_pieces(document)
            elif number > 1:
                handler.blank(f"{path}, document {number}")
            number += 1
            begun = False
        pending = pending[start:]
        if not final:
            # The end of it may be the beginning of a separator.
            *ready, pending = _cut_up(pending, spare=LONGEST_SEPARATOR)
            # What was given already cannot be taken back as blank.
            begun = begun or bool(ready)
            yield from ((piece, False) for piece in ready)
    # Nothing is missing at the edges of a file that begins or ends with a separator.
    if begun or not is_blank(pending):
        yield from in_pieces(pending)
    elif number == 1:
        handler.blank(f"{path}, document 1")


def _decoded(path: Path, handler: ErrorHandler) -> Iterator[tuple[str, bool]]:
    """Yield the text of a file, a block at a time, without a byte order mark; and if it is the
    last."""
    pending = b""
    offset = 0
    for block in _text_blocks(path):
        raw = pending + block
        try:
            text, used = codecs.utf_8_decode(raw, "strict", not block)
        except UnicodeDecodeError:
            used = codecs.utf_8_decode(raw, "replace", not block)[1]
            if handler.policy == "skip":
                text = raw[:used].decode(errors="surrogateescape")
            else:
                text = str(handler.decoded(raw[:used], str(path), offset))
        yield text if offset else text.removeprefix("\ufeff"), not block
        offset += used
        pending = raw[used:]


def _cut_up(text: str, spare: int = 0) -> list[str]:
    """Return pieces that depend on the document alone; its last `spare` characters may belong to a
    separator, and do not count."""
    pieces = []
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS + spare:
        end = _cut(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _cut(text: str, low: int, high: int) -> int:
    """Return where to cut between two places: before white space that follows a letter or digit,
    since no pre-tokenizer joins the two."""
    for space in "\n\r \t":
        at = text.rfind(space, low, high)
        while at > low:
            if text[at - 1].isalnum():
                return at
            at = text.rfind(space, low, at)
    return high
