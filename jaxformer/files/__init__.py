"""The error for invalid input, atomic writes of files, and JSON files that hold an object."""

import contextlib
import errno
import itertools
import json
import os
import re
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

LOCK = ".lock"  # the file in a run directory that the process of the run locks
REASON_CHARACTERS = 300  # of the message of an error of a store
MOST_DIGITS = 300  # of a whole number in a JSON file: more overflow a float


class ConfigError(ValueError):
    """An invalid setting or input; the message says what, where, what is allowed, what to do."""


def located(text: str | Path) -> Path:
    """The path that a user states: that of universal_pathlib, which has the methods of `Path`, for
    a URL such as gs://bucket/run. Raises ConfigError where nothing here opens such URLs."""
    if not isinstance(text, str) or not is_remote(text):
        return Path(text) if isinstance(text, str) else text
    # Imported here, because its packages take 80 ms and a run on a disk needs none.
    from jaxformer.files.stores import opened_url

    return opened_url(text)


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL, where there are no directories, links, renames or locks."""
    is_url = isinstance(path, str) and re.match(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+://", path)
    return bool(is_url) or not isinstance(path, (str, Path))


@contextlib.contextmanager
def store_errors(
    path: Path, action: str, expected: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turns an error of the store of a URL into one ConfigError: `path` cannot be `action`, such as
    "read". Errors of a local path, ConfigError and `expected` ones go on as they are. The methods
    of a path do so themselves; this is for libraries that read a URL in their own way."""
    try:
        yield
    except Exception as error:
        if not is_remote(path) or isinstance(error, (ConfigError, *expected)):
            raise
        raise ConfigError(f"{path} cannot be {action} {explained(error)}.") from error


def explained(error: BaseException) -> str:
    """The reason, in parentheses, for what a store or its library raised once all tries were over,
    and what to do."""
    reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
    return (
        f"({reason}): look whether the bucket exists (jaxformer makes none), whether its region is"
        " that of AWS_DEFAULT_REGION, whether the credentials are valid and may list, read, write"
        " and delete objects there, and whether the network reaches it; start the same command"
        " again"
    )


def lexists(path: Path) -> bool:
    """Whether there is anything of this name: a file, a directory, a link or an object."""
    return path.is_symlink() or path.exists()


def move_into(folder: Path, paths: Sequence[Path]) -> None:
    """Moves files and directories into a directory beside them, which is made; a link is moved
    itself. Objects of a store are all copied before the first one is removed."""
    if not is_remote(folder):
        folder.mkdir(exist_ok=True)
        for path in paths:
            path.rename(folder / path.name)
        return
    objects: Any = paths
    for path in objects:
        (folder / path.name).copy_from(path)
    for path in objects:
        path.remove()


@contextlib.contextmanager
def replacing(
    path: Path, advice: str = "make room, or choose another path", follow: bool = True
) -> Iterator[BinaryIO]:
    """Opens a binary file that gets the name `path` when the block ends without an error.

    The content is on the disk before the name changes, and until then an earlier file stays. After
    an error the new file is removed. Where the path is a symbolic link, the file that it leads to
    is replaced; without `follow`, as in a run directory, the link itself is replaced, with a
    warning. A URL is written by one put. Raises ConfigError, with `advice`, where the file or its
    directory cannot be written, and where the path is something else than a file.
    """
    if is_remote(path):
        with tempfile.NamedTemporaryFile() as file:
            yield file  # type: ignore[misc]
            file.flush()
            store: Any = path
            store.put(file.name)
        return
    draft = None
    try:
        replaced_link = not follow and path.is_symlink()
        target = path if replaced_link else resolved_file(path, advice)
        draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as local:
            yield local
            local.flush()
            os.fsync(local.fileno())
        os.replace(draft, target)
        sync(target.parent)
        if replaced_link:
            warnings.warn(
                f"{path} was a link. It is a file now, and what it led to was not changed: nothing"
                " in a run directory is written through a link.",
                stacklevel=3,
            )
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}): {advice}."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            if draft is not None:
                draft.unlink(missing_ok=True)


def resolved_file(path: Path, advice: str) -> Path:
    """The file that is written for a path, with symbolic links resolved. Raises ConfigError, with
    `advice`, for something else than a file."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise ConfigError(f"{path} is {_kind_of(target)} and not a file: {advice}.")
    return target


def sync(*paths: Path) -> None:
    """Flushes files, and names in directories, to the disk, where their file system can."""
    for path in itertools.filterfalse(is_remote, paths):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(descriptor)


def _kind_of(path: Path) -> str:
    if not path.exists():
        return "a link that leads to itself"
    return "a directory" if path.is_dir() else "a device, a pipe or a socket"


def append_to(path: Path) -> FileIO:
    """Opens a file without a buffer, to write at its end. Raises OSError for a symbolic link."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, "ab", buffering=0, opener=without_links)


def write_text(path: Path, text: str, follow: bool = True) -> None:
    """Writes a text file (UTF-8) as `replacing` does. Raises ConfigError."""
    with replacing(path, follow=follow) as file:
        file.write(text.encode())


def read_object(path: Path, advice: str = "restore it, or remove it") -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError, with `advice`, where there is none."""
    return parse_object(read_file(path, advice), str(path), advice)


def read_file(path: Path, advice: str = "restore it, or remove it") -> bytes:
    """The bytes of a file. Raises ConfigError, with `advice`, where it cannot be read, and for a
    pipe or a device, which may never end."""
    try:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: {advice}.")
        if not path.is_file():
            raise ConfigError(f"{path} is {_kind_of(path)} and not a file: {advice}.")
        return path.read_bytes()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read ({reason}): {advice}.") from error


def read_text(path: Path, advice: str = "restore it, or remove it") -> str:
    """The text of a UTF-8 file. Raises ConfigError as `read_file` does."""
    try:
        return read_file(path, advice).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}): {advice}.") from None


def _whole_number(digits: str) -> int:
    """A whole number of a JSON text, which no part of this package needs to be as long as this."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def parse_object(text: str | bytes, where: str, advice: str) -> dict[str, Any]:
    """The object that a JSON text holds; `where` names the text in the message of ConfigError."""
    try:
        value = json.loads(text, parse_int=_whole_number)
        raw = text.encode() if isinstance(text, str) else text
        if b"\\ud" in raw.lower():  # raises for a lone surrogate, which is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}): {advice}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds no JSON object, but {type(value).__name__}: {advice}.")
    return value


def first_of(problems: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """The first `limit` problems for a message, and how many more there are."""
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return between.join([*problems[:limit], *more])
