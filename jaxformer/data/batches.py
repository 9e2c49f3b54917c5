"""A batch is a function of the seed and the step: rows in a shuffled order that is never held in
memory."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data.phases import length_at, row_lengths
from jaxformer.data.rows import NumpyBatch, Rows


class Batches:
    """`batches[step]` is this process's part of the global batch of that step: its rows
    process_index::process_count.

    Rows are shuffled anew each epoch, without end, and what is random in them is drawn anew. While
    data.length_warmup makes rows shorter, a batch has as many more of them. Raises ConfigError
    where a source cannot fill one row, or the batch cannot be divided evenly.
    """

    def __init__(
        self,
        rows: Rows,
        data: DataConfig,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        for name, part in rows.sources(data.train):
            if part.tokens < part.window:
                most = data.sequence_length - part.window + part.tokens
                raise ConfigError(
                    f"data.train={name} has {part.tokens:,} tokens, and a row of"
                    f" data.sequence_length={data.sequence_length:,} takes {part.window:,}: give"
                    f" more text, or set data.sequence_length to at most {most:,}."
                )
        share = _share(batch_size, process_count)
        self.examples = len(rows)
        self.steps_per_epoch = -(-self.examples // batch_size)
        self._prefetch = data.prefetch
        # Two numbers that differ between neighboring seeds: grain numbers epochs by seed + 1,
        # seed + 2 and so on.
        order, chance = (int(number) for number in np.random.SeedSequence(seed).generate_state(2))
        self._order, self._batch_size = rows.order(order, batch_size), batch_size
        made = self._order.random_map(rows.row, seed=chance)
        made = made[process_index::process_count]
        # Without drop_remainder grain divides the endless length, sys.maxsize, as a float: a batch
        # of one row then overflows. No step is near enough to that length to have a remainder.
        made = made.batch(share, drop_remainder=True, batch_fn=_stacked)
        self.lengths = row_lengths(data)
        self._dataset: Any = made.map_with_index(self._cut) if len(self.lengths) > 1 else made

    def __getitem__(self, step: int) -> NumpyBatch:
        batch: NumpyBatch = self._dataset[step]
        return batch

    def row_numbers(self, step: int) -> list[int]:
        """The rows of the data, numbered from 0, of which the global batch of a step is made."""
        first = step * self._batch_size
        return [int(self._order[number]) for number in range(first, first + self._batch_size)]

    def iterate(self, start: int = 0) -> Iterator[NumpyBatch]:
        """The batches from step `start` on, `data.prefetch` of them made ahead on a thread."""
        import grain

        if not self._prefetch:
            return map(self.__getitem__, itertools.count(start))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
        iterator: Iterator[NumpyBatch] = iter(self._dataset[start:].to_iter_dataset(options))
        return iterator

    def _cut(self, step: int, batch: NumpyBatch) -> NumpyBatch:
        """Arrays [B, T] as [B T / t, t] for the row length t of a step.

        Part c of row b becomes row c B + b. So a process, which has every n-th row, and a
        microbatch hold parts of the same rows as without the cut.
        """
        length = length_at(self.lengths, step)

        def cut(array: np.ndarray) -> np.ndarray:
            parts = array.reshape(len(array), -1, length).swapaxes(0, 1)  # [T / t, B, t]
            return np.ascontiguousarray(parts.reshape(-1, length))

        return {name: cut(array) for name, array in batch.items()}


class EvaluationBatches:
    """Batches of all rows in order; the last is filled with rows of zeros, which have weight 0."""

    def __init__(
        self, rows: Rows, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> None:
        self._rows, self._batch_size = rows, batch_size
        self._share = _share(batch_size, process_count)
        self._process, self._processes = process_index, process_count

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, index: int) -> NumpyBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self._batch_size
        mine = range(first + self._process, first + self._batch_size, self._processes)
        rows = [self._rows[row] for row in mine if row < len(self._rows)]
        padding = {name: np.zeros_like(array) for name, array in self._rows[first].items()}
        return _stacked(rows + [padding] * (self._share - len(rows)))

    def __iter__(self) -> Iterator[NumpyBatch]:
        return (self[index] for index in range(len(self)))


def evaluation_batches(
    rows: Rows, data: DataConfig, batch_size: int, process_index: int = 0, process_count: int = 1
) -> EvaluationBatches:
    """All rows as batches of one shape, in order. Raises ConfigError where there is none."""
    if not len(rows):
        name = "the held-out part of data.train"
        if data.validation:
            name = f"data.validation={data.validation}"
        told = "at least 2 are needed to predict one. Give more text"
        raise ConfigError(f"{name} has {rows.tokens} tokens: {told}.")
    return EvaluationBatches(rows, batch_size, process_index, process_count)


def _stacked(rows: list[NumpyBatch]) -> NumpyBatch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _share(batch_size: int, processes: int) -> int:
    if batch_size % processes:
        told = f"is not divisible by the {processes} processes of the run"
        remedy = f"set it to a multiple of {processes}"
        raise ConfigError(f"train.batch_size={batch_size} {told}: {remedy}.")
    return batch_size // processes
