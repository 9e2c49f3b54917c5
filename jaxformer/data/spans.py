"""Rows for an encoder-decoder that learns from plain text: hidden spans, and prefixes (T5,
arXiv:1910.10683)."""

import itertools

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.rows import NumpyBatch, RowFormat, TextRows, joined, joined_row
from jaxformer.data.store import TokenStore
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer


class SourceRows(TextRows):
    """Rows of a source, and the target that is made of it, in the tokenizer's format for an
    encoder-decoder."""

    def __init__(
        self, store: TokenStore, row_format: RowFormat, tokenizer: Tokenizer, window: int
    ) -> None:
        super().__init__(store, window, window)
        self.tokenizer = tokenizer
        # What the decoder reads before the target.
        self.start = tokenizer.as_target([])
        self.format = row_format

    def most_segments(self) -> int | None:
        return 1

    def arrays(self, text: np.ndarray, targets: np.ndarray) -> NumpyBatch:
        """Return one row, padded."""
        # The decoder reads the start tokens and then each target before the next one; start tokens
        # after the first are targets too.
        targets = joined(self.start[1:], targets)
        row = {
            "source": joined(self.tokenizer.as_source(text)),
            "tokens": joined(self.start[:1], targets[:-1]),
            "targets": targets,
            "weights": np.ones(len(targets), np.float32),
        }
        return joined_row([row], self.format.length, self.format.source_lengths)


class SpanRows(SourceRows):
    """Span corruption: each hidden span is a sentinel in the source, and follows its sentinel in
    the target.

        text    a b c d e f g h i j
        source  a b <0> e f g <1> j <2> end        target  <0> c d <1> h i <2> ... end
    """

    def __init__(
        self, store: TokenStore, data: DataConfig, row_format: RowFormat, tokenizer: Tokenizer
    ) -> None:
        self.density = data.noise_density
        self.mean = data.span_length
        length = row_format.length
        source_length = row_format.source_length
        window = raw_length(source_length, self.density, self.mean, len(tokenizer.as_source([])))
        # The most of any row, since a shorter one hides fewer.
        hidden, spans = hidden_counts(window, self.density, self.mean)
        super().__init__(store, row_format, tokenizer, window)
        self.sentinels = np.array(tokenizer.sentinels(), np.int32)
        if (needed := hidden + spans + len(self.start)) > length:
            raise ConfigError(
                f"data.sequence_length={length} has no room for the targets of"
                f" data.objective=span_corruption, {hidden} tokens in {spans} spans of a source of"
                f" {source_length}: set it to at least {needed}, or lower data.source_length."
            )
        if spans > len(self.sentinels):
            raise ConfigError(
                f"data.objective=span_corruption hides {spans} spans in a source of {source_length}"
                f" tokens, and the tokenizer has {len(self.sentinels)} sentinels (<extra_id_0>,"
                " ...): raise data.span_length, or lower data.source_length."
            )

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        start = int(index) * self.stride
        text = self.store.read(start, start + self.window)
        hidden, spans = hidden_counts(len(text), self.density, self.mean)
        # [spans, 2]: before each hidden span is one that is not hidden; so row by row these are the
        # sizes of the pieces of the text, and the odd pieces are hidden.
        shown = random_parts(len(text) - hidden, spans, rng)
        lengths = np.stack([shown, random_parts(hidden, spans, rng)], 1)
        pieces = np.split(text, np.cumsum(lengths)[:-1])
        # Arrays of one sentinel.
        marks = np.split(self.sentinels[:spans], spans)
        source = itertools.chain.from_iterable(zip(pieces[::2], marks, strict=True))
        targets = itertools.chain.from_iterable(zip(marks, pieces[1::2], strict=True))
        return self.arrays(joined(*source), joined(*targets, [self.tokenizer.end_token]))


class PrefixRows(SourceRows):
    """A text cut at a random place: the source is what comes before, the target what comes
    after."""

    def __init__(
        self, store: TokenStore, data: DataConfig, row_format: RowFormat, tokenizer: Tokenizer
    ) -> None:
        source_room = row_format.source_length - len(tokenizer.as_source([]))
        target_room = row_format.length + 1 - len(tokenizer.as_target([]))
        # Each side has at least one token, so of one token more than the smaller capacity each
        # fits, wherever the text is cut.
        super().__init__(store, row_format, tokenizer, min(source_room, target_room) + 1)

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        start = int(index) * self.stride
        text = self.store.read(start, start + self.window)
        # Each side has a token.
        cut = int(rng.integers(1, len(text)))
        return self.arrays(text[:cut], text[cut:])


def hidden_counts(length: int, density: float, mean: float) -> tuple[int, int]:
    """Return how many of `length` tokens are hidden, at least one and not all, and in how many
    spans."""
    hidden = min(max(round(length * density), 1), length - 1)
    return hidden, min(max(round(hidden / mean), 1), length - hidden)


def raw_length(source_length: int, density: float, mean: float, around: int = 1) -> int:
    """Return the most tokens of text whose source fits in `source_length` with its sentinels and
    the `around` tokens that the tokenizer adds to a source: by default 568 in 512."""

    def taken(length: int) -> int:
        hidden, spans = hidden_counts(length, density, mean)
        return length - hidden + spans + around

    # One by one, because both counts are rounded, and no formula gives the length at once.
    length = 2
    while taken(length + 1) <= source_length:
        length += 1
    return length


def random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Return the sizes [parts] of random non-empty parts of `total`, every division equally
    likely."""
    # A division is a choice of parts - 1 of the total - 1 places between two neighbors.
    cuts = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)
