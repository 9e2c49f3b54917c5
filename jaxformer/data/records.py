"""Reads records with named fields: .jsonl, .tsv, line-aligned files; a fault names the file, the line and the field."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.data.reading import text_lines

# A text, a label, or the words of a text or their tags; a record has one for each field that was asked for.
Value = str | tuple[str, ...]
Record = tuple[Value, ...]
Kind = Literal["text", "label", "words", "tags"]


class Field(NamedTuple):
    """A field of a record: the setting that names it, its name, and what it holds."""

    setting: str
    name: str
    kind: Kind


Fields = tuple[Field, ...]


def json_records(paths: Sequence[Path], fields: Fields) -> Iterator[Record]:
    """The records of a .jsonl file: one object on each line. Raises ConfigError with the line number."""
    for number, line in text_lines(paths[0]):
        if not line.strip():
            continue
        where = f"{paths[0]}, line {number}"
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON ({error}): a .jsonl file holds one JSON object on each line.") from None
        yield _record(found, fields, where)


def tsv_records(paths: Sequence[Path], fields: Fields) -> Iterator[Record]:
    """The records of a .tsv file: columns apart by tabs, never quoted, named by the first line. Raises ConfigError."""
    names: list[str] = []
    for number, line in text_lines(paths[0]):
        columns, where = line.split("\t"), f"{paths[0]}, line {number}"
        if not names:
            names = columns
            _record(dict.fromkeys(names, ""), fields, where)
        elif len(columns) == len(names):
            yield _record(dict(zip(names, columns, strict=True)), fields, where)
        elif line.strip():
            raise ConfigError(
                f"{where} has {len(columns)} columns, and the first line names {len(names)} "
                f"({', '.join(map(repr, names))}): give each line as many, apart by single tabs."
            )


def parallel_records(paths: Sequence[Path], fields: Fields) -> Iterator[Record]:
    """Line n of each of as many files as there are fields, in their order. Raises ConfigError where one has fewer lines."""
    readers = [text_lines(path) for path in paths]
    for lines in itertools.zip_longest(*readers):
        if None in lines:
            longest = max(line[0] for line in lines if line)
            counts = [
                longest + sum(1 for _ in reader) if line else longest - 1
                for line, reader in zip(lines, readers, strict=True)
            ]
            told = " and ".join(f"{path} has {count:,} lines" for path, count in zip(paths, counts, strict=True))
            raise ConfigError(f"{told}: line n of each must belong together, so give as many lines in each.")
        if any(text.strip() for _, text in lines):
            values = {field.name: text for field, (_, text) in zip(fields, lines, strict=True)}
            yield _record(values, fields, f"{' and '.join(map(str, paths))}, line {lines[0][0]}")


def _record(found: Any, fields: Fields, where: str) -> Record:
    values: list[Value] = []
    for field in fields:
        if not isinstance(found, dict) or field.name not in found:
            shown = f"its fields are {', '.join(map(repr, found))}" if isinstance(found, dict) else "it is no object"
            raise ConfigError(
                f"{where} has no field {field.name!r} ({shown}): set {field.setting} to the one that holds the {field.kind}."
            )
        value = KINDS[field.kind](found[field.name])
        if value is None:
            raise ConfigError(
                f"{where}: the field {field.name!r} is {type(found[field.name]).__name__}, "
                f"not {EXPECTED[field.kind]}; see {field.setting}."
            )
        try:
            "".join(value).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: the field {field.name!r} holds half a surrogate pair ({error}): no text has one alone."
            ) from None
        values.append(value)
    counts = [
        (field.name, len(value)) for field, value in zip(fields, values, strict=True) if field.kind in ("words", "tags")
    ]
    if len({count for _, count in counts}) > 1:
        told = " and ".join(f"the field {name!r} {count}" for name, count in counts)
        raise ConfigError(f"{where}: {told} entries: give one tag for each word.")
    return tuple(values)


def _text(value: Any) -> Value | None:
    return value if isinstance(value, str) else None


def _label(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int)) else None


def _words(value: Any) -> Value | None:
    words = value.split() if isinstance(value, str) else value
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _tags(value: Any) -> Value | None:
    tags = value.split() if isinstance(value, str) else value
    known = [tag for tag in map(_label, tags) if tag is not None] if isinstance(tags, list) else None
    return tuple(known) if known is not None and len(known) == len(tags) else None


KINDS: dict[Kind, Callable[[Any], Value | None]] = {"text": _text, "label": _label, "words": _words, "tags": _tags}
EXPECTED: dict[Kind, str] = {
    "text": "a string",
    "label": "a string or a whole number",
    "words": "a list of strings, or a string of words apart by spaces",
    "tags": "a list of strings or whole numbers, or a string of tags apart by spaces",
}
