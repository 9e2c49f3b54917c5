"""Reads records with named fields from .jsonl, .tsv, .parquet, Arrow and line-aligned files.

pyarrow and `datasets` read .jsonl and .tsv too. But they end at the first malformed record and name
neither its line nor its byte, and they take the type of a column from its first rows, so that a
label 3 after a label "a" is an error. So data.malformed needs these readers.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from jaxformer.data.documents import (
    ErrorHandler,
    Record,
    RecordError,
    SourceFile,
    Value,
    is_blank,
    text_lines,
)
from jaxformer.files import ConfigError, store_of
from jaxformer.tokenizer.chat import (
    ASSISTANT,
    BESIDE,
    NOT_RENDERED,
    checked_messages,
    learned_turns,
    rendered_message,
    with_beside,
)

Kind = Literal["text", "texts", "label", "words", "tags", "messages", "prompt", "completion"]
RawRow = TypeVar("RawRow")

EXPECTED: dict[Kind, str] = {
    "text": "a string",
    "texts": "a string or a list of strings",
    "label": "a string or a whole number",
    "words": "a list of strings, or a string of words separated by spaces",
    "tags": "a list of strings or whole numbers, or a string of tags separated by spaces",
    "messages": "a list of messages",
    "prompt": "a string or a list of messages",
    "completion": "a string with text or a list of messages",
}
ROWS_AT_ONCE = 256

# Names of roles, and those by which templates know them.
CHAT_ROLES = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "developer": "system"}


class RecordField(NamedTuple):
    """A field of a record: the setting that names it, its name, and what it holds.

    `setting` is empty for a field that an objective reads and no setting names. The name of
    messages or texts may join several fields, as in "prompt+completion".
    """

    setting: str
    name: str
    kind: Kind

    @property
    def columns(self) -> list[str]:
        """Return the names that the record has for it."""
        if self.kind in ("messages", "texts"):
            return self.name.split("+")
        return [self.name]

    def __str__(self) -> str:
        if self.setting:
            return f"{self.kind} ({self.setting}={self.name})"
        return f"{self.kind} ({self.name})"


Fields = tuple[RecordField, ...]


def is_text(fields: Fields) -> bool:
    """Return whether what is read is text alone, which may be in other files than records are."""
    return [field.kind for field in fields] == ["text"]


def json_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Return the records of a .jsonl file: one object on each line."""

    def parse(line: str) -> object:
        # JSON that is nested too deeply ends in a RecursionError.
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                "not JSON", f"{error}; a .jsonl file holds one JSON object on each line."
            ) from None

    lines = _full(text_lines(file.path, handler))
    return _checked(lines, parse, fields, handler, f"{file.path}, line")


def _full(lines: Iterator[tuple[int, str | None]], mark: str = "\n") -> Iterator[tuple[int, str]]:
    """Yield the lines that are not skipped, and not blank; one with a `mark` is not."""
    for number, line in lines:
        if line and (mark in line or not line.isspace()):
            yield number, line


