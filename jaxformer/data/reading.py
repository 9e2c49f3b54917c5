"""Reads files, plain, .gz or .zst, as lines or as documents in bounded pieces; a fault names the file and the place."""

import codecs
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError

SEPARATOR = "<|endoftext|>"
LONGEST_SEPARATOR = len(SEPARATOR) + 4  # with a line break on either side
PIECE_CHARACTERS = 1 << 16
BLOCK_BYTES = 1 << 20
PACKED_BLOCK_BYTES = 1 << 16

# A piece of a document, and whether the document ends with it.
TextPiece = tuple[str, bool]


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a block at a time, decompressed by its suffix. Raises ConfigError."""
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            size = PACKED_BLOCK_BYTES if suffix in (".gz", ".zst") else BLOCK_BYTES
            blocks = iter(lambda: file.read(size), b"")
            yield from _unpacked(blocks, path, suffix) if suffix in (".gz", ".zst") else blocks
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def read_text(path: Path) -> Iterator[str]:
    """The text of a file, a block at a time, without a byte order mark. Raises ConfigError at a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0

    def decoded(block: bytes, final: bool) -> str:
        start = position - len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise _not_utf8(str(path), start + error.start, error) from None
        return text.removeprefix("\ufeff") if start == 0 else text

    for block in read_blocks(path):
        yield decoded(block, False)
        position += len(block)
    yield decoded(b"", True)


def text_documents(path: Path) -> Iterator[TextPiece]:
    """The documents of a text file, parted by a literal <|endoftext|> (one line break on either side belongs to it).

    What is parted off and holds nothing but white space is no document.
    """
    held, begun = "", False
    for text in read_text(path):
        whole, held = _split_off(held + text)
        for document in whole:
            yield from _parted_off(document, begun)
            begun = False
        *ready, held = _cut_up(held, spare=LONGEST_SEPARATOR)
        begun = begun or bool(ready)
        yield from ((piece, False) for piece in ready)
    *whole, last = held.split(SEPARATOR)  # one at the very end of the file is still there
    for document in whole:
        yield from _parted_off(_without_last_break(document), begun)
        begun = False
    yield from _parted_off(last, begun)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Each line of a file with its number from 1, without its line break. Raises ConfigError with the line number."""
    for number, start, line in _lines(path):
        try:
            yield number, line.decode("utf-8").removeprefix("\ufeff").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{path}, line {number}", start + error.start, error) from None


def in_pieces(document: str) -> Iterator[TextPiece]:
    """A document in pieces that a byte-level tokenizer encodes to the same ids as the whole."""
    *first, last = _cut_up(document)
    yield from ((piece, False) for piece in first)
    yield last, True


def _parted_off(document: str, begun: bool) -> Iterator[TextPiece]:
    if begun or document.strip():
        yield from in_pieces(document)


def _unpacked(blocks: Iterable[bytes], path: Path, suffix: str) -> Iterator[bytes]:
    """Decompresses members or frames one after the other, and knows when the last one is cut short."""
    fresh, faults = _unpacker(suffix)
    unpacker = None
    for block in blocks:
        while block:
            unpacker = unpacker or fresh()
            try:
                yield unpacker.decompress(block)
            except faults as error:
                raise ConfigError(f"{path} is damaged, or not a {suffix} file ({error}): make or fetch it again.") from None
            block = b""
            if unpacker.eof:
                block, unpacker = unpacker.unused_data.lstrip(b"\0"), None
    if unpacker is not None:
        raise ConfigError(f"{path} is truncated: its compressed data ends early. Make or fetch it again.")


def _unpacker(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    if suffix == ".gz":
        return (lambda: zlib.decompressobj(wbits=31)), zlib.error
    import zstandard

    return (lambda: zstandard.ZstdDecompressor().decompressobj()), zstandard.ZstdError


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Each line of a file with its number from 1 and the offset of its first byte."""
    number, offset, held = 1, 0, bytearray()
    for block in read_blocks(path):
        held += block
        if b"\n" not in block:
            continue
        *lines, held = held.split(b"\n")
        for line in lines:
            yield number, offset, bytes(line)
            number, offset = number + 1, offset + len(line) + 1
    if held:
        yield number, offset, bytes(held)


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> ConfigError:
    byte = error.object[error.start]
    return ConfigError(
        f"{where} is not UTF-8 text: byte 0x{byte:02x} at offset {offset} ({error.reason}; of the decompressed text). "
        "Convert it, for example by `iconv -f LATIN1 -t UTF-8`."
    )


def _split_off(text: str) -> tuple[list[str], str]:
    """The documents that a separator ends, and the rest; a separator waits until the line break after it can be seen."""
    documents, start = [], 0
    while (found := text.find(SEPARATOR, start)) >= 0 and found + len(SEPARATOR) + 2 <= len(text):
        documents.append(_without_last_break(text[start:found]))
        start = found + len(SEPARATOR)
        start += 2 if text.startswith("\r\n", start) else text.startswith("\n", start)
    return documents, text[start:]


def _without_last_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _cut_up(text: str, spare: int = 0) -> list[str]:
    """Pieces that depend on the document alone, however it was read; `spare` characters may not be the document's."""
    pieces, start = [], 0
    while len(text) - start > 2 * PIECE_CHARACTERS + spare:
        end = _cut(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _cut(text: str, low: int, high: int) -> int:
    """Where to cut between two places: before white space that follows a letter or digit, which no pre-tokenizer joins."""
    for space in "\n\r \t":
        at = text.rfind(space, low, high)
        while at > low:
            if text[at - 1].isalnum():
                return at
            at = text.rfind(space, low, at)
    return high
