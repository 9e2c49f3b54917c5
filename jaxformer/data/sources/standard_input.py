"""Standard input as a file: it can be read once, and a source is read again for each pass."""

import functools
import hashlib
import sys
import uuid
from pathlib import Path
from typing import BinaryIO

from jaxformer.config import ConfigError
from jaxformer.data.sources.reading import READ_BYTES
from jaxformer.data.writing import make_folder

# What stands for standard input, and the suffix of the file it is kept in.
SPECS = {"-": ".txt", "-.jsonl": ".jsonl", "-.tsv": ".tsv"}


def spooled(spec: str, setting: str, cache: Path) -> Path:
    """The file below `cache` that all of standard input was written to, named by a digest of it.
    Raises ConfigError."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        what = "a terminal" if sys.stdin and not sys.stdin.closed else "closed"
        raise ConfigError(
            f"{setting}={spec} is standard input, which is {what}: pipe text into it, as in `zcat"
            " corpus.txt.gz | ...`."
        )
    return _spooled(sys.stdin.buffer, f"{setting}={spec}", cache / "stdin", SPECS[spec])


@functools.cache  # the stream ends with its first reading, and a source may be found twice
def _spooled(stream: BinaryIO, where: str, folder: Path, suffix: str) -> Path:
    make_folder(folder)
    draft, digest = folder / f"{uuid.uuid4().hex}.tmp", hashlib.blake2b(digest_size=16)
    try:
        with open(draft, "wb") as file:
            while block := stream.read(READ_BYTES):
                digest.update(block)
                file.write(block)
            size = file.tell()
        if not size:
            raise ConfigError(
                f"{where} is standard input, which is empty: pipe text into it, for one setting"
                " alone."
            )
        path = folder / f"{digest.hexdigest()}{suffix}"
        if not path.exists():  # else its time of change stays, and with it what was made of it
            draft.replace(path)
        return path
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be kept in {folder} ({error.strerror or error}): see data.cache_dir."
        ) from None
    finally:
        draft.unlink(missing_ok=True)
