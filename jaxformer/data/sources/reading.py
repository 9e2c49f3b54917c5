"""Reads files, plain, .gz or .zst, as lines or as documents in bounded pieces; a fault names the
file and the place."""

import codecs
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxformer.config import ConfigError
from jaxformer.data.sources.error_policy import ErrorHandler

SEPARATOR = "<|endoftext|>"
LONGEST_SEPARATOR = len(SEPARATOR) + 4  # with a line break on either side
PIECE_CHARACTERS = 1 << 16
READ_BYTES = 1 << 20
PACKED = (".gz", ".zst")
PACKED_BLOCK_BYTES = 1 << 16

RecordFormat = Literal["jsonl", "tsv", "parallel", "parquet", "arrow", "snippets"]
Format = Literal["text", "python", "ids"] | RecordFormat  # ids: of tokens, which data/ids.py reads

# A piece of a document, and whether the document ends with it.
TextPiece = tuple[str, bool]


@dataclass(frozen=True)
class SourceFile:
    """A file, its format, its name within its source, empty where it is all of it, and the files
    that run beside it.

    `place` is that of all its documents in an order by hash, where they are not put in order by
    their own names.
    """

    path: Path
    format: Format
    name: str = ""
    beside: tuple[Path, ...] = ()
    place: float | None = None

    def document(self, index: int) -> str:
        """The name of its document of that index."""
        if self.format in ("python", "snippets"):
            return self.name
        return f"{self.name}#{index}" if self.name else str(index)

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(size for size, _ in self.sizes_and_times())

    def sizes_and_times(self) -> list[tuple[int, int]]:
        """Of it and of those beside it, the bytes on the disk and the time of change in
        nanoseconds. Raises ConfigError."""
        try:
            return [
                (found.st_size, found.st_mtime_ns)
                for found in map(os.stat, (self.path, *self.beside))
            ]
        except OSError as error:
            raise unreadable(self.path, error) from None


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a block at a time, decompressed by its suffix. Raises ConfigError."""
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            size = PACKED_BLOCK_BYTES if suffix in PACKED else READ_BYTES
            blocks = iter(lambda: file.read(size), b"")
            yield from _unpacked(blocks, path, suffix) if suffix in PACKED else blocks
    except OSError as error:
        raise unreadable(path, error) from None


def read_text(path: Path, mend: Callable[[bytes, int], str]) -> Iterator[str]:
    """The text of a file, a block at a time, without a byte order mark.

    `mend` gets each block that is not UTF-8, with its offset in the file, and gives the text to
    take for it.
    """
    held, offset = b"", 0

    def decoded(raw: bytes, final: bool) -> tuple[str, bytes]:
        try:
            text, used = codecs.utf_8_decode(raw, "strict", final)
        except UnicodeDecodeError:
            used = codecs.utf_8_decode(raw, "replace", final)[1]
            text = mend(raw[:used], offset)
        return (text if offset else text.removeprefix("\ufeff")), raw[used:]

    for block in read_blocks(path):
        raw = held + block
        text, held = decoded(raw, False)
        yield text
        offset += len(raw) - len(held)
    yield decoded(held, True)[0]


def text_documents(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """The documents of a text file, parted by a literal <|endoftext|> (one line break on either
    side belongs to it).

    What is parted off and holds nothing but white space is no document.
    """
    if handler.policy.undecodable == "skip":
        return _decodable_documents(file.path, handler)
    return _documents(
        file.path, handler, lambda raw, offset: str(handler.decoded(raw, str(file.path), offset))
    )


def python_document(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """A Python file as one document; one that is not UTF-8 is passed over."""
    try:
        with open(file.path, encoding="utf-8", newline="", buffering=READ_BYTES) as opened:
            text = opened.read()
    except UnicodeDecodeError:
        handler.skipped.add("files that are not UTF-8", str(file.path))
        return
    except OSError as error:
        raise unreadable(file.path, error) from None
    if is_blank(text):
        handler.blank(str(file.path))
    else:
        yield from in_pieces(text)


def text_lines(path: Path, handler: ErrorHandler) -> Iterator[tuple[int, str | None]]:
    """Each line of a file with its number from 1, without its line break; None for one that is to
    be left out."""
    number, offset = 1, 0
    for raw in _whole_lines(path):
        lines: list[str | None]
        try:
            lines = [*raw.decode().removesuffix("\n").split("\n")]
        except UnicodeDecodeError:
            lines, start = [], offset
            for count, line in enumerate(raw.removesuffix(b"\n").split(b"\n")):
                lines.append(handler.decoded(line, f"{path}, line {number + count}", start))
                start += len(line) + 1
        for line_number, text in enumerate(lines, number):
            yield line_number, text and text.removeprefix("\ufeff").removesuffix("\r")
        number, offset = number + len(lines), offset + len(raw)


def in_pieces(document: str) -> Iterator[TextPiece]:
    """A document in pieces that a byte-level tokenizer encodes to the same ids as the whole."""
    *first, last = _cut_up(document)
    yield from ((piece, False) for piece in first)
    yield last, True


def is_blank(text: str) -> bool:
    """Whether a text is empty or nothing but white space."""
    return not text or text.isspace()


def unreadable(what: Path | str, error: OSError) -> ConfigError:
    """The message for a file that cannot be opened or read."""
    return ConfigError(
        f"{what} cannot be read: {error.strerror or error}. Check its permissions, and that its"
        " disk is there."
    )


def _decodable_documents(path: Path, handler: ErrorHandler) -> Iterator[TextPiece]:
    """Documents without those that hold bytes that are not UTF-8; a second reading runs ahead, so
    that none is held."""
    first: list[int] = []

    def escaped(raw: bytes, offset: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            first[:] = first or [offset + error.start]
            return raw.decode(errors="surrogateescape")

    ahead, left_out = _documents(path, ErrorHandler(), escaped), 0
    good, ending = True, True
    for text, ends in _documents(path, handler, escaped):
        if ending:
            good = all([_is_whole(piece) for piece in _one_document(ahead)])
            left_out += not good
        if good:
            yield text, ends
        ending = ends
    if left_out:
        handler.skipped.add(
            "documents with bytes that are not UTF-8", f"{path}, byte {first[0]}", left_out
        )


def _one_document(pieces: Iterator[TextPiece]) -> Iterator[str]:
    for text, ends in pieces:
        yield text
        if ends:
            return


def _is_whole(text: str) -> bool:
    """Whether no byte of a text was escaped."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _documents(
    path: Path, handler: ErrorHandler, mend: Callable[[bytes, int], str]
) -> Iterator[TextPiece]:
    held, begun, parts = "", False, 0
    for text in read_text(path, mend):
        whole, held = _split_off(held + text)
        for document in whole:
            yield from _parted_off(document, begun, handler, path, parts and parts + 1)
            begun, parts = False, parts + 1
        *ready, held = _cut_up(held, spare=LONGEST_SEPARATOR)
        begun = begun or bool(ready)
        yield from ((piece, False) for piece in ready)
    *whole, last = held.split(SEPARATOR)  # one at the very end of the file is still there
    for document in whole:
        yield from _parted_off(
            _without_last_break(document), begun, handler, path, parts and parts + 1
        )
        begun, parts = False, parts + 1
    yield from _parted_off(last, begun, handler, path, 0 if parts else 1)


