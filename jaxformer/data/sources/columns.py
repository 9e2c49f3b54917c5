"""Reads records from the columns of Parquet files, and of the Arrow files that the `datasets`
library keeps."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.config import ConfigError
from jaxformer.data.sources.error_policy import ErrorHandler
from jaxformer.data.sources.reading import PACKED, SourceFile, read_blocks, unreadable
from jaxformer.data.sources.records import Fields, Record, check_names, checked_records

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 256
BUFFER_BYTES = 1 << 20

RecordBatches = Callable[[Path, Fields], Iterator["pyarrow.RecordBatch"]]


def parquet_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of a .parquet file, of which only the columns of `fields` are read. Raises
    ConfigError with the row."""
    return checked_records(
        _rows(file.path, _parquet_batches, fields, handler),
        dict,
        fields,
        handler,
        f"{file.path}, row",
    )


def arrow_records(file: SourceFile, fields: Fields, handler: ErrorHandler) -> Iterator[Record]:
    """The records of an Arrow file in the streaming format. Raises ConfigError with the row."""
    return checked_records(
        _rows(file.path, _arrow_batches, fields, handler),
        dict,
        fields,
        handler,
        f"{file.path}, row",
    )


def _rows(
    path: Path, batches: RecordBatches, fields: Fields, handler: ErrorHandler
) -> Iterator[tuple[int, Any]]:
    """Each row's number from 1, and its names and values; without those of which a value is to be
    left out."""
    names, number = list(dict.fromkeys(field.name for field in fields)), 0
    with _told(path):
        for batch in batches(path, fields):
            for row in zip(*(_values(batch.column(name)) for name in names), strict=True):
                number += 1
                raw = [value for value in row if isinstance(value, bytes)]
                texts = [handler.decoded(value, f"{path}, row {number}", 0) for value in raw]
                if None not in texts:
                    decoded = iter(texts)
                    values = (
                        [next(decoded) if isinstance(value, bytes) else value for value in row]
                        if raw
                        else row
                    )
                    yield number, zip(names, values, strict=True)


def _values(column: "pyarrow.Array") -> list[Any]:
    """The values of a column; those of a column of text as bytes where one of them is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast("large_binary").to_pylist()


def _parquet_batches(path: Path, fields: Fields) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    # A compressed one is held whole, since it is read from its end.
    source = (
        pyarrow.BufferReader(b"".join(read_blocks(path))) if path.suffix.lower() in PACKED else path
    )
    with ParquetFile(source, buffer_size=BUFFER_BYTES) as file:
        check_names(file.schema_arrow.names, fields, str(path))
        yield from file.iter_batches(
            ROWS_AT_ONCE, columns=[field.name for field in fields], use_threads=False
        )


def _arrow_batches(path: Path, fields: Fields) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        check_names(reader.schema.names, fields, str(path))
        for batch in reader:
            yield from (
                batch.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE)
            )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raises ConfigError for what pyarrow raises, and where it is not there."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path} is read by pyarrow, which is not installed: pip install 'jaxformer[parquet]'."
        ) from None
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error) from None
        raise ConfigError(
            f"{path} is truncated or damaged, or not a {path.suffix} file ({error}): make or fetch"
            " it again."
        ) from None
