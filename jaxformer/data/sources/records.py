"""Reads records with named fields from .jsonl, .tsv and line-aligned files.

pyarrow and `datasets` read such files too. But they end at the first malformed record and name
neither its line nor its byte, and they take the type of a column from its first rows, so that a
label 3 after a label "a" is an error. So data.malformed and data.undecodable need these readers.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

from jaxformer.data.sources.error_policy import ErrorHandler, RecordError
from jaxformer.data.sources.source_files import SourceFile, is_blank, text_lines
from jaxformer.files import ConfigError
from jaxformer.tokenizer.messages import ASSISTANT, checked_messages, require_assistant

# A text, a label, the words of a text or their tags, messages as the JSON of each, or a prompt and
# completions (not empty), which are texts or messages; a record has one for each field.
Value = str | tuple[str, ...]
Record = tuple[Value, ...]
Kind = Literal["text", "label", "words", "tags", "messages", "prompt", "completion"]


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
RawRow = TypeVar("RawRow")


def is_text(fields: Fields) -> bool:
    """Whether what is read is text alone, which may be in other files than records are."""
    return [field.kind for field in fields] == ["text"]


def json_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of a .jsonl file: one object on each line."""
    lines = text_lines(file.path, handler)
    full = ((number, line) for number, line in lines if line and not line.isspace())
    return checked_records(full, _json_value, fields, handler, f"{file.path}, line")


def tsv_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of a .tsv file: columns separated by tabs, named by the first line."""
    lines = text_lines(file.path, handler)
    if (first := next(lines, None)) is None:
        return iter(())
    names = (first[1] or "").split("\t")
    check_names(names, fields, f"{file.path}, line 1")

    def columns(line: str) -> dict[str, str]:
        values = line.split("\t")
        if len(values) != len(names):
            raise RecordError(
                "lines with another number of columns",
                f" has {len(values)} columns, and the first line names {len(names)}"
                f" ({', '.join(map(repr, names))}): separate columns by single tabs.",
            )
        return dict(zip(names, values, strict=True))

    # A line of tabs alone is a record of empty fields.
    full = ((n, line) for n, line in lines if line and ("\t" in line or not line.isspace()))
    return checked_records(full, columns, fields, handler, f"{file.path}, line")


def parallel_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Record n is line n of each of the line-aligned files, in the order of the fields."""
    where = " and ".join(map(str, (file.path, *file.beside)))
    lines = _aligned(file, fields, where, handler)
    return checked_records(lines, dict, fields, handler, f"{where}, line")


def checked_records(
    rows: Iterable[tuple[int, RawRow]],
    parse: Callable[[RawRow], object],
    fields: Fields,
    handler: ErrorHandler,
    where: str,
) -> Iterator[Record]:
    """The fields of each numbered row, of which `parse` makes an object or raises RecordError."""
    alone = is_text(fields)
    for number, row in rows:
        handler.location = f"{where} {number}"
        try:
            record = _record(parse(row), fields)
        except RecordError as record_error:
            handler.malformed(record_error, handler.location)
            continue
        if alone and is_blank(str(record[0])):
            handler.blank(handler.location)
        else:
            yield record


def check_names(names: Iterable[str], fields: Fields, where: str) -> None:
    """Raises ConfigError where a table has no column for a field."""
    try:
        for field in fields:
            _require(dict.fromkeys(names), field)
    except RecordError as record_error:
        raise ConfigError(f"{where}{record_error}") from None


