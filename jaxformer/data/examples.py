"""Tokenized records on disk: each a few sequences of ids (a source and a target; a text and its
label), by number.

<store>/00000.tokens      int32: all sequences, one after the other
<store>/00000.bounds      int64 [examples x parts + 1]: where each begins, and where the last ends
<store>/manifest.json     counts, the labels in the order in which they were met, and checksums of
                          the two other files; written last: the store is complete when it is there
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxformer.config.settings import Log
from jaxformer.data.documents import Piece, Record, RecordError
from jaxformer.data.store import (
    BATCH_CHARACTERS,
    MANIFEST,
    WRONG_RECORD,
    Shard,
    claimed,
    require_counts,
    write_array,
)
from jaxformer.files import ConfigError, read_object, write_text
from jaxformer.tokenizer.words import in_batches

# The sequences of one example; the last part of one with a label, or with tags, is their numbers.
Parts = tuple[Sequence[int], ...]

# Names of labels and their numbers, in the order in which they are met.
Labels = dict[str, int]
# It may raise RecordError for a record that cannot be encoded.
EncodeRecords = Callable[[list[Record], Labels], Iterable[Parts]]


class ExampleStore:
    """The examples of a split: a shard with the index of its parts."""

    def __init__(self, shard: Shard, parts: int, labels: Sequence[str]) -> None:
        self.fingerprint = shard.path.parent.name
        self.labels = tuple(labels)
        self.parts = parts
        self.tokens = shard.tokens
        self.documents = shard.documents
        self.bytes = shard.bytes
        self._tokens = shard.mapped("tokens", np.dtype(np.int32), (shard.tokens,))
        bounds = (shard.documents * parts + 1,)
        self._bounds = shard.mapped("bounds", np.dtype(np.int64), bounds)
        self._numbers: np.ndarray | None = None

    @classmethod
    def open(cls, directory: Path) -> "ExampleStore | None":
        """Return the store in a directory, or None where it is not complete."""
        try:
            record = read_object(directory / MANIFEST)
            shard = Shard.of(directory, record)
            require_counts(record, "parts")
            labels = [*map(str, record["labels"])]
        except WRONG_RECORD:
            return None
        return cls(shard, record["parts"], labels) if shard.is_there() else None

    def __len__(self) -> int:
        return (len(self._bounds) - 1) // self.parts

    def __getitem__(self, index: int) -> list[np.ndarray]:
        """Return the parts of an example: int32."""
        bounds = self._bounds[index * self.parts : (index + 1) * self.parts + 1]
        pieces = [self._tokens[start:stop] for start, stop in itertools.pairwise(bounds.tolist())]
        # The last part is labels, which the store numbers as it met them.
        if self._numbers is not None:
            pieces[-1] = self._numbers[pieces[-1]]
        return pieces

    def lengths(self) -> np.ndarray:
        """Return the length of each part of each example: int64 [examples, parts]."""
        return np.diff(self._bounds).reshape(-1, self.parts)

    def number_as(self, labels: tuple[str, ...], where: str) -> None:
        """Number each label by its place in `labels` from here on."""
        unknown = sorted({*self.labels} - {*labels})
        if unknown:
            first_labels = [*labels[:20], "..."] if len(labels) > 20 else labels
            raise ConfigError(
                f"{where} has labels that the training data has not:"
                f" {', '.join(map(repr, unknown[:5]))}. It knows {', '.join(first_labels)}: add"
                " training data with all of them, or remove these."
            )
        # A word's further pieces have the number -1, which reads the last entry and stays -1.
        self._numbers = np.array([*map(labels.index, self.labels), -1], np.int32)


def open_or_encode(
    directory: Path,
    records: Callable[[], Iterable[Piece]],
    encode: EncodeRecords,
    log: Log = lambda line: None,
) -> ExampleStore:
    """Return the finished store in a directory, or a new one. A second process on this machine
    waits and then reuses it."""
    with claimed(directory, log):
        store = ExampleStore.open(directory)
        if store is not None:
            return store
        # All of it is held in memory: 4 bytes a token, of which records have far fewer than texts.
        labels: Labels = {}
        tokens = [np.zeros(0, np.int32)]
        lengths = [np.zeros(1, np.int64)]
        size = 0
        parts = 1
        for batch in in_batches(records(), lambda piece: len(piece.text), BATCH_CHARACTERS):
            # Many at once, since the tokenizer encodes a batch on all cores.
            try:
                examples = list(encode([piece.record for piece in batch], labels))
            except RecordError as error:
                raise ConfigError(f"{batch[error.index].location}: {error}") from None
            # [records * parts] sequences of ids
            sequences = list(itertools.chain.from_iterable(examples))
            tokens.append(np.fromiter(itertools.chain.from_iterable(sequences), np.int32))
            lengths.append(np.fromiter(map(len, sequences), np.int64))
            size += sum(len(piece.text.encode()) for piece in batch)
            parts = len(examples[0])
        ids = np.concatenate(tokens)
        # [records * parts + 1], from 0
        bounds = np.cumsum(np.concatenate(lengths))
        path = directory / "00000"
        files = {
            "tokens": write_array(path.with_suffix(".tokens"), ids),
            "bounds": write_array(path.with_suffix(".bounds"), bounds),
        }
        shard = Shard(path, len(ids), (len(bounds) - 1) // parts, size, files)
        record = shard.entry() | {"parts": parts, "labels": [*labels]}
        write_text(directory / MANIFEST, json.dumps(record, indent=1))
        return ExampleStore(shard, parts, [*labels])
