"""Small stores of documents, settings for their rows, and batches held against each other."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import cut_rows
from hypothesis import strategies as st

from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.data import Batches, NumpyBatch, RowBlocks, Rows, TokenStore, open_or_build
from jaxformer.data import store as store_files
from jaxformer.data.documents import Piece
from jaxformer.data.task import causal_rows
from jaxformer.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)
PACKINGS = ("stream", "documents", "best_fit")


@contextmanager
def stored(sizes: list[int], first: int = 0) -> Iterator[TokenStore]:
    """A store of documents of these sizes, in shards of about 50 tokens, its letters from the
    `first` of the alphabet on."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_files, "SHARD_CHARACTERS", 50)
        letters = (chr(97 + (first + place) % 26) for place in range(sum(sizes)))
        pieces = [
            Piece("".join(islice(letters, size)), str(index), True)
            for index, size in enumerate(sizes)
        ]
        yield open_or_build(Path(folder), lambda: pieces, BYTES)


def data(length: int, packing: str = "stream", **more: Any) -> DataConfig:
    return DataConfig(sequence_length=length, packing=packing, **more)  # type: ignore[arg-type]


def rows_of(made: TokenStore, data: DataConfig) -> Rows:
    return cut_rows(causal_rows, made, RunConfig(data=data), BYTES)


def targets(batches: list[NumpyBatch]) -> list[int]:
    return [int(token) for batch in batches for token in batch["targets"][batch["weights"] > 0]]


def same(left: NumpyBatch, right: NumpyBatch) -> bool:
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


def assert_shared(
    make: Callable[..., Batches], steps: list[int], counts: tuple[int, ...] = (2, 4)
) -> None:
    """Processes read together, each its blocks of rows, what one reads alone."""
    for step in steps:
        whole = make()[step]
        for count in counts:
            shares = [make(RowBlocks((index,), count))[step] for index in range(count)]
            assert all(share.keys() == whole.keys() for share in shares)
            joined = {name: np.concatenate([share[name] for share in shares]) for name in whole}
            assert same(joined, whole)
