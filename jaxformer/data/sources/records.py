"""Reads records with named fields: .jsonl, .tsv, line-aligned files; a fault names the file, the
line and the field."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.data.sources.error_policy import ErrorHandler, RecordError
from jaxformer.data.sources.reading import SourceFile, is_blank, text_lines

# A text, a label, or the words of a text or their tags; a record has one for each field that was
# asked for.
Value = str | tuple[str, ...]
Record = tuple[Value, ...]
Kind = Literal["text", "label", "words", "tags"]


class RecordField(NamedTuple):
    """A field of a record: the setting that names it, its name, and what it holds.

    `setting` is empty for a field that an objective reads and no setting names.
    """

    setting: str
    name: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} ({f'{self.setting}={self.name}' if self.setting else self.name})"


Fields = tuple[RecordField, ...]


def json_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of a .jsonl file: one object on each line. Raises ConfigError with the line
    number."""
    lines = (
        (number, line)
        for number, line in text_lines(file.path, handler)
        if line and not line.isspace()
    )
    return checked_records(lines, _json_object, fields, handler, f"{file.path}, line")


def tsv_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of a .tsv file: columns apart by tabs, never quoted, named by the first line.
    Raises ConfigError."""
    lines = text_lines(file.path, handler)
    if (first := next(lines, None)) is None:
        return iter(())
    names = (first[1] or "").split("\t")
    check_names(names, fields, f"{file.path}, line 1")

    def columns(line: str) -> dict[str, str]:
        found = line.split("\t")
        if len(found) != len(names):
            raise RecordError(
                "lines with another number of columns",
                f" has {len(found)} columns, and the first line names {len(names)} "
                f"({', '.join(map(repr, names))}): give each line as many, apart by single tabs.",
            )
        return dict(zip(names, found, strict=True))

    # Tabs alone are fields, all of them empty.
    full = (
        (number, line) for number, line in lines if line and ("\t" in line or not line.isspace())
    )
    return checked_records(full, columns, fields, handler, f"{file.path}, line")


def parallel_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Line n of each of as many files as there are fields, in their order. Raises ConfigError where
    one has fewer lines."""
    paths = (file.path, *file.beside)
    names = [field.name for field in fields]
    return checked_records(
        _aligned(file, handler),
        lambda lines: dict(zip(names, lines, strict=True)),
        fields,
        handler,
        f"{' and '.join(map(str, paths))}, line",
    )


def checked_records(
    rows: Iterable[tuple[int, Any]],
    parse: Callable[[Any], Any],
    fields: Fields,
    handler: ErrorHandler,
    where: str,
) -> Iterator[Record]:
    """The fields of each row, which comes with its number; `parse` makes an object of it, or raises
    a Fault.

    A text alone that is blank is no record.
    """
    alone = [field.kind for field in fields] == ["text"]
    for number, row in rows:
        try:
            record = _record(parse(row), fields)
        except RecordError as record_error:
            handler.malformed(record_error, f"{where} {number}")
            continue
        if alone and is_blank(str(record[0])):
            handler.blank(f"{where} {number}")
        else:
            yield record


def check_names(names: Iterable[str], fields: Fields, where: str) -> None:
    """Raises ConfigError where a table has no column for a field."""
    try:
        _record(dict.fromkeys(names, ""), fields)
    except RecordError as record_error:
        raise ConfigError(f"{where}{record_error}") from None


def _json_object(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        message = f" is not JSON ({error}): a .jsonl file holds one JSON object on each line."
        raise RecordError("lines that are not JSON", message) from None


def _aligned(file: SourceFile, handler: ErrorHandler) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Lines that belong together, with their number; those of which one is to be left out are."""
    paths = (file.path, *file.beside)
    readers = [text_lines(path, handler) for path in paths]
    for lines in itertools.zip_longest(*readers):
        if None in lines:
            longest = max(line[0] for line in lines if line)
            counts = [
                longest + sum(1 for _ in reader) if line else longest - 1
                for line, reader in zip(lines, readers, strict=True)
            ]
            told = " and ".join(
                f"{path} has {count:,} lines" for path, count in zip(paths, counts, strict=True)
            )
            raise ConfigError(
                f"{told}: line n of each must belong together, so give as many lines in each."
            )
        texts = tuple(text for _, text in lines if text is not None)
        if len(texts) < len(paths):
            continue
        if all(map(is_blank, texts)):
            handler.blank(f"{' and '.join(map(str, paths))}, line {lines[0][0]}")
        else:
            yield lines[0][0], texts


def _record(found: Any, fields: Fields) -> Record:
    values: list[Value] = []
    for field in fields:
        if not isinstance(found, dict) or field.name not in found:
            shown = (
                f"its fields are {', '.join(map(repr, found))}"
                if isinstance(found, dict)
                else "it is no object"
            )
            raise RecordError(
                f"records without the field {field.name!r}",
                f" has no field {field.name!r} ({shown}): {_remedy(field)}.",
            )
        value = CONVERTERS[field.kind](found[field.name])
        if value is None:
            given = "null" if found[field.name] is None else type(found[field.name]).__name__
            raise RecordError(
                f"records whose field {field.name!r} is {given}",
                f": the field {field.name!r} is {given}, not {EXPECTED[field.kind]}; "
                f"see {field.setting or 'data.objective'}.",
            )
        _check_characters(field, value)
        values.append(value)
    counts = [
        (field.name, len(value))
        for field, value in zip(fields, values, strict=True)
        if field.kind in ("words", "tags")
    ]
    if len({count for _, count in counts}) > 1:
        told = " and ".join(f"the field {name!r} {count}" for name, count in counts)
        raise RecordError(
            "records with more tags than words, or fewer",
            f": {told} entries: give one tag for each word.",
        )
    return tuple(values)


def _remedy(field: RecordField) -> str:
    if field.setting:
        return f"set {field.setting} to the one that holds the {field.kind}"
    return f"data.objective reads the {field.kind} there, so give it that name"


def _check_characters(field: RecordField, value: Value) -> None:
    text = "".join(value) if isinstance(value, tuple) else value
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            "records with half a surrogate pair",
            f": the field {field.name!r} holds half a surrogate pair ({error}): no text has one"
            " alone.",
        ) from None


def _text(value: Any) -> Value | None:
    return value if isinstance(value, str) else None


def _label(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int)) else None


def _words(value: Any) -> Value | None:
    words = value.split() if isinstance(value, str) else value
    return (
        tuple(words)
        if isinstance(words, list) and all(isinstance(word, str) for word in words)
        else None
    )


def _tags(value: Any) -> Value | None:
    tags = value.split() if isinstance(value, str) else value
    known = (
        [tag for tag in map(_label, tags) if tag is not None] if isinstance(tags, list) else None
    )
    return tuple(known) if known is not None and len(known) == len(tags) else None


CONVERTERS: dict[Kind, Callable[[Any], Value | None]] = {
    "text": _text,
    "label": _label,
    "words": _words,
    "tags": _tags,
}
EXPECTED: dict[Kind, str] = {
    "text": "a string",
    "label": "a string or a whole number",
    "words": "a list of strings, or a string of words apart by spaces",
    "tags": "a list of strings or whole numbers, or a string of tags apart by spaces",
}
