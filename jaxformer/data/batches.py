"""A batch is a function of the seed and the step: rows in a shuffled order that is never held in
memory."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.documents import Piece, Value
from jaxformer.data.examples import open_or_encode
from jaxformer.data.records import Kind
from jaxformer.data.rows import NumpyBatch, Rows, TextRows, numbers_below, stacked
from jaxformer.data.store import open_or_build
from jaxformer.data.task import Task
from jaxformer.data.templates import ExampleRows
from jaxformer.files import ConfigError
from jaxformer.tokenizer import byte_tokenizer

# A record of each kind of field: one word, whose tag is "a" too.
INVENTED: dict[Kind, Value] = {
    "text": "a",
    "texts": ("a",),
    "label": "1",
    "prompt": "a",
    "completion": "a",
    "words": ("a",),
    "tags": ("a",),
    "messages": ('{"role": "user", "content": "a"}', '{"role": "assistant", "content": "a"}'),
}
PREFETCHED = 2  # batches made ahead on a thread
INVENTED_CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class RowBlocks:
    """The rows that a process makes of each batch: of `count` equal blocks of rows, one after the
    other, those with the `numbers`."""

    numbers: tuple[int, ...] = (0,)
    count: int = 1

    def rows(self, batch_size: int) -> list[int]:
        """Return their numbers in a batch."""
        if batch_size % self.count:
            raise ConfigError(
                f"train.batch_size={batch_size} is not divisible by the {self.count} blocks of rows"
                f" that the devices of the run hold: set it to a multiple of {self.count}."
            )
        size = batch_size // self.count
        return [block * size + row for block in self.numbers for row in range(size)]


ALL = RowBlocks()


class Batches:
    """`batches[step]` is this process's part of the global batch of that step: its rows in the
    order of the batch, which is the same for any number of processes.

    Rows are shuffled anew each epoch, without end, come in the order of the text, or are windows
    drawn at random (data.order), and what is random in them is drawn anew.
    """

    def __init__(
        self, rows: Rows, data: DataConfig, batch_size: int, seed: int, blocks: RowBlocks = ALL
    ) -> None:
        for name, source_rows in rows.sources(data.train):
            if isinstance(source_rows, TextRows) and not source_rows.has_tokens(source_rows.window):
                window = source_rows.window
                longest = data.sequence_length - window + source_rows.tokens
                raise ConfigError(
                    f"data.train={name} has {source_rows.tokens:,} tokens, and a row of"
                    f" data.sequence_length={data.sequence_length:,} takes {window:,}:"
                    f" give more text, or set data.sequence_length to at most {longest:,}."
                )
        self._here = blocks.rows(batch_size)
        self._rows = rows
        self._batch_size = batch_size
        # Two numbers that differ between neighboring seeds: grain numbers epochs by seed + 1,
        # seed + 2 and so on.
        order, chance = (int(number) for number in np.random.SeedSequence(seed).generate_state(2))
        self._order = rows.order(order, batch_size)
        # [number] is a row whose randomness depends on the seed and the number alone.
        self._made = self._order.random_map(rows.row, seed=chance)
        # As many steps as there are numbers of rows below the largest integer.
        self._dataset = numbers_below(sys.maxsize // batch_size).map(self._batch)

    @property
    def examples(self) -> int:
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.examples // self._batch_size)

    def __getitem__(self, step: int) -> NumpyBatch:
        return self._dataset[step]

    def row_numbers(self, step: int) -> list[int]:
        """Return the rows of the data, numbered from 0, of which the global batch of a step is
        made."""
        first = step * self._batch_size
        return [int(self._order[number]) for number in range(first, first + self._batch_size)]

    def iterate(self, start: int = 0) -> Iterator[NumpyBatch]:
        """Return the batches from step `start` on, `PREFETCHED` of them made ahead on a thread."""
        import grain  # as in `numbers_below`

        # One thread, because rows are made by code that holds Python's lock.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)
        return iter(self._dataset[start:].to_iter_dataset(options))

    def _batch(self, step: int) -> NumpyBatch:
        """Return the arrays [B, T] of a step."""
        first = step * self._batch_size
        return stacked([self._made[first + row] for row in self._here])


class EvaluationBatches:
    """Batches of all rows in order; the last is filled with rows of zeros, which have weight 0."""

    def __init__(self, rows: Rows, batch_size: int, blocks: RowBlocks = ALL) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._here = blocks.rows(batch_size)

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, index: int) -> NumpyBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self._batch_size
        # Of the last batch some rows, or all of this process, may be behind the end.
        mine = [first + row for row in self._here]
        rows = [self._rows[row] for row in mine if row < len(self._rows)]
        # One shape for all batches, so that one program is compiled.
        padding = {name: np.zeros_like(array) for name, array in self._rows[first].items()}
        return stacked(rows + [padding] * (len(mine) - len(rows)))

    def __iter__(self) -> Iterator[NumpyBatch]:
        return (self[index] for index in range(len(self)))


def evaluation_batches(
    rows: Rows, data: DataConfig, batch_size: int, blocks: RowBlocks = ALL
) -> EvaluationBatches:
    """Return all rows as batches of one shape, in order."""
    if not len(rows):
        named = f"data.validation={data.validation}"
        name = named if data.validation else "the held-out part of data.train"
        raise ConfigError(
            f"{name} has {rows.tokens} tokens: at least 2 are needed to predict one. Give more"
            " text."
        )
    return EvaluationBatches(rows, batch_size, blocks)


def invented_row(task: Task, data: DataConfig) -> NumpyBatch:
    """Return a row that the objective's own code makes of invented text: its arrays are those of a
    row of `Batches`, without the data."""
    tokenizer = byte_tokenizer(task.specials)
    rows: Rows
    with tempfile.TemporaryDirectory() as folder:
        if task.template is None:
            # Enough for a row of any objective, of which some read several rows' worth.
            size = 4 * (task.format.length + task.format.source_length)
            document = Piece("a" * size, "", True)
            store = open_or_build(Path(folder), lambda: [document], tokenizer)
            rows = task.rows(store, data, task.format, tokenizer)
        else:
            # A byte tokenizer has no chat template, and any one gives rows of the same shapes.
            tokenizer.metadata = replace(tokenizer.metadata, template=INVENTED_CHAT)
            template = task.template(task.format, tokenizer)
            record = tuple(INVENTED[field.kind] for field in task.fields)
            example = Piece("", "", True, record)
            examples = open_or_encode(Path(folder), lambda: [example], template.encode)
            rows = ExampleRows(examples, template, seed=0)
        return rows[0]
