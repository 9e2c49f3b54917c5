"""The rows that batches are made of: numbered, each a few arrays, the same whenever it is asked
for."""

import abc
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.examples import ExampleStore
from jaxformer.data.store import TokenStore
from jaxformer.files import ConfigError

if TYPE_CHECKING:
    import grain

# One row as arrays [T], or a batch of them as arrays [B, T]: int32, weights float32.
NumpyBatch = dict[str, np.ndarray]
SOURCE_ARRAYS = ("source", "source_segment_ids")
# The array of a batch of a mixture with the index of the source of each row, int32 [B].
SOURCE_IDS = "source_ids"


class RowFormat(NamedTuple):
    """How a row is laid out, as the model reads it.

    `length` is the number of tokens of a row, `source_length` that of a row of sources (an
    encoder-decoder's). With `marks` rows begin with [CLS] and end with [SEP], where the tokenizer
    has these (an encoder's). `token_types` is how many types of tokens the model has, 0 for none;
    where `pair_target` is a name, a row holds two texts, and under that name whether the second
    follows the first. `cut` is what a long example loses first: "prompt", the start of its prompt,
    or "end", its end alone.
    """

    length: int
    source_length: int
    marks: bool = False
    token_types: int = 0
    pair_target: str = ""
    cut: str = "prompt"

    def lengths(self, names: Iterable[str]) -> dict[str, int]:
        """The length of each of the arrays of a row with these names."""
        return {
            name: self.source_length if name in SOURCE_ARRAYS else self.length for name in names
        }


class Drawn(NamedTuple):
    """What a run draws of a source: rows, their share of all, and how often that is each of its
    rows."""

    name: str
    rows: int
    share: float
    epochs: float


class Rows(abc.ABC):
    """Rows by number, and the counts of the text that they are made of.

    `window` is how many tokens a row takes where rows are cut from text, 0 where each holds what it
    can; `filled` is the fraction of the rows that holds tokens.
    """

    tokens: int
    documents: int
    bytes: int
    fingerprint: str
    window: int = 0
    filled: float = 1.0

    def take_counts(self, store: TokenStore | ExampleStore) -> None:
        self.tokens = store.tokens
        self.documents = store.documents
        self.bytes = store.bytes
        self.fingerprint = store.fingerprint

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many rows there are in an epoch."""

    @abc.abstractmethod
    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        """Row `index`; what is random in it is drawn from `rng`."""

    def __getitem__(self, index: int) -> NumpyBatch:
        """Row `index` with randomness of its own, for evaluation."""
        return self.row(index, np.random.default_rng(index))

    def most_segments(self) -> int | None:
        """The highest segment id of a row, in which segments are numbered from 1 in order and
        padding comes last; None if it is not known."""
        return None

    def sources(self, name: str) -> "list[tuple[str, Rows]]":
        """The rows of each source by its name; `name` is that of a single source."""
        return [(name, self)]

    def shares(self, steps: int, batch_size: int) -> list[Drawn]:
        """What a run of so many steps draws of each source, where there are several."""
        return []

    @property
    def numbers(self) -> int:
        """One more than the highest number of a row."""
        return len(self)

    def order(self, seed: int, batch_size: int) -> "grain.MapDataset[int]":
        """The numbers of the rows that a run reads, as an endless dataset: all rows in each epoch,
        shuffled anew."""
        return numbers_below(len(self)).shuffle(seed=seed).repeat()


def numbers_below(count: int) -> "grain.MapDataset[int]":
    """The numbers from 0 to `count` - 1 as a dataset."""
    import grain  # its start takes over a second, which commands without batches do without

    return grain.MapDataset.range(count)


def numbered(sizes: list[int]) -> np.ndarray:
    """The segments of pieces of these sizes, from 1: int32 [sum of sizes]."""
    return np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)


class TextRows(Rows):
    """Rows cut from a store, in order: row i reads `window` tokens from place i `stride` on, the
    last one maybe fewer."""

    def __init__(self, store: TokenStore, window: int, stride: int) -> None:
        self.store = store
        self.window = window
        self.stride = stride
        self.take_counts(store)

    def __len__(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.stride))

    def most_segments(self) -> int | None:
        """As `Rows.most_segments`, where each document of a row is a segment."""
        ends = self.store.ends()
        starts = np.arange(len(self), dtype=np.int64) * self.stride
        # A document that begins in a row after its first token is a segment more.
        stops = np.searchsorted(ends, starts + self.window)
        begun = stops - np.searchsorted(ends, starts + 1, side="right")
        return int(begun.max(initial=0)) + 1

    def weights(self, start: int, used: int) -> np.ndarray:
        """1 for each target of `used` places from `start` on, and 0 for a BOS: float32 [used]."""
        return self.store.is_text(start + 1, start + 1 + used).astype(np.float32)

    def segments(self, start: int, used: int) -> np.ndarray:
        """The documents of `used` places from `start` on, numbered from 1: int32 [used].

        The end token before a document is the first token of its segment, so the first token of the
        document is a target too; a document that begins with a BOS is a segment from it on.
        """
        before = 0 if self.store.beginning else 1
        begins = self.store.boundaries(start, start + used + before) - start - before
        segments = np.zeros(used, np.int32)
        segments[begins[begins > 0]] = 1
        return np.cumsum(segments, dtype=np.int32) + 1


class CausalRows(TextRows):
    """Each token of a store but the first, and the BOS of documents, is a target once.

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
        weights = self.weights(start, used)
        row = {"tokens": window[:-1], "targets": window[1:], "weights": weights}
        row |= {"segment_ids": self.segments(start, used)} if self.packed else {}
        return padded(row, dict.fromkeys(row, self.stride))


