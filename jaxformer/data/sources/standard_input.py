"""Standard input as a file, because it can be read only once, and a source is read several
times."""

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import BinaryIO

from jaxformer.data.directories import make_folder
from jaxformer.data.sources.reading import READ_BYTES
from jaxformer.files import ConfigError, replacing


def spooled(where: str, cache: Path, suffix: str) -> Path:
    """The file of a suffix below `cache` that holds all of standard input, named by a digest of it.
    `where` is the setting, for messages."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        what = "a terminal" if sys.stdin and not sys.stdin.closed else "closed"
        raise ConfigError(
            f"{where} is standard input, which is {what}: pipe text into it, as in `zcat"
            " corpus.txt.gz | ...`."
        )
    return _spooled(sys.stdin.buffer, where, cache / "stdin", suffix)


@functools.cache  # the stream ends with its first reading, and a source may be found twice
def _spooled(stream: BinaryIO, where: str, folder: Path, suffix: str) -> Path:
    make_folder(folder)
    draft, digest = folder / f"{os.getpid()}{suffix}", hashlib.blake2b(digest_size=16)
    with replacing(draft, "see data.cache_dir") as file:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            file.write(block)
        if not file.tell():
            told = "is standard input, which is empty: pipe text into it, for one setting only"
            raise ConfigError(f"{where} {told}.")
    path = folder / f"{digest.hexdigest()}{suffix}"
    if path.exists():  # keeps its modification time, and with it what was made of it
        draft.unlink()
    else:
        draft.replace(path)
    return path