def tsv_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Return the records of a .tsv file: columns separated by tabs, named by the first line."""
    lines = text_lines(file.path, handler)
    if (first := next(lines, None)) is None:
        return iter(())
    names = (first[1] or "").split("\t")
    _require_columns(names, fields, f"{file.path}, line 1")

    def parse(line: str) -> dict[str, str]:
        values = line.split("\t")
        if len(values) != len(names):
            raise RecordError(
                "another number of columns",
                f"{len(values)}, and the first line names {len(names)}"
                f" ({', '.join(map(repr, names))}). Separate columns by single tabs.",
            )
        return dict(zip(names, values, strict=True))

    # A line of tabs alone is a record of empty fields.
    return _checked(_full(lines, "\t"), parse, fields, handler, f"{file.path}, line")


def parallel_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Return records, of which n is line n of each of the line-aligned files, in the order of the
    fields."""
    paths = (file.path, *file.beside)
    names = [field.name for field in fields]
    where = " and ".join(map(str, paths))

    def rows() -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the lines that belong together, without those of which one is skipped."""
        readers = [text_lines(path, handler) for path in paths]
        for number, lines in enumerate(itertools.zip_longest(*readers), 1):
            if None in lines:
                raise ConfigError(
                    f"{where} have different numbers of lines, the shortest {number - 1:,}: line n"
                    " of each must belong together."
                )
            # data.malformed=skip gives None for a line, and its partners go with it.
            texts = [text for _, text in lines if text is not None]
            if len(texts) < len(paths):
                continue
            if all(map(is_blank, texts)):
                handler.blank(f"{where}, line {number}")
            else:
                yield number, dict(zip(names, texts, strict=True))

    return _checked(rows(), dict, fields, handler, f"{where}, line")


def column_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """Yield the records of a .parquet file, or of an Arrow file in the streaming format, which the
    library `datasets` keeps."""
    path = file.path
    try:
        # An extra, which takes 0.3 s to start.
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path} needs pyarrow, which is not installed: pip install 'jaxformer[parquet]'."
        ) from None
    # Without fields every column.
    wanted: list[str] = []
    for field in fields:
        wanted += field.columns
        if field.kind in ("messages", "prompt", "completion"):
            wanted += [*BESIDE, *NOT_RENDERED]
    try:
        with contextlib.ExitStack() as stack:
            # A few hundred rows at a time, since a row group may be the whole file.
            batches: Iterable[pyarrow.RecordBatch]
            if file.format == "arrow":
                mapped = stack.enter_context(pyarrow.memory_map(str(path)))
                reader = stack.enter_context(pyarrow.ipc.open_stream(mapped))
                batches = reader
                present = reader.schema.names
            else:
                data = stack.enter_context(store_of(path).readable())
                parquet = stack.enter_context(ParquetFile(data))
                present = parquet.schema_arrow.names
                batches = parquet.iter_batches(
                    ROWS_AT_ONCE, columns=wanted or None, use_threads=False
                )
            _require_columns(present, fields, str(path))
            names = present
            if wanted:
                names = [name for name in dict.fromkeys(wanted) if name in present]
            rows = itertools.chain.from_iterable(
                batch.select(names).to_pylist() for batch in batches
            )
            yield from _checked(enumerate(rows, 1), dict, fields, handler, f"{path}, row")
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is truncated, damaged, or not a file of columns ({error}): make or fetch it"
            " again."
        ) from None


def _checked(
    rows: Iterable[tuple[int, RawRow]],
    parse: Callable[[RawRow], object],
    fields: Fields,
    handler: ErrorHandler,
    where: str,
) -> Iterator[Record]:
    """Yield the fields of each numbered row, of which `parse` makes an object."""
    # A blank text is left out, as in a text file; a blank field of a record may mean something.
    alone = is_text(fields)
    for number, row in rows:
        handler.location = f"{where} {number}"
        try:
            handler.row = parse(row)
            values = []
            counts = {}
            for field in fields:
                value = _value(_require(handler.row, field), field, handler)
                values.append(value)
                if field.kind in ("words", "tags"):
                    counts[field.name] = len(value)
            record: Record = tuple(values)
            if len({*counts.values()}) > 1:
                numbers = " and ".join(f"the field {name!r} has {n}" for name, n in counts.items())
                raise RecordError(
                    "another number of tags than words", f"{numbers}. Give one for each."
                )
            if fields and fields[0].kind == "prompt":
                # A label of the completion stands behind it.
                sides = len(record) - (fields[-1].kind == "label")
                record = (*one_pair(*record[:sides]), *record[sides:])
        except RecordError as error:
            handler.malformed(error)
            continue
        if alone and is_blank(str(record[0])):
            handler.blank(handler.location)
        else:
            yield record


def _require_columns(names: Iterable[str], fields: Fields, where: str) -> None:
    """Refuse a table without a column for a field."""
    try:
        for field in fields:
            _require(dict.fromkeys(names), field)
    except RecordError as error:
        raise ConfigError(f"{where}: {error}") from None


def _require(row: object, field: RecordField) -> dict[str, object]:
    """Return a row that has a field, which a prompt may lack: conversations may begin with
    theirs."""
    shown = "the record is no object"
    if isinstance(row, dict):
        if field.kind == "prompt" or {field.columns[0], field.columns[-1]} <= {*row}:
            return row
        shown = f"the fields are {', '.join(map(repr, row))}"
    raise RecordError(
        f"no field {field.name!r}",
        f"{shown}; set {field.setting or 'data.objective'} to the one of the {field.kind}, or for"
        " conversations data.objective=sft and data.messages_field.",
    )


def _value(row: dict[str, Any], field: RecordField, handler: ErrorHandler) -> Value:
    if field.kind == "prompt" and field.name not in row:
        return ()
    *before, entry = [row.get(name) for name in field.columns]
    if field.kind == "texts":
        lists = [each if isinstance(each, list) else [each] for each in (*before, entry)]
        # Tables have null where a record has fewer.
        entry = [*filter(None, itertools.chain(*lists))]
    elif before:
        # An input of Alpaca may be empty, and a prompt missing.
        entries = [*filter(None, before), entry]
        if all(isinstance(each, str) for each in entries):
            question = {"role": "user", "content": "\n\n".join(entries[:-1])}
            entry = [question, {"role": ASSISTANT, "content": entry}]
        elif all(isinstance(each, list) for each in entries):
            entry = [*itertools.chain(*entries)]
        else:
            raise RecordError(f"{field.name} of several kinds", "give texts or lists of messages.")
    if field.kind in ("messages", "prompt", "completion") and isinstance(entry, list):
        entry = [_renamed(message, handler) for message in entry]
    value = _converted(entry, field.kind, row)
    if value is None:
        content = type(entry).__name__
        if entry is None:
            content = "null"
        elif entry == "":
            content = "empty"
        raise RecordError(
            f"the field {field.name!r} is {content}",
            f"it has to be {EXPECTED[field.kind]}; see {field.setting or 'data.objective'}.",
        )
    # JSON can spell half a surrogate pair ("\ud800"), which no tokenizer takes.
    try:
        "".join(value).encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            f"the field {field.name!r} holds half a surrogate pair",
            f"{error}; write the character whole.",
        ) from None
    return value


def _renamed(message: object, handler: ErrorHandler) -> object:
    """Return a message of ShareGPT as one of OpenAI, with the role by which templates know it."""
    if not isinstance(message, dict):
        return message
    if "role" not in message and "from" in message:
        message = {"role": message["from"], "content": message.get("value")}
    role = message.get("role")
    if known := CHAT_ROLES.get(str(role)):
        handler.skipped.add(f"role {role!r}, read as {known!r}", handler.location)
        message = message | {"role": known}
    return message


def _converted(value: Any, kind: Kind, row: Mapping[str, Any] = {}) -> Value | None:
    """Return what a value of JSON is as a field of this kind, None where it cannot be one. Messages
    get the tools and documents of their record, `row`."""
    if kind in ("words", "tags", "texts"):
        if isinstance(value, str):
            value = value.split()
        if not isinstance(value, list):
            return None
        # One tag, or one word, is what a label or a text is.
        texts = [_converted(entry, "label" if kind == "tags" else "text") for entry in value]
        if None in texts:
            return None
        return tuple(map(str, texts))
    if kind == "messages" or (kind in ("prompt", "completion") and isinstance(value, list | tuple)):
        try:
            messages = checked_messages(value)
            if kind == "messages":
                learned_turns(messages)
            messages[0] = with_beside(messages[0], row)
            return tuple(json.dumps(message, ensure_ascii=False) for message in messages)
        except (ConfigError, TypeError) as error:
            # A TypeError is of values that Arrow has, and JSON has not.
            raise RecordError("messages that cannot be used", f"{error}.") from None
    # A label 3 of one file is the "3" of another.
    if kind == "label" and isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or (kind == "completion" and not value):
        return None
    return value


def one_pair(prompt: Value, *sides: Value) -> Record:
    """Return a prompt and the completions of it. Of messages the prompt is those before the
    answers, and a completion is the one message that answers it.

    Where the prompt is no messages (a text, or missing), the sides are whole conversations that
    differ in their last message. Texts stay as they are.
    """
    if all(isinstance(side, str) for side in (prompt, *sides)):
        return prompt, *sides
    reason = "prompt, chosen and rejected are no pair"
    strings = "three strings"
    if len(sides) == 1:
        reason = "prompt and completion do not fit together"
        strings = "two strings"
    refusal = RecordError(
        reason,
        f"give {strings}; or messages, where each side ends with one message of the role"
        f" {ASSISTANT!r} that is not empty, after the same messages, at least one.",
    )
    if any(isinstance(side, str) for side in sides):
        raise refusal
    # In the form of TRL: sides are the answers alone, or conversations with the prompt in each.
    conversations = list(sides)
    if prompt and not isinstance(prompt, str):
        conversations = [(*prompt, *side) for side in sides]
    answers = list[Value]()
    for messages in conversations:
        answer = rendered_message(json.loads(messages[-1]))
        answers.append((json.dumps(answer, ensure_ascii=False),))
        content = answer.get("content", "").strip() or answer.get("tool_calls")
        if answer["role"] != ASSISTANT or not content:
            raise refusal
    before = [messages[:-1] for messages in conversations]
    if not before[0] or any(messages != before[0] for messages in before):
        raise refusal
    return before[0], *answers


def readable(value: Value, kind: Kind) -> str:
    """Return the text of a field: its words or texts joined by spaces, the contents of messages by
    line breaks."""
    if isinstance(value, str):
        return value
    if kind in ("words", "texts"):
        return " ".join(value)
    return "\n".join(json.loads(message).get("content", "") for message in value)
