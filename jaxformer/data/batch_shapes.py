"""The names, shapes and dtypes of the arrays of a batch, without any data: those of one row that an
objective's own code makes of invented text."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.examples import ExampleStore
from jaxformer.data.rows import Rows
from jaxformer.data.sources.records import Kind, Record, Value
from jaxformer.data.store import NONE, TokenStore
from jaxformer.data.task import Task
from jaxformer.data.templates import ExampleRows
from jaxformer.tokenizer import Tokenizer, byte_tokenizer

# A record of each kind of field: one word, whose tag or label is "a" too.
VALUES: dict[Kind, Value] = {
    **dict.fromkeys(("text", "label", "prompt", "completion"), "a"),
    **dict.fromkeys(("words", "tags"), ("a",)),
    "messages": ('{"role": "user", "content": "a"}', '{"role": "assistant", "content": "a"}'),
}
INVENTED_CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


class ArrayShape(NamedTuple):
    """An array of a batch: its shape, rows first, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype


def batch_shapes(task: Task, data: DataConfig, batch_size: int) -> dict[str, ArrayShape]:
    """The arrays of a global batch of `Batches`, by name. Raises ConfigError where the rows of the
    objective do not fit their settings."""
    row = _rows(task, data)[0]
    return {name: ArrayShape((batch_size, *row[name].shape), row[name].dtype) for name in row}


def _rows(task: Task, data: DataConfig) -> Rows:
    tokenizer = byte_tokenizer(task.specials)
    if task.template is None:
        # Enough for a row of any objective, of which some read several rows' worth.
        size = 4 * (task.format.length + task.format.source_length)
        return task.rows(_InventedText(size, tokenizer), data, task.format, tokenizer)
    tokenizer.metadata = replace(tokenizer.metadata, template=INVENTED_CHAT)
    template = task.template(task.format, tokenizer)
    record: Record = tuple(VALUES[field.kind] for field in task.fields)
    (example,) = template.encode([record], {})
    return ExampleRows(_InventedExample([list(ids) for ids in example]), template, seed=0)


class _InventedText(TokenStore):
    """One document of one repeated token."""

    def __init__(self, tokens: int, tokenizer: Tokenizer) -> None:
        self.tokens, self.documents, self.bytes, self.fingerprint = tokens, 1, tokens, ""
        self.beginning, self.is_cut = (), False
        self._ids = np.full(tokens, tokenizer.encode("a")[0], np.int32)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        return NONE

    def ends(self) -> np.ndarray:
        return np.array([self.tokens], np.int64)


class _InventedExample(ExampleStore):
    """One tokenized record."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self.directory, self.fingerprint, self.labels = Path(), "", ()
        self.tokens, self.documents, self.bytes, self.parts = 0, 1, 0, len(sequences)
        self._tokens = np.concatenate([np.asarray(ids, np.int32) for ids in sequences])
        self._bounds = np.cumsum([0, *map(len, sequences)])
        self._numbers = None
