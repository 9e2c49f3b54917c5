"""A batch is a function of the seed and the step: rows cut from a store, in a shuffled order that nobody holds in memory."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data.store import TokenStore

# tokens, targets [B, T] int32 and weights [B, T] float32; for packed documents also segment_ids [B, T] int32.
Batch = dict[str, np.ndarray]


class Rows:
    """The rows of a store, in order: each of its tokens but the first is a target once.

    Row i reads tokens i T to i T + T; a last row that the store cannot fill is padded (token 0, weight 0, segment 0).
    """

    def __init__(self, store: TokenStore, data: DataConfig) -> None:
        self.store = store
        self.length = data.sequence_length
        self.packed = data.packing == "documents"

    def __len__(self) -> int:
        return max(0, -(-(self.store.tokens - 1) // self.length))

    def __getitem__(self, row: int) -> Batch:
        """One row, every array [T]."""
        start = int(row) * self.length
        window = self.store.read(start, start + self.length + 1)
        used = len(window) - 1
        weights = np.zeros(self.length, np.float32)
        weights[:used] = 1
        window = np.pad(window, (0, self.length - used))
        arrays = {"tokens": window[:-1], "targets": window[1:], "weights": weights}
        return arrays | self._segments(start, used) if self.packed else arrays

    def _segments(self, start: int, used: int) -> Batch:
        """Numbers the documents of a row from 1. The end token before a document is the first of its segment, so a text is
        learnt from its very start and every token but the store's first stays a target."""
        begins = self.store.boundaries(start, start + used + 1) - start - 1
        begins = begins[begins > 0]
        segments = np.zeros(self.length, np.int32)
        segments[begins] = 1
        segments = np.cumsum(segments, dtype=np.int32) + 1
        segments[used:] = 0
        return {"segment_ids": segments}


class Batches:
    """`batches[step]` is this process's share of the global batch of that step: its rows process_index::process_count.

    Rows are shuffled anew each epoch, without end. Raises ConfigError where the store cannot fill one row, or the
    batch cannot be shared evenly.
    """

    def __init__(
        self,
        store: TokenStore,
        data: DataConfig,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        import grain

        if store.tokens <= data.sequence_length:
            raise ConfigError(
                f"data.train={data.train} has {store.tokens:,} tokens, and a row takes data.sequence_length + 1 = "
                f"{data.sequence_length + 1:,}: give more text, or set data.sequence_length to at most {store.tokens - 1:,}."
            )
        share = _share(batch_size, process_count)
        rows = Rows(store, data)
        self.examples = len(rows)
        self.steps_per_epoch = -(-self.examples // batch_size)
        self._prefetch = data.prefetch
        # Neighbouring seeds are mixed apart, because grain numbers epochs by seed + 1, seed + 2 and so on.
        shuffled = grain.MapDataset.source(rows).shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._dataset: Any = shuffled.repeat()[process_index::process_count].batch(share, batch_fn=_stacked)

    def __getitem__(self, step: int) -> Batch:
        batch: Batch = self._dataset[step]
        return batch

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """The batches from step `start` on, `data.prefetch` of them made ahead on a thread."""
        import grain

        if not self._prefetch:
            return map(self.__getitem__, itertools.count(start))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
        iterator: Iterator[Batch] = iter(self._dataset[start:].to_iter_dataset(options))
        return iterator


class EvaluationBatches:
    """Batches over a store in order, each token but the first a target once; the last is filled up with rows of weight 0."""

    def __init__(self, rows: Rows, batch_size: int, process_index: int = 0, process_count: int = 1) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._share = _share(batch_size, process_count)
        self._process = process_index
        self._processes = process_count

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self._batch_size
        mine = range(first + self._process, first + self._batch_size, self._processes)
        rows = [self._rows[row] for row in mine if row < len(self._rows)]
        padding = {name: np.zeros_like(array) for name, array in self._rows[first].items()}
        return _stacked(rows + [padding] * (self._share - len(rows)))

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


def evaluation_batches(
    store: TokenStore, data: DataConfig, batch_size: int, process_index: int = 0, process_count: int = 1
) -> EvaluationBatches:
    """All of a store as batches of one shape, in order. Raises ConfigError where it holds no pair of tokens."""
    if store.tokens < 2:
        name = f"data.validation={data.validation}" if data.validation else "the held-out part of data.train"
        raise ConfigError(f"{name} has {store.tokens} tokens: at least 2 are needed to predict one. Give more text.")
    return EvaluationBatches(Rows(store, data), batch_size, process_index, process_count)


def _stacked(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _share(batch_size: int, processes: int) -> int:
    if batch_size % processes:
        raise ConfigError(
            f"train.batch_size={batch_size} is not divisible by the {processes} processes of the run: "
            f"set it to a multiple of {processes}."
        )
    return batch_size // processes
