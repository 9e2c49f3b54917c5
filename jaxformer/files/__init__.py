"""Reads and writes files of text and JSON whole, on a disk or in a bucket; `stores` has what the
two do each in its own way."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from jaxformer.files.stores import ROOM, ConfigError, kind_of, store_of

__all__ = [
    "ConfigError",
    "first_of",
    "is_remote",
    "lexists",
    "located",
    "parse_object",
    "read_file",
    "read_object",
    "read_text",
    "replacing",
    "store_of",
    "write_text",
]

MOST_DIGITS = 300  # of a whole number in a JSON file: more overflow a float


def located(text: str | Path) -> Path:
    """Makes the path that a user states: that of universal_pathlib, which has the methods of
    `Path`, for a URL such as gs://bucket/run; `~` is the home directory. To be called once, where
    an argument or a setting enters. Raises ConfigError where nothing here opens such URLs."""
    if not isinstance(text, str):
        return text
    if not is_remote(text):
        return Path(os.path.expanduser(text))
    # Imported here, because its packages take 80 ms and a run on a disk needs none.
    from jaxformer.files.bucket import opened_url

    return opened_url(text)


def is_remote(text: str) -> bool:
    """Return whether a text names a URL, which is asked for with the credentials of whoever reads
    it."""
    return bool(re.match(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+://", text))


def lexists(path: Path) -> bool:
    """Return whether there is anything of this name: a file, a directory, a link or an object."""
    return path.is_symlink() or path.exists()


def replacing(
    path: Path, advice: str = ROOM, follow: bool = True
) -> AbstractContextManager[BinaryIO]:
    """Opens a binary file that gets the name `path` when the block ends without an error, as
    `OnDisk.replacing` says."""
    return store_of(path).replacing(advice, follow)


def write_text(path: Path, text: str, follow: bool = True) -> None:
    """Writes a text file (UTF-8) as `replacing` does. Raises ConfigError."""
    with replacing(path, follow=follow) as file:
        file.write(text.encode())


def read_object(path: Path, advice: str = "restore it, or remove it") -> dict[str, Any]:
    """Reads the object in a JSON file. Raises ConfigError, with `advice`, where there is none."""
    return parse_object(read_file(path, advice), str(path), advice)


def read_file(path: Path, advice: str = "restore it, or remove it") -> bytes:
    """Reads the bytes of a file. Raises ConfigError, with `advice`, where it cannot be read, and
    for a pipe or a device, which may never end."""
    try:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: {advice}.")
        if not path.is_file():
            raise ConfigError(f"{path} is {kind_of(path)} and not a file: {advice}.")
        return path.read_bytes()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read ({reason}): {advice}.") from error


def read_text(path: Path, advice: str = "restore it, or remove it") -> str:
    """Reads the text of a UTF-8 file. Raises ConfigError as `read_file` does."""
    try:
        return read_file(path, advice).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}): {advice}.") from None


def parse_object(text: str | bytes, where: str, advice: str) -> dict[str, Any]:
    """Parses the object that a JSON text holds; `where` names the text in the message of
    ConfigError."""

    def whole_number(digits: str) -> int:
        # No part of this package needs a number as long as this.
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    try:
        value = json.loads(text, parse_int=whole_number)
        raw = text.encode() if isinstance(text, str) else text
        if b"\\ud" in raw.lower():  # raises for a lone surrogate, which is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}): {advice}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds no JSON object, but {type(value).__name__}: {advice}.")
    return value


def first_of(problems: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """Joins the first `limit` problems for a message, and says how many more there are."""
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return between.join([*problems[:limit], *more])
