"""Reads files, plain, .gz or .zst, as blocks of bytes and as lines, in bounded memory."""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.data.sources.error_policy import ErrorHandler, require_content
from jaxformer.files import ConfigError, is_remote
from jaxformer.files.copies import remote_blocks

READ_BYTES = 1 << 20
PACKED = (".gz", ".zst")
PACKED_BLOCK_BYTES = 1 << 16
# The format of the files of `stdlib`.
PYTHON = "python"

# The size of a file in bytes, and what changes with its content: the time of its modification in
# nanoseconds, or what a store gives for the version of an object.
Version = tuple[int, int | str]


@dataclass(frozen=True)
class SourceFile:
    """A file, its format (a key of the tables of readers), and its name within its source, which is
    empty for a source of one file.

    `beside` are the files that are read in parallel with it, line by line. `versions` are those of
    all of them by the listing of a store; of files on a disk they are asked for when needed.
    """

    path: Path
    format: str
    name: str = ""
    beside: tuple[Path, ...] = ()
    versions: tuple[Version, ...] = ()

    def document(self, index: int) -> str:
        """The name of the document with that index; a Python file is one, and gives its name."""
        if self.format == PYTHON:
            return self.name
        return f"{self.name}#{index}" if self.name else str(index)

    @property
    def size(self) -> int:
        """Bytes on the disk, or in the store."""
        return sum(size for size, _ in self.sizes_and_times())

    def sizes_and_times(self) -> Sequence[Version]:
        """The versions of it and of the files beside it."""
        if self.versions:
            return self.versions
        try:
            stats = [os.stat(path) for path in (self.path, *self.beside)]
        except OSError as error:
            raise unreadable(self.path, error) from None
        return [(status.st_size, status.st_mtime_ns) for status in stats]


def hash_fraction(name: str) -> float:
    """A number from 0 to 1 that depends on a name alone; documents are held out in its order."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_blank(text: str) -> bool:
    """Whether a text is empty or only white space."""
    return not text or text.isspace()


def unreadable(what: Path | str, error: OSError) -> ConfigError:
    """The error for a file that cannot be opened or read."""
    reason = error.strerror or error
    return ConfigError(f"{what} cannot be read: {reason}. Check its permissions and its disk.")


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a block at a time, decompressed by its suffix. Raises ConfigError."""
    suffix = path.suffix.lower()
    if path.is_char_device():
        raise ConfigError(
            f"{path} is a device, which may never end: name a file, or - for standard input."
        )
    blocks = _raw_blocks(path, PACKED_BLOCK_BYTES if suffix in PACKED else READ_BYTES)
    yield from _unpacked(blocks, path, suffix) if suffix in PACKED else blocks


def _raw_blocks(path: Path, size: int) -> Iterator[bytes]:
    """The bytes of a file, `size` at a time."""
    if is_remote(path):
        yield from remote_blocks(path, size)
        return
    try:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(size), b"")
    except OSError as error:
        raise unreadable(path, error) from None


def text_lines(path: Path, handler: ErrorHandler) -> Iterator[tuple[int, str | None]]:
    """(number from 1, text without its line break) of each line; None for text that is skipped."""
    number = offset = 0
    for whole_lines in _whole_lines(path):
        for raw in whole_lines.removesuffix(b"\n").split(b"\n"):
            number += 1
            text: str | None
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = handler.decoded(raw, f"{path}, line {number}", offset)
            yield number, text and text.removeprefix("\ufeff").removesuffix("\r")
            offset += len(raw) + 1


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The bytes of a file in parts that end with a line break, except perhaps the last."""
    begun_line: list[bytes] = []
    for number, block in enumerate(read_blocks(path)):
        if not number:
            require_content(str(path), block)
        if end := block.rfind(b"\n") + 1:
            yield b"".join((*begun_line, block[:end]))
            begun_line = []
        begun_line.append(block[end:])
    if last_line := b"".join(begun_line):
        yield last_line


def _unpacked(blocks: Iterable[bytes], path: Path, suffix: str) -> Iterator[bytes]:
    """Decompresses a sequence of gzip members or zstd frames.

    Raises ConfigError for a truncated file, which the stream reader of zstandard takes for one that
    ends there.
    """
    fresh, errors = _unpacker(suffix)
    unpacker = None
    for block in blocks:
        while block:
            unpacker = unpacker or fresh()
            try:
                yield unpacker.decompress(block)
            except errors as error:
                raise ConfigError(
                    f"{path} is damaged, or not a {suffix} file ({error}): make or fetch it again."
                ) from None
            block = b""
            if unpacker.eof:
                # What follows is padding, or the next member.
                block, unpacker = unpacker.unused_data.lstrip(b"\0"), None
    if unpacker is not None:
        raise ConfigError(f"{path} is truncated: make or fetch it again.")


def _unpacker(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    if suffix == ".gz":
        return (lambda: zlib.decompressobj(wbits=31)), zlib.error
    import zstandard  # its start takes 50 ms, and few files are .zst

    return (lambda: zstandard.ZstdDecompressor().decompressobj()), zstandard.ZstdError