class WindowRows(TextRows):
    """Row i reads the T + 1 tokens from place i of the store on, of which all but the last predict
    the next one.

    A run draws its rows with replacement, from all places at which a whole window begins. Its
    length in epochs counts tokens: an epoch is as many windows as the store has rows.
    """

    def __init__(self, store: TokenStore, data: DataConfig) -> None:
        super().__init__(store, data.sequence_length + 1, data.sequence_length)

    @property
    def numbers(self) -> int:
        return max(0, self.tokens - self.window + 1)

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        window = self.store.read(int(index), int(index) + self.window)
        weights = self.weights(int(index), self.window - 1)
        return {"tokens": window[:-1], "targets": window[1:], "weights": weights}

    def order(self, seed: int, batch_size: int) -> "grain.MapDataset[int]":
        """The places of the windows of a run, as an endless dataset: entry
        `step * batch_size + row` is that of a row of a step."""
        count = self.numbers
        return numbers_below(sys.maxsize).map(lambda number: window_start(seed, number, count))


def check_windows(data: DataConfig, objective: str, of_text: bool) -> None:
    """Raises ConfigError where data.order=random asks for windows of anything but one stream of
    text: of records, of rows with segments, or of rows that an objective makes otherwise."""
    if not of_text or data.packing != "stream":
        raise ConfigError(
            "data.order=random draws windows of one stream of text, for data.objective=causal with"
            f" data.packing=stream, and here are data.objective={objective} and"
            f" data.packing={data.packing}: set data.order=epochs, or change these two."
        )


def window_start(seed: int, number: int, count: int) -> int:
    """Where window `number` of a sequence of random windows begins: any of the `count`
    positions 0 to count - 1, each as likely, independently of the other windows.

    Drawn by Philox, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3"): `seed` is its key and `number` its counter, both at least 0, so that any
    window is computed alone, in any order and by any process.
    """
    # A window may take several numbers of the generator, which counts them in its lowest 64 bits.
    generator = np.random.Philox(key=seed, counter=number << 64)
    return int(np.random.Generator(generator).integers(count))


def padded(row: NumpyBatch, lengths: dict[str, int]) -> NumpyBatch:
    """Each array filled with zeros to its length: token 0, weight 0, segment 0."""
    longer = {name: np.zeros(lengths[name], array.dtype) for name, array in row.items()}
    for name, array in row.items():
        longer[name][: len(array)] = array
    return longer
