"""The rows that batches are made of: numbered, each a few arrays, the same whenever it is asked
for."""

import abc
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.store import TokenStore

# One row as arrays [T], or a batch of them as arrays [B, T]: int32, weights float32.
NumpyBatch = dict[str, np.ndarray]


class RowFormat(NamedTuple):
    """How a row is laid out, as the model reads it.

    `length` is how many tokens a row has, `source_length` how many a row of sources (an
    encoder-decoder's). With `marks` rows begin with [CLS] and end with [SEP], where the tokenizer
    has these (an encoder's). `token_types` is how many kinds of tokens the model tells apart, 0 for
    none; with `next_sentence` a row holds two texts, and says whether the second follows the first.
    """

    length: int
    source_length: int
    marks: bool = False
    token_types: int = 0
    next_sentence: bool = False


class Rows(abc.ABC):
    """Rows by number, and what the text holds that they are made of.

    `window` is how many tokens a row takes where rows are cut from text, 0 where each holds what it
    can; `filled` is the part of the rows that holds tokens.
    """

    tokens: int
    documents: int
    bytes: int
    fingerprint: str
    window: int = 0
    filled: float = 1.0

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many rows there are in an epoch."""

    @abc.abstractmethod
    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        """Row `index`, with what is random in it drawn from `rng`."""

    def __getitem__(self, index: int) -> NumpyBatch:
        """Row `index` with randomness that is its own, for evaluation."""
        return self.row(index, np.random.default_rng(index))

    def sources(self, name: str) -> "list[tuple[str, Rows]]":
        """What the rows are of, by name; `name` is that of a single source."""
        return [(name, self)]

    def order(self, seed: int, batch_size: int) -> Any:
        """The numbers of the rows that a run reads, as a grain dataset without end: each epoch all,
        shuffled anew."""
        import grain

        return grain.MapDataset.range(len(self)).shuffle(seed=seed).repeat()


class TextRows(Rows):
    """Rows cut from a store, in order: row i reads `window` tokens from place i `stride` on, the
    last one maybe fewer."""

    def __init__(self, store: TokenStore, window: int, stride: int) -> None:
        self.store, self.window, self.stride = store, window, stride
        self.tokens, self.documents, self.bytes = store.tokens, store.documents, store.bytes
        self.fingerprint = store.fingerprint

    def __len__(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.stride))

    def segments(self, start: int, used: int) -> np.ndarray:
        """The documents of `used` places from `start` on, numbered from 1.

        The end token before a document is the first of its segment, so a text is learnt from its
        very start and every token but the store's first stays a target.
        """
        begins = self.store.boundaries(start, start + used + 1) - start - 1
        segments = np.zeros(used, np.int32)
        segments[begins[begins > 0]] = 1
        return np.cumsum(segments, dtype=np.int32) + 1


class CausalRows(TextRows):
    """Each token of a store but the first is a target once.

    Row i reads tokens i T to i T + T; a last row that the store cannot fill is padded (token 0,
    weight 0, segment 0).
    """

    def __init__(self, store: TokenStore, data: DataConfig) -> None:
        super().__init__(store, data.sequence_length + 1, data.sequence_length)
        self.packed = data.packing == "documents"

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        start = int(index) * self.stride
        window = self.store.read(start, start + self.window)
        used = len(window) - 1
        row = {"tokens": window[:-1], "targets": window[1:], "weights": np.ones(used, np.float32)}
        row |= {"segment_ids": self.segments(start, used)} if self.packed else {}
        return padded(row, dict.fromkeys(row, self.stride))


def padded(row: NumpyBatch, lengths: dict[str, int]) -> NumpyBatch:
    """Each array filled up with zeros to its length: no token's weight, and segment 0."""
    return {name: _filled_up(array, lengths[name]) for name, array in row.items()}


def _filled_up(array: np.ndarray, length: int) -> np.ndarray:
    if len(array) == length:
        return array
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer
