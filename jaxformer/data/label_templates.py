"""Templates of records with labels: a text or two and their class, or words and their tags."""

from collections.abc import Iterable

import numpy as np

from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sources.records import Record
from jaxformer.data.templates import Template, joined
from jaxformer.tokenizer import Tokenizer


class ClassTemplate(Template):
    """One text or two and their class, one example a row: [CLS] text [SEP] (text [SEP]) in an
    encoder whose tokenizer has these, else each text with the end token. Of two that are too long
    the longer is cut first (BERT, arXiv:1810.04805).
    """

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.lengths |= {"targets": 1, "weights": 1}

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        texts = super().encode([record[:-1] for record in records], labels)
        for parts, record in zip(texts, records, strict=True):
            yield *parts, [labels.setdefault(str(record[-1]), len(labels))]

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :-1].sum(1, keepdims=True) + len(self.start) + lengths.shape[1] - 1

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        *texts, label = parts
        capacity = self.length - len(self.start) - len(texts)
        if len(texts) == 2:
            # The first keeps what the second leaves, but at least half (rounded up).
            first = min(len(texts[0]), max(capacity - len(texts[1]), -(-capacity // 2)))
            texts = [texts[0][:first], texts[1][: capacity - first]]
        closed = [joined(text[:capacity], self.stop) for text in texts]
        closed[0] = joined(self.start, closed[0])
        tokens, weights = np.concatenate(closed), np.ones(1, np.float32)
        row = {"tokens": tokens, "targets": label, "weights": weights}
        return self.with_types(row, *map(len, closed))


class TagTemplate(Template):
    """Words and a tag for each, learned on the word's first piece, between [CLS] and [SEP] as in
    `ClassTemplate`."""

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        words = [
            (" " * (place > 0) + word) for record in records for place, word in enumerate(record[0])
        ]
        pieces = iter(self.tokenizer.encode_batch(words))
        for _, tags in records:
            ids: list[int] = []
            numbers: list[int] = []
            for tag in tags:
                word = next(pieces)
                ids += word
                # The further pieces of a word, numbered -1, are not learned.
                numbers += [labels.setdefault(tag, len(labels)), *[-1] * len(word)][: len(word)]
            yield ids, numbers

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :1] + len(self.start) + len(self.stop)

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        numbers, examples, places = store.part(1)
        capacity = self.length - len(self.start) - len(self.stop)
        learned = examples[(numbers >= 0) & (places < capacity)]
        return np.bincount(learned, minlength=len(store)) > 0

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        around = (len(self.start), len(self.stop))
        ids, tags = (part[: self.length - sum(around)] for part in parts)
        tags = np.pad(tags, around, constant_values=-1)
        row = {
            "tokens": joined(self.start, ids, self.stop),
            "targets": np.maximum(tags, 0),
            "weights": (tags >= 0).astype(np.float32),
        }
        return self.with_types(row, len(tags))
