"""Directories of the cache: made, and claimed by one process at a time where the file system can
lock."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxformer.config.settings import Log
from jaxformer.files import ConfigError


@contextlib.contextmanager
def claimed(directory: Path, log: Log, shared: bool = False) -> Iterator[bool]:
    """Makes a directory and locks it against other processes of this machine during the block.

    Processes that claim it `shared` work at the same time, and the others wait for them. Gives
    False where the file system cannot lock: work may then be done twice, with the same result.
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
    """Makes a directory of the cache. Raises ConfigError where it cannot be made or written."""
    remedy = "set data.cache_dir to a directory that can be written"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"data.cache_dir: {directory} cannot be made ({reason}): {remedy}."
        ) from None
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"data.cache_dir: {directory} cannot be written: {remedy}.")