def _parted_off(
    document: str, begun: bool, handler: ErrorHandler, path: Path, number: int
) -> Iterator[TextPiece]:
    """A document, or its end. Number 0: nothing before the first separator or after the last is no
    document missing."""
    if begun or not is_blank(document):
        yield from in_pieces(document)
    elif number:
        handler.blank(f"{path}, document {number}")


def _unpacked(blocks: Iterable[bytes], path: Path, suffix: str) -> Iterator[bytes]:
    """Decompresses members or frames one after the other, and knows when the last one is cut
    short."""
    fresh, faults = _unpacker(suffix)
    unpacker = None
    for block in blocks:
        while block:
            unpacker = unpacker or fresh()
            try:
                yield unpacker.decompress(block)
            except faults as error:
                raise ConfigError(
                    f"{path} is damaged, or not a {suffix} file ({error}): make or fetch it again."
                ) from None
            block = b""
            if unpacker.eof:
                block, unpacker = unpacker.unused_data.lstrip(b"\0"), None
    if unpacker is not None:
        raise ConfigError(
            f"{path} is truncated: its compressed data ends early. Make or fetch it again."
        )


def _unpacker(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    if suffix == ".gz":
        return (lambda: zlib.decompressobj(wbits=31)), zlib.error
    import zstandard

    return (lambda: zstandard.ZstdDecompressor().decompressobj()), zstandard.ZstdError


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The bytes of a file in parts that each end with a line break, but for the last of one that
    does not."""
    held: list[bytes] = []
    for block in read_blocks(path):
        if end := block.rfind(b"\n") + 1:
            yield b"".join((*held, block[:end]))
            held = []
        held.append(block[end:])
    if rest := b"".join(held):
        yield rest


def _split_off(text: str) -> tuple[list[str], str]:
    """The documents that a separator ends, and the rest; a separator waits until the line break
    after it can be seen."""
    documents, start = [], 0
    while (found := text.find(SEPARATOR, start)) >= 0 and found + len(SEPARATOR) + 2 <= len(text):
        documents.append(_without_last_break(text[start:found]))
        start = found + len(SEPARATOR)
        start += 2 if text.startswith("\r\n", start) else text.startswith("\n", start)
    return documents, text[start:]


def _without_last_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _cut_up(text: str, spare: int = 0) -> list[str]:
    """Pieces that depend on the document alone, however it was read; `spare` characters may not be
    the document's."""
    pieces, start = [], 0
    while len(text) - start > 2 * PIECE_CHARACTERS + spare:
        end = _cut(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _cut(text: str, low: int, high: int) -> int:
    """Where to cut between two places: before white space that follows a letter or digit, which no
    pre-tokenizer joins."""
    for space in "\n\r \t":
        at = text.rfind(space, low, high)
        while at > low:
            if text[at - 1].isalnum():
                return at
            at = text.rfind(space, low, at)
    return high