def _json_value(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        message = f" is not JSON ({error}): a .jsonl file holds one JSON object on each line."
        raise RecordError("lines that are not JSON", message) from None


def _aligned(
    file: SourceFile, fields: Fields, where: str, handler: ErrorHandler
) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of lines that belong together, and these by the names of the fields, without those
    of which one is skipped."""
    paths, names = (file.path, *file.beside), [field.name for field in fields]
    readers = [text_lines(path, handler) for path in paths]
    for number, lines in enumerate(itertools.zip_longest(*readers), 1):
        if None in lines:
            # One file has ended: count the lines of each.
            counts = [
                number + sum(1 for _ in reader) if line else number - 1
                for line, reader in zip(lines, readers, strict=True)
            ]
            pairs = zip(paths, counts, strict=True)
            lengths = " and ".join(f"{path} has {count:,} lines" for path, count in pairs)
            raise ConfigError(f"{lengths}: line n of each must belong together.")
        texts = tuple(text for _, text in lines if text is not None)
        if len(texts) < len(paths):
            continue
        if all(map(is_blank, texts)):
            handler.blank(f"{where}, line {number}")
        else:
            yield number, dict(zip(names, texts, strict=True))


def _record(row: object, fields: Fields) -> Record:
    record = tuple(_value(row, field) for field in fields)
    counts = {
        field.name: len(value)
        for field, value in zip(fields, record, strict=True)
        if field.kind in ("words", "tags")
    }
    if len({*counts.values()}) > 1:
        numbers = " and ".join(f"the field {name!r} {count}" for name, count in counts.items())
        raise RecordError(
            "records with more tags than words, or fewer",
            f": {numbers} entries: give one tag for each word.",
        )
    if fields[0].kind == "prompt":
        return one_pair(*record)
    return record


def one_pair(prompt: Value, *sides: Value) -> Record:
    """A prompt and the completions of it. Of messages the prompt is those before the answers, and a
    completion is the one message that answers it.

    Where the prompt is no messages (a text, or missing), the sides are whole conversations that
    differ in their last message. Texts stay as they are. Raises RecordError.
    """
    texts = [isinstance(side, str) for side in sides]
    if all(texts):
        if isinstance(prompt, str):
            return prompt, *sides
        state = "is a list of messages" if prompt else "is missing"
        raise _no_pair(
            f"the prompt {state}, and chosen and rejected are strings: give all three as strings,"
            " or all as messages"
        )
    if any(texts):
        raise _no_pair("one of chosen and rejected is a string, the other a list of messages")
    conversations = [
        side if isinstance(prompt, str) or not prompt else (*prompt, *side) for side in sides
    ]
    before = [messages[:-1] for messages in conversations]
    if before[0] != before[1]:
        raise _no_pair(
            "the conversations differ before their last message: both have to answer one prompt"
        )
    for name, messages in zip(("chosen", "rejected"), conversations, strict=True):
        answer = json.loads(messages[-1])
        if answer["role"] != ASSISTANT:
            raise _no_pair(f"the last message of {name} has the role {answer['role']!r}")
        if not answer.get("content", "").strip() and not answer.get("tool_calls"):
            raise _no_pair(f"the last message of {name} is empty")
    if not before[0]:
        raise _no_pair("nothing is before the answers: give the messages of the prompt")
    return before[0], *(messages[-1:] for messages in conversations)


def _no_pair(fault: str) -> RecordError:
    return RecordError(
        "records whose messages are no pair",
        f": {fault}. Each side ends with one message of the role {ASSISTANT!r}, after the messages"
        " of the prompt.",
    )


def _require(row: object, field: RecordField) -> dict[str, object]:
    """A row that has a field, which a prompt may lack. Raises RecordError for another, and for what
    is no object."""
    name = field.name
    if not isinstance(row, dict) or (name not in row and field.kind != "prompt"):
        shown = "it is no object"
        if isinstance(row, dict):
            shown = f"its fields are {', '.join(map(repr, row))}"
        remedy = f"data.objective reads the {field.kind} there, so give it that name"
        if field.setting:
            remedy = f"set {field.setting} to the one that holds the {field.kind}"
        if isinstance(row, dict) and "messages" in row:
            remedy += ", or for conversations data.objective=sft and data.messages_field=messages"
        raise RecordError(
            f"records without the field {name!r}", f" has no field {name!r} ({shown}): {remedy}."
        )
    return row


def _value(row: object, field: RecordField) -> Value:
    entries, name = _require(row, field), field.name
    if name not in entries:
        # Conversations may begin with their prompt.
        return ()
    convert, expected = CONVERTERS[field.kind]
    value = convert(entries[name])
    if value is None:
        content = "null" if entries[name] is None else type(entries[name]).__name__
        content = "empty" if entries[name] == "" else content
        raise RecordError(
            f"records whose field {name!r} is {content}",
            f": the field {name!r} is {content}, not {expected};"
            f" see {field.setting or 'data.objective'}.",
        )
    try:
        (value if isinstance(value, str) else "".join(value)).encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            "records with half a surrogate pair",
            f": the field {name!r} holds half a surrogate pair ({error}), which is no character.",
        ) from None
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _prompt(value: object) -> Value | None:
    return _conversation(value) if isinstance(value, list | tuple) else _text(value)


def _label(value: object) -> str | None:
    return str(value) if isinstance(value, (str, int)) else None


def _each(convert: Callable[[object], str | None], value: object) -> tuple[str, ...] | None:
    """The entries of a list, or of a string of words, each converted; None if one cannot be."""
    entries = value.split() if isinstance(value, str) else value
    if not isinstance(entries, list):
        return None
    texts = tuple(text for text in map(convert, entries) if text is not None)
    return texts if len(texts) == len(entries) else None


def _conversation(value: object, needs_assistant: bool = False) -> tuple[str, ...]:
    """Each message as JSON. Raises RecordError for what is no conversation, and where the assistant
    needs a turn and has none."""
    try:
        messages = checked_messages(value)
        if needs_assistant:
            require_assistant(messages)
        return tuple(json.dumps(message, ensure_ascii=False) for message in messages)
    except (ConfigError, TypeError) as error:
        # A TypeError is of values that Arrow has, and JSON has not.
        raise RecordError("records whose messages cannot be used", f": {error}.") from None


def readable(value: Value, kind: Kind) -> str:
    """The text of a field: its words joined by spaces, the contents of messages by line breaks."""
    if isinstance(value, str):
        return value
    if kind == "words":
        return " ".join(value)
    return "\n".join(json.loads(message).get("content", "") for message in value)


# For each kind of field: what converts a value of JSON (None if it cannot), and what that expects.
CONVERTERS: dict[Kind, tuple[Callable[[object], Value | None], str]] = {
    "text": (_text, "a string"),
    "label": (_label, "a string or a whole number"),
    "words": (
        functools.partial(_each, _text),
        "a list of strings, or a string of words separated by spaces",
    ),
    "tags": (
        functools.partial(_each, _label),
        "a list of strings or whole numbers, or a string of tags separated by spaces",
    ),
    "messages": (functools.partial(_conversation, needs_assistant=True), "a list of messages"),
    "prompt": (_prompt, "a string or a list of messages"),
    "completion": (
        lambda value: _prompt(value) or None,
        "a string with text or a list of messages",
    ),
}
