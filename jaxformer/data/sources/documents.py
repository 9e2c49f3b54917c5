"""Reads plain text as documents, which <|endoftext|> separates, in pieces of bounded size.

`datasets` cuts text at line breaks, at blank lines or at the end of a file alone.
"""

import codecs
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from jaxformer.data.sources.source_files import (
    READ_BYTES,
    ErrorHandler,
    SourceFile,
    is_blank,
    read_blocks,
    require_text,
    unreadable,
)

SEPARATOR = re.compile(r"(<\|endoftext\|>)(?:\r?\n)?")
LONGEST_SEPARATOR = len("\r\n<|endoftext|>\r\n")
PIECE_CHARACTERS = 1 << 16

# A piece of a document, and whether the document ends with it.
TextPiece = tuple[str, bool]


def text_documents(file: SourceFile, handler: ErrorHandler) -> Iterator[TextPiece]:
    """The documents of a text file that are not blank, separated by a literal <|endoftext|> (with
    one line break on either side)."""
    pieces = _documents(file.path, handler)
    if handler.policy.undecodable != "skip":
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


def _documents(path: Path, handler: ErrorHandler) -> Iterator[TextPiece]:
    """The documents of a file, whose separators and pieces do not depend on how it is read."""
    # The rest of the text that was read, the number of its document, and whether that was begun.
    pending, number, begun = "", 1, False
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
            begun = begun or bool(ready)
            yield from ((piece, False) for piece in ready)
    # Nothing is missing at the edges of a file that begins or ends with a separator.
    if begun or not is_blank(pending):
        yield from in_pieces(pending)
    elif number == 1:
        handler.blank(f"{path}, document 1")


def _decoded(path: Path, handler: ErrorHandler) -> Iterator[tuple[str, bool]]:
    """The text of a file, a block at a time, without a byte order mark; and if it is the last."""
    pending, offset = b"", 0
    for block in itertools.chain(read_blocks(path), [b""]):
        if not offset and not pending:
            require_text(path, block)
        raw = pending + block
        try:
            text, used = codecs.utf_8_decode(raw, "strict", not block)
        except UnicodeDecodeError:
            used = codecs.utf_8_decode(raw, "replace", not block)[1]
            if handler.policy.undecodable == "skip":
                text = raw[:used].decode(errors="surrogateescape")
            else:
                text = str(handler.decoded(raw[:used], str(path), offset))
        yield text if offset else text.removeprefix("\ufeff"), not block
        offset += used
        pending = raw[used:]


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
