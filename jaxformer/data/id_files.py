"""Files of token ids that were made elsewhere: as a source of data, and as arrays whose blocks are
compared with their digests as they are read.

`jaxformer.data.ids`, which makes the index of their documents, is imported where a run has such a
source.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxformer.data.sources import Source
from jaxformer.data.sources.finding import ID_SUFFIXES, find_id_files
from jaxformer.data.sources.records import Fields, is_text
from jaxformer.data.sources.source_files import unreadable
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer

# An even number, as the test for ids of another width needs.
BLOCK_IDS = 1 << 22


@dataclass(frozen=True)
class IdFiles(Source):
    """Files of token ids, and the tokenizer that made them, which `of` gives."""

    tokenizer: Tokenizer | None = None

    def of(self, tokenizer: Tokenizer | None) -> "IdFiles":
        """The same files with their tokenizer. Raises ConfigError where there is none."""
        found = replace(self, tokenizer=tokenizer)
        found.made_by()
        return found

    def made_by(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError where there is none."""
        if self.tokenizer is None:
            told = "holds token ids, and tokenizer.path is empty: set it to their tokenizer.json"
            raise ConfigError(f"{self} {told}.")
        return self.tokenizer


def find_ids(spec: str, setting: str, fields: Fields) -> IdFiles | None:
    """The files of ids that a spec names by their suffix, None where it names something else.

    Raises ConfigError where there is no such file, and for an objective that reads records.
    """
    if Path(spec).suffix.lower() not in ID_SUFFIXES or os.path.isdir(os.path.expanduser(spec)):
        return None
    try:
        files = find_id_files(spec, setting)
    except OSError as error:
        raise unreadable(f"{setting}: {spec}", error) from None
    if not is_text(fields):
        told = "holds token ids of text, and data.objective reads records: name their source"
        raise ConfigError(f"{setting}: {spec} {told}.")
    return IdFiles(setting, spec, files, fields)


@dataclass(frozen=True)
class IdArray:
    """Ids in a file outside the store: their type, the byte at which they begin, their number."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int

    def mapped(self) -> np.ndarray:
        """The ids [count], mapped and not read."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The ids by blocks, each with the place of its first."""
        ids = self.mapped()
        return ((start, ids[start : start + BLOCK_IDS]) for start in range(0, len(ids), BLOCK_IDS))


class VerifiedIds:
    """The ids of a file, of which slices are taken. Each block of `BLOCK_IDS` is compared with its
    digest (`digests`: uint8 [blocks, 16], of ids as `dtype`) when something of it is first read."""

    def __init__(self, array: IdArray, digests: np.ndarray, dtype: np.dtype) -> None:
        self._array, self._ids, self._digests = array, array.mapped(), digests
        self._dtype = dtype
        self._verified = np.zeros(len(digests), bool)

    def __getitem__(self, places: slice) -> np.ndarray:
        """Ids start to stop. Raises ConfigError where they are not those that were indexed."""
        first, last = places.start // BLOCK_IDS, (places.stop - 1) // BLOCK_IDS
        for block in range(first, last + 1):
            if not self._verified[block]:
                self._verify(block)
        return self._ids[places]

    def verify(self) -> None:
        """Compares all blocks that were not yet read. Raises ConfigError as slices do."""
        for block in np.flatnonzero(~self._verified):
            self._verify(int(block))

    def _verify(self, block: int) -> None:
        start = block * BLOCK_IDS
        ids = self._ids[start : start + BLOCK_IDS]
        if digest_of_ids(ids, self._dtype) != self._digests[block].tobytes():
            raise ConfigError(
                f"{self._array.path} was altered since it was first read, though its size and time"
                f" are as they were (ids {start:,} to {start + len(ids):,} have another checksum):"
                " restore it; or, if it was changed on purpose, `touch` it to have it read as new"
                " data."
            )
        self._verified[block] = True


def digest_of_ids(ids: np.ndarray, dtype: np.dtype) -> bytes:
    """A digest of ids (16 bytes) as `dtype` holds them, whatever holds them here; empty where it
    cannot hold them."""
    held = ids.astype(dtype, copy=False)
    if not np.array_equal(held, ids):
        return b""
    return hashlib.blake2b(held.tobytes(), digest_size=16).digest()
