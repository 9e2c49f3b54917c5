"""Tokenized records on disk: each a few sequences of ids (a source and a target; a text and its
label), by number.

<store>/tokens.npy        int32: all sequences, one after the other
<store>/bounds.npy        int64 [examples x parts + 1]: where each begins, and where the last ends
<store>/manifest.json     written last: the store is complete when it is there
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.data.sources import Piece
from jaxformer.data.sources.records import Record
from jaxformer.data.tokenizing import in_batches
from jaxformer.data.writing import claimed, replacing
from jaxformer.settings import Log

# The sequences of one example; of one with a label, or with tags, the last is their numbers.
Parts = tuple[Sequence[int], ...]

# Names of labels and their numbers, in the order in which they are met.
Labels = dict[str, int]
EncodeRecords = Callable[[list[Record], Labels], Iterable[Parts]]


class ExampleStore:
    """The examples of a split. `labels` are those met in it, in that order."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.tokens, self.documents, self.bytes, self.parts = (
            int(manifest[name]) for name in ("tokens", "documents", "bytes", "parts")
        )
        self.labels: tuple[str, ...] = tuple(manifest["labels"])
        self._tokens, self._bounds = (
            _mapped(directory / f"{name}.npy") for name in ("tokens", "bounds")
        )
        self._numbers: np.ndarray | None = None

    @classmethod
    def open(cls, directory: Path) -> "ExampleStore | None":
        """The store in a directory, or None where it is not complete."""
        try:
            found = cls(directory, json.loads((directory / "manifest.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (
            found if len(found._tokens) == found.tokens and len(found) == found.documents else None
        )

    def __len__(self) -> int:
        return (len(self._bounds) - 1) // self.parts

    def __getitem__(self, index: int) -> list[np.ndarray]:
        """The parts of an example: int32."""
        bounds = self._bounds[index * self.parts : (index + 1) * self.parts + 1]
        parts = [self._tokens[start:stop] for start, stop in itertools.pairwise(bounds.tolist())]
        if self._numbers is not None:
            parts[-1] = self._numbers[parts[-1]]
        return parts

    def lengths(self) -> np.ndarray:
        """The length of each part of each example: int64 [examples, parts]."""
        return np.diff(self._bounds).reshape(-1, self.parts)

    def number_as(self, labels: tuple[str, ...], where: str) -> None:
        """Gives each label its place in `labels` from here on. Raises ConfigError for one that is
        not among them."""
        unknown = sorted({*self.labels} - {*labels})
        if unknown:
            shown = ", ".join(map(repr, unknown[:5]))
            raise ConfigError(
                f"{where} has labels that the training data has not: {shown}. It knows"
                f" {', '.join(labels[:20])}{', ...' * (len(labels) > 20)}: give training data that"
                " has all of them, or leave these out."
            )
        # A word's further pieces have the number -1, which reads the last entry and stays -1.
        self._numbers = np.array([*map(labels.index, self.labels), -1], np.int32)


def open_or_encode(
    directory: Path,
    records: Callable[[], Iterable[Piece]],
    encode: EncodeRecords,
    log: Log = lambda line: None,
) -> ExampleStore:
    """The finished store in a directory, or a new one. A second process on this machine waits and
    then reuses it."""
    if store := ExampleStore.open(directory):
        return store
    with claimed(directory, log):
        if store := ExampleStore.open(directory):
            return store
        labels: Labels = {}
        tokens, counts = [np.zeros(0, np.int32)], [np.zeros(1, np.int64)]
        size = documents = parts = 0
        for batch in in_batches(records(), lambda piece: len(piece.text)):
            examples = list(encode([piece.record for piece in batch], labels))
            sequences = list(itertools.chain.from_iterable(examples))
            tokens.append(np.fromiter(itertools.chain.from_iterable(sequences), np.int32))
            counts.append(np.fromiter(map(len, sequences), np.int64))
            size += sum(len(piece.text.encode()) for piece in batch)
            documents, parts = documents + len(batch), len(examples[0])
        arrays: dict[str, np.ndarray] = {
            "tokens": np.concatenate(tokens),
            "bounds": np.cumsum(np.concatenate(counts)),
        }
        for name, array in arrays.items():
            with replacing(directory / f"{name}.npy") as file:
                np.save(file, array)
        manifest = {
            "tokens": len(arrays["tokens"]),
            "documents": documents,
            "bytes": size,
            "parts": max(parts, 1),
            "labels": list(labels),
        }
        with replacing(directory / "manifest.json") as file:
            file.write(json.dumps(manifest, indent=1).encode())
    return ExampleStore(directory, manifest)


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r").view(np.ndarray)
    except ValueError:  # nothing can be mapped of an empty file
        return np.load(path)
