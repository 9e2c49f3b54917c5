"""Token ids of files outside the store, compared with their digests as they are read."""

import numpy as np

from jaxformer.data import shards
from jaxformer.data.shards import IdArray, digest_of_ids
from jaxformer.files import ConfigError


class VerifiedIds:
    """The ids of a file, of which slices are taken. Each block of `BLOCK_IDS` is compared with its
    digest (`digests`: uint8 [blocks, 16], of ids as `dtype`) when something of it is first read."""

    def __init__(self, array: IdArray, digests: np.ndarray, dtype: np.dtype) -> None:
        self._array, self._ids, self._digests = array, array.mapped(), digests
        self._dtype = dtype
        self._verified = np.zeros(len(digests), bool)

    def __getitem__(self, places: slice) -> np.ndarray:
        """Ids start to stop. Raises ConfigError where they are not those that were indexed."""
        first, last = places.start // shards.BLOCK_IDS, (places.stop - 1) // shards.BLOCK_IDS
        for block in range(first, last + 1):
            if not self._verified[block]:
                self._verify(block)
        return self._ids[places]

    def verify(self) -> None:
        """Compares all blocks that were not yet read. Raises ConfigError as slices do."""
        for block in np.flatnonzero(~self._verified):
            self._verify(int(block))

    def _verify(self, block: int) -> None:
        start = block * shards.BLOCK_IDS
        ids = self._ids[start : start + shards.BLOCK_IDS]
        if digest_of_ids(ids, self._dtype) != self._digests[block].tobytes():
            raise ConfigError(
                f"{self._array.path} was altered since it was first read, though its size and time"
                f" are as they were (ids {start:,} to {start + len(ids):,} have another checksum):"
                " restore it; or, if it was changed on purpose, `touch` it to have it read as new"
                " data."
            )
        self._verified[block] = True
