"""A source: files in a fixed order, and the documents, records or token ids that they hold."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from jaxformer.data.sources.documents import TextPiece, in_pieces, python_document, text_documents
from jaxformer.data.sources.finding import find_files
from jaxformer.data.sources.records import (
    Fields,
    Record,
    RecordField,
    column_records,
    is_text,
    json_records,
    parallel_records,
    readable,
    tsv_records,
)
from jaxformer.data.sources.source_files import (
    PYTHON,
    STRICT,
    ErrorHandler,
    ErrorPolicy,
    Skipped,
    SourceFile,
    unreadable,
)
from jaxformer.files import ConfigError

# A source of this field gives documents of text; one of others gives records.
TEXT: Fields = (RecordField("data.text_field", "text", "text"),)

# What reads a file, by its format.
TEXTS: dict[str, Callable[[SourceFile, ErrorHandler], Iterator[TextPiece]]] = {
    "text": text_documents,
    PYTHON: python_document,
}
RECORDS: dict[str, Callable[[SourceFile, Fields, ErrorHandler], Iterator[Record]]] = {
    "jsonl": json_records,
    "tsv": tsv_records,
    "parallel": parallel_records,
    "parquet": column_records,
    "arrow": column_records,
}


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


@dataclass(frozen=True)
class Source:
    """Files in a fixed order; `setting` and `spec` are what the user wrote, for messages.

    A document is named by its file alone: "<name of the file>#<index within it>", the name of a
    file that is one document, or only the index in a source of one file. So a `part` can be read
    separately, on any machine:

        skipped = Skipped()                     # {reason: (count, location of the first)}, a dict
        for piece in source.part(source.files[3:5]).pieces(skipped): ...
        total.merge(skipped)                    # in the order of the files, for total.lines()

    `left_out` describes the files of a directory that are not read; it is empty where all are.
    """

    setting: str
    spec: str
    files: tuple[SourceFile, ...]
    fields: Fields = TEXT
    policy: ErrorPolicy = STRICT
    left_out: str = ""

    def __str__(self) -> str:
        return f"{self.setting}={self.spec}"

    @property
    def of_records(self) -> bool:
        return not is_text(self.fields)

    def part(self, files: Iterable[SourceFile]) -> "Source":
        """The source with some of its files, whose documents keep their names."""
        return replace(self, files=tuple(files))

    def pieces(self, skipped: Skipped | None = None) -> Iterator[Piece]:
        """Every document or record of every file, in order; what is skipped is counted in
        `skipped`."""
        handler = ErrorHandler(self.policy, Skipped() if skipped is None else skipped)
        read = self._records if self.of_records else self._documents
        for file in self.files:
            yield from read(file, handler)

    def _documents(self, file: SourceFile, handler: ErrorHandler) -> Iterator[Piece]:
        if file.format in TEXTS:
            pieces = TEXTS[file.format](file, handler)
        else:
            records = RECORDS[file.format](file, self.fields, handler)
            pieces = (piece for (text,) in records for piece in in_pieces(str(text)))
        index = 0
        for text, ends in pieces:
            yield Piece(text, file.document(index), ends)
            index += ends

    def _records(self, file: SourceFile, handler: ErrorHandler) -> Iterator[Piece]:
        kinds = [field.kind for field in self.fields]
        shown = [field for field, kind in enumerate(kinds) if kind not in ("label", "tags")]
        for index, record in enumerate(RECORDS[file.format](file, self.fields, handler)):
            text = "\n".join(readable(record[field], kinds[field]) for field in shown)
            yield Piece(text, file.document(index), True, record, handler.location)

    def signature(self) -> str:
        """A digest of the paths, sizes and modification times of the files, which are not read; of
        those in a store, of their URLs, sizes and versions."""
        files = [(str(f.path), f.format, f.name, f.sizes_and_times()) for f in self.files]
        return fingerprint(self.fields, astuple(self.policy), files)


def find_source(
    spec: str, setting: str, fields: Fields = TEXT, policy: ErrorPolicy = STRICT
) -> Source:
    """The source that one spec names: a file, a directory, a glob, line-aligned files by braces
    ('train.{de,en}.gz'), a data set ('datasets:NAME:SPLIT'), or `stdlib`. ConfigError where there
    are no such files, or they cannot hold the fields."""
    try:
        files, left_out = find_files(spec, setting)
    except OSError as error:
        raise unreadable(f"{setting}: {spec}", error) from None
    needed = " and ".join(map(str, fields))
    for file in files:
        if file.format in TEXTS and not is_text(fields):
            raise ConfigError(
                f"{setting}={spec}: {file.path} is plain text, and data.objective needs records of"
                f" {needed}: give a .jsonl, .tsv or .parquet file, or line-aligned files as in"
                " 'train.{de,en}'."
            )
        count = len(file.beside) + 1
        if file.format == "parallel" and count != len(fields):
            raise ConfigError(
                f"{setting}={spec} names {count} line-aligned files, and data.objective takes"
                f" {len(fields)}: {needed}."
            )
    return Source(setting, spec, files, fields, policy, left_out)


def fingerprint(*summary: object) -> str:
    """A short digest of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(summary).encode(), digest_size=16).hexdigest()
