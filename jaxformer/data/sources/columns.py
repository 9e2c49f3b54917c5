"""Reads records from the columns of Parquet files, and of the Arrow files that the `datasets`
library keeps, with pyarrow, which is an extra and takes 0.3 s to start: it is imported in functions
alone."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jaxformer.data.sources.error_policy import ErrorHandler
from jaxformer.data.sources.records import Fields, Record, check_names, checked_records
from jaxformer.data.sources.source_files import PACKED, SourceFile, read_blocks, unreadable
from jaxformer.files import ConfigError, is_remote
from jaxformer.files.copies import opened

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 256
BUFFER_BYTES = 1 << 20

# A file, which of a URL is opened already, and its path for messages.
RecordBatches = Callable[["Path | BinaryIO", Path, Fields], Iterator["pyarrow.RecordBatch"]]


def column_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of a .parquet file, or of an Arrow file in the streaming format."""
    batches = _parquet_batches if file.format == "parquet" else _arrow_batches
    rows = _rows(file.path, batches, fields, handler)
    return checked_records(rows, dict, fields, handler, f"{file.path}, row")


def _rows(
    path: Path, batches: RecordBatches, fields: Fields, handler: ErrorHandler
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each row from 1, and its values by name, without rows that are skipped."""
    field_names = dict.fromkeys(field.name for field in fields)
    number = 0
    with _opened(path) as file, _arrow_errors(path):
        for batch in batches(file, path, fields):
            names = [name for name in field_names if name in batch.schema.names]
            columns = [_values(batch.column(name), f"{path}, {name}") for name in names]
            for values in zip(*columns, strict=True):
                number += 1
                row = dict(zip(names, values, strict=True))
                texts = {
                    name: handler.decoded(value, f"{path}, row {number}", 0)
                    for name, value in row.items()
                    if isinstance(value, bytes)
                }
                if None not in texts.values():
                    yield number, row | texts


def _values(column: "pyarrow.Array", where: str) -> list[Any]:
    """The values of a column, as bytes where one of its texts is not UTF-8."""
    import pyarrow

    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        if pyarrow.types.is_nested(column.type):
            # A column of messages, which no policy repairs.
            raise ConfigError(
                f"{where} is not UTF-8 text ({error}): write the file again."
            ) from None
        return column.cast("large_binary").to_pylist()


def _opened(path: Path) -> "contextlib.AbstractContextManager[Path | BinaryIO]":
    """The object of a URL, which is read by ranges; a local path as it is."""
    if not is_remote(path):
        return contextlib.nullcontext(path)
    return opened(path)


def _parquet_batches(source: Any, path: Path, fields: Fields) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    if path.suffix.lower() in PACKED:
        # In memory as a whole, since a Parquet file is read from its end.
        source = pyarrow.BufferReader(b"".join(read_blocks(path)))
    with ParquetFile(source, buffer_size=BUFFER_BYTES) as file:
        check_names(file.schema_arrow.names, fields, str(path))
        columns = [field.name for field in fields]
        yield from file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False)


def _arrow_batches(source: Any, path: Path, fields: Fields) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow

    with pyarrow.memory_map(str(source)) as file, pyarrow.ipc.open_stream(file) as reader:
        check_names(reader.schema.names, fields, str(path))
        for batch in reader:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)


@contextlib.contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Raises ConfigError for what pyarrow raises, and where it is not installed."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path} needs pyarrow, which is not installed: pip install 'jaxformer[parquet]'."
        ) from None
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and is_remote(path):
            raise
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error) from None
        raise ConfigError(
            f"{path} is truncated or damaged, or not a {path.suffix} file ({error}): make or fetch"
            " it again."
        ) from None
