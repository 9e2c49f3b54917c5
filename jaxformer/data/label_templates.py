"""Templates of texts by themselves: a text or two and their class, words and their tags, or a pair
of texts that belong together."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.data.examples import Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.sources.records import Record
from jaxformer.data.templates import SidesTemplate, Template
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.frame import Frame, closed


class FramedTemplate(Template):
    """Texts in the tokenizer's template for one text or for two, which is a part of the data's
    fingerprint."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.recipe = tuple(str(self.frame(texts).slots) for texts in (1, 2))

    def frame(self, texts: int) -> Frame:
        """What stands around one text or two: the tokenizer's template, or [CLS] and [SEP] or the
        end token where it has none."""
        return self.tokenizer.frame(texts) or closed(self.start, self.stop, texts)

    def framed(self, *texts: Sequence[int] | np.ndarray) -> NumpyBatch:
        """The tokens of texts in their frame, and the types of the tokens where the model has
        any."""
        tokens, kinds = self.frame(len(texts)).fill(texts)
        row = {"tokens": tokens}
        return row | ({"token_types": np.minimum(kinds, self.types - 1)} if self.types else {})


class ClassTemplate(FramedTemplate):
    """One text or two and their class, one example a row, in the tokenizer's template for one text
    or for two. Where it has none: [CLS] text [SEP] (text [SEP]) in an encoder whose tokenizer has
    these, else each text with the end token. Of two that are too long the longer is cut first
    (BERT, arXiv:1810.04805).
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
        return lengths[:, :-1].sum(1, keepdims=True) + self.frame(lengths.shape[1] - 1).added

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        *texts, label = parts
        capacity = self.length - self.frame(len(texts)).added
        if len(texts) == 2:
            # The first keeps what the second leaves, but at least half (rounded up).
            first = min(len(texts[0]), max(capacity - len(texts[1]), -(-capacity // 2)))
            texts = [texts[0][:first], texts[1][: capacity - first]]
        row = self.framed(*(text[:capacity] for text in texts))
        return row | {"targets": label, "weights": np.ones(1, np.float32)}


class TagTemplate(FramedTemplate):
    """Words and a tag for each, learned on the word's first piece, in the frame of one text as in
    `ClassTemplate`."""

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        words = [
            f" {word}" if position else word
            for record in records
            for position, word in enumerate(record[0])
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
        return lengths[:, :1] + self.frame(1).added

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        ids, tags = (sequence[: self.length - self.frame(1).added] for sequence in parts)
        slots = self.frame(1).slots
        text_slot = [slot.token for slot in slots].index(None)
        tags = np.pad(tags, (text_slot, len(slots) - text_slot - 1), constant_values=-1)
        return self.framed(ids) | {
            "targets": np.maximum(tags, 0),
            "weights": (tags >= 0).astype(np.float32),
        }


class ContrastiveTemplate(SidesTemplate, FramedTemplate):
    """An anchor and its positive, one pair a row, each array [2, T]: two texts of their own, each
    in the frame of one text as in `ClassTemplate`, cut at the end and padded with zeros."""

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths + self.frame(1).added

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        capacity = self.length - self.frame(1).added
        return self.stacked([self.framed(ids[:capacity]) for ids in parts])
