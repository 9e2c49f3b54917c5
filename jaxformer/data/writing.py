"""Files that appear whole or not at all, and one process at a time where the machine can tell."""

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxformer.config import ConfigError
from jaxformer.settings import Log


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when the block ends well; otherwise nothing is left of
    it.

    Raises ConfigError where it cannot be written, as on a disk that is full.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(draft, "wb") as file:
            yield file
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}. Make room or name another"
            " directory; what was finished before is kept."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(directory: Path, log: Log, shared: bool = False) -> Iterator[bool]:
    """Makes a directory and holds it against other processes of this machine until the block ends,
    or the process does.

    Those that hold it `shared` are at work at the same time, and the others wait for them. False
    where the file system cannot lock: work may then be done twice, and comes out the same. Raises
    ConfigError where it cannot be made.
    """
    make_folder(directory)
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    handle = os.open(directory, os.O_RDONLY)
    try:
        locked = True
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that is at work in {directory}")
            fcntl.flock(handle, kind)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(handle)


def make_folder(directory: Path) -> None:
    """Makes a directory of the cache. Raises ConfigError where that is not allowed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {directory} cannot be made ({error.strerror or error}): set it to one"
            " that can be written."
        ) from None
    if not os.access(directory, os.W_OK):
        raise ConfigError(
            f"data.cache_dir: {directory} cannot be written: set it to a directory that can."
        )
