"""Reads plain text as documents, which <|endoftext|> separates, in pieces of bounded size.

`datasets` cuts text at line breaks, at blank lines or at the end of a file alone.
"""

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxformer.data.sources.error_policy import (
    ErrorHandler,
    is_wide,
    require_content,
    wide_encoding,
)
from jaxformer.data.sources.source_files import (
    READ_BYTES,
    SourceFile,
    is_blank,
    read_blocks,
    unreadable,
)

SEPARATOR = re.compile(r"(<\|endoftext\|>)(?:\r?\n)?")
LONGEST_SEPARATOR = len("\r\n<|endoftext|>\r\n")
PIECE_CHARACTERS = 1 << 16

# A piece of a document, and whether the document ends with it.
TextPiece = tuple[str, bool]
# Gives the text for a block that is not UTF-8, of which it gets the bytes and the offset.
Repair = Callable[[bytes, int], str]


def text_documents(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """The documents of a text file that are not blank, separated by a literal <|endoftext|> (with
    one line break on either side)."""
    if handler.policy.undecodable == "skip":
        return _decodable_documents(file.path, handler)

    def repair(raw: bytes, offset: int) -> str:
        return str(handler.decoded(raw, str(file.path), offset))

    return _documents(file.path, handler, repair)


def python_document(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """A Python file as one document; one that is not UTF-8 is skipped."""
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


def in_pieces(document: str) -> Iterator[TextPiece]:
    """A document in pieces that a byte-level tokenizer encodes to the same ids as the whole."""
    *first, last = _cut_up(document)
    yield from ((piece, False) for piece in first)
    yield last, True


def _decodable_documents(path: Path, handler: ErrorHandler) -> Iterator[TextPiece]:
    """The documents without those that hold bytes that are not UTF-8.

    The file is read twice, first to find these, so that no document is held in memory.
    """
    first: list[int] = []

    def escaped(raw: bytes, offset: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            first[:] = first or [offset + error.start]
            return raw.decode(errors="surrogateescape")

    damaged_numbers, number = set[int](), 0
    for text, ends in _documents(path, ErrorHandler(), escaped):
        if not _is_whole(text):
            damaged_numbers.add(number)
        number += ends
    number = 0
    for text, ends in _documents(path, handler, escaped):
        if number not in damaged_numbers:
            yield text, ends
        number += ends
    if damaged_numbers:
        reason = "documents with bytes that are not UTF-8"
        handler.skipped.add(reason, f"{path}, byte {first[0]}", len(damaged_numbers))


def _is_whole(text: str) -> bool:
    """Whether no byte of a text was escaped as half a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _documents(path: Path, handler: ErrorHandler, repair: Repair) -> Iterator[TextPiece]:
    """The documents of a file, whose separators and pieces do not depend on how it is read."""
    # The text of an open document, whether some of it was yielded, and how many are closed.
    pending, begun, count = "", False, 0

    def closed(document: str, number: int) -> Iterator[TextPiece]:
        """A document or its end; number 0 stands for the file's edges, where none is missing."""
        if begun or not is_blank(document):
            yield from in_pieces(document)
        elif number:
            handler.blank(f"{path}, document {number}")

    for text, final in _decoded(path, repair):
        documents, pending = _split_off(pending + text, final)
        for document in documents:
            yield from closed(document, count and count + 1)
            begun, count = False, count + 1
        if not final:
            # The end of it may be the beginning of a separator.
            *ready, pending = _cut_up(pending, spare=LONGEST_SEPARATOR)
            begun = begun or bool(ready)
            yield from ((piece, False) for piece in ready)
    yield from closed(pending, 0 if count else 1)


def _decoded(path: Path, repair: Repair) -> Iterator[tuple[str, bool]]:
    """The text of a file, a block at a time, without a byte order mark; and if it is the last."""
    pending, offset = b"", 0

    def decoded(raw: bytes, final: bool) -> tuple[str, bytes]:
        try:
            text, used = codecs.utf_8_decode(raw, "strict", final)
        except UnicodeDecodeError:
            used = codecs.utf_8_decode(raw, "replace", final)[1]
            text = repair(raw[:used], offset)
        return (text if offset else text.removeprefix("\ufeff")), raw[used:]

    for block in read_blocks(path):
        if not offset and not pending:
            require_content(str(path), block)
            if encoding := wide_encoding(block):
                raise is_wide(str(path), encoding)
        raw = pending + block
        text, pending = decoded(raw, False)
        yield text, False
        offset += len(raw) - len(pending)
    yield decoded(pending, True)[0], True


def _split_off(text: str, final: bool) -> tuple[list[str], str]:
    """The documents that a separator ends, and the rest."""
    documents, start = [], 0
    for match in SEPARATOR.finditer(text):
        # The two characters after a separator may be a line break that belongs to it.
        if final or match.end(1) + 2 <= len(text):
            document, start = text[start : match.start()], match.end()
            documents.append(
                document[:-1].removesuffix("\r") if document[-1:] == "\n" else document
            )
    return documents, text[start:]


def _cut_up(text: str, spare: int = 0) -> list[str]:
    """Pieces that depend on the document alone; its last `spare` characters may belong to a
    separator, and do not count."""
    pieces, start = [], 0
    while len(text) - start > 2 * PIECE_CHARACTERS + spare:
        end = _cut(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _cut(text: str, low: int, high: int) -> int:
    """Where to cut between two places: before white space that follows a letter or digit, since no
    pre-tokenizer joins the two."""
    for space in "\n\r \t":
        at = text.rfind(space, low, high)
        while at > low:
            if text[at - 1].isalnum():
                return at
            at = text.rfind(space, low, at)
    return high
