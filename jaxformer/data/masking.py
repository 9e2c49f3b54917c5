"""Rows of masked language modelling and next-sentence prediction (BERT, arXiv:1810.04805)."""

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.rows import BestFit, NumpyBatch, RowFormat, TextRows, numbered, padded
from jaxformer.data.store import TokenStore
from jaxformer.tokenizer import MARKS, Tokenizer
from jaxformer.tokenizer.tokenizer import closed

# Of the tokens that are chosen, the fraction that is masked, and the fraction that is masked or
# replaced by any other.
MASKED = 0.8
CHANGED = 0.9


def missing_marks(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the special tokens that `MaskedRows` needs and a tokenizer lacks."""
    roles = zip(MARKS, ("cls", "sep", "mask"), strict=True)
    return [mark for mark, role in roles if tokenizer.special(role) is None]


class MaskedRows(TextRows):
    """[CLS] text [SEP], or with next sentences two texts in the tokenizer's template, else [CLS]
    first [SEP] second [SEP], of which some tokens are predicted.

    `noise_density` of the ordinary tokens or of their words is chosen; of these 80 % become [MASK],
    10 % any ordinary tokens, and 10 % stay, all tokens of a word alike. Half of the second texts
    are from another place. The prediction of whether a second text follows weighs as much as the
    hidden tokens of its row.
    """

    def __init__(
        self, store: TokenStore, data: DataConfig, row_format: RowFormat, tokenizer: Tokenizer
    ) -> None:
        self.length = row_format.length
        self.types = row_format.token_types
        self.pair_target = row_format.pair_target
        self.density = data.noise_density
        self.by_word = data.mask_units == "words"
        self.packed = data.packing == "documents"
        self.cls, self.sep, self.mask = (
            np.array([tokenizer.special(role)], np.int32) for role in ("cls", "sep", "mask")
        )
        cls = self.cls.tolist()
        sep = self.sep.tolist()
        self.frame = closed(cls, sep, 1)
        if self.pair_target:
            self.frame = tokenizer.frame(2) or closed(cls, sep, 2)
        # Tokens of text in a row.
        size = window = self.length - self.frame.added
        if self.pair_target:
            # Room for another text before or after the row's own.
            window = 3 * size
        super().__init__(store, window, size)
        self._fit = None
        if data.packing == "best_fit":
            self._fit = BestFit(store.ends(), size)
            self.window = 0
            self.filled = (self._fit.filled * size + 2) / self.length
        self.ordinary = tokenizer.ordinary()
        self.may_hide = np.zeros(tokenizer.vocab_size, bool)
        self.may_hide[self.ordinary] = True
        self.begins_inside, self.ends_inside = tokenizer.word_edges().T

    def __len__(self) -> int:
        if self._fit:
            return len(self._fit)
        return super().__len__()

    def most_segments(self) -> int | None:
        if self._fit:
            return self._fit.most_pieces()
        return super().most_segments() if self.packed else 1

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        row = self._sentences(int(index), rng) if self.pair_target else self._text(int(index))
        ids = row["tokens"]
        chosen, fate = self._chosen(ids, row["segment_ids"], rng)
        hidden = ids.copy()
        hidden[chosen[fate < MASKED]] = self.mask
        # The rest of the chosen stay as they are, so that a model reads true tokens there too.
        changed = chosen[(fate >= MASKED) & (fate < CHANGED)]
        hidden[changed] = rng.choice(self.ordinary, len(changed))
        weights = np.zeros(len(ids), np.float32)
        weights[chosen] = 1
        row |= {"tokens": hidden, "targets": ids, "weights": weights}
        once = dict.fromkeys((self.pair_target, f"{self.pair_target}_weights"), 1)
        return padded(row, self.length, once)

    def _text(self, index: int) -> NumpyBatch:
        if self._fit:
            texts = [self.store.read(begin, end) for begin, end in self._fit.pieces(index)]
            text = np.concatenate(texts)
            segments = numbered([len(ids) for ids in texts])
        else:
            start = index * self.stride
            text = self.store.read(start, start + self.stride)
            segments = np.ones(len(text), np.int32)
            if self.packed:
                segments = self.segments(start, len(text))
        # [CLS] is of the first document, [SEP] of the last.
        around = np.concatenate([segments[:1], segments, segments[-1:]])
        row = {"tokens": np.concatenate([self.cls, text, self.sep]), "segment_ids": around}
        if self.types:
            row["token_types"] = np.zeros(len(around), np.int32)
        return row

    def _sentences(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        start = index * self.stride
        text = self.store.read(start, start + self.stride)
        cut = int(rng.integers(1, len(text)))
        first = text[:cut]
        second = text[cut:]
        other_start = self._elsewhere(start, len(second), rng)
        follows = True
        # In a store too small for another text each one follows.
        if other_start is not None and rng.random() >= 0.5:
            follows = False
            second = self.store.read(other_start, other_start + len(second))
        ids, kinds = self.frame.fill([first, second])
        # About as many as tokens of the row are predicted.
        chosen = round(self.density * self.length)
        row = {
            "tokens": ids,
            "segment_ids": np.ones(len(ids), np.int32),
            self.pair_target: np.array([follows], np.int32),
            f"{self.pair_target}_weights": np.array([chosen], np.float32),
        }
        if self.types:
            row["token_types"] = np.minimum(kinds, self.types - 1)
        return row

    def _elsewhere(self, start: int, size: int, rng: np.random.Generator) -> int | None:
        """Return a place at which `size` tokens begin that are not of the row from `start` on; None
        in a store too small."""
        # Such places are 0 to `before` - 1, and `after` of them behind the row's end.
        before = max(0, start - size + 1)
        after = max(0, self.store.tokens - size - start - self.stride + 1)
        if not before + after:
            return None
        drawn = int(rng.integers(before + after))
        if drawn < before:
            return drawn
        return start + self.stride + drawn - before

    def _chosen(
        self, ids: np.ndarray, segments: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the tokens to predict, and for each a number in [0, 1) that decides
        what becomes of it.

        `density` of the tokens or words is chosen on average, at least one, each with the same
        probability however long it is. All tokens of a word have the number of the word.
        """
        positions = np.flatnonzero(self.may_hide[ids])
        if not self.by_word:
            count = self._chosen_count(len(positions), rng)
            chosen = rng.permutation(positions)[:count]
            return chosen, rng.random(len(chosen))
        # A token continues a word where it begins, and the token before it ends, within a word of
        # the same text; the cumulative sum over all other tokens numbers the words. word_of has the
        # shape of positions.
        inside = self.begins_inside[ids] & np.roll(self.ends_inside[ids], 1)
        inside &= segments == np.roll(segments, 1)
        _, word_of = np.unique(np.cumsum(~inside)[positions], return_inverse=True)
        words = int(word_of.max(initial=-1)) + 1
        count = self._chosen_count(words, rng)
        is_chosen_word = np.zeros(words, bool)
        is_chosen_word[rng.permutation(words)[:count]] = True
        is_chosen = is_chosen_word[word_of]
        return positions[is_chosen], rng.random(words)[word_of[is_chosen]]

    def _chosen_count(self, units: int, rng: np.random.Generator) -> int:
        """Return how many of a row's tokens or words are chosen."""
        # A random number is added before rounding down, so that the mean is exact in short rows.
        return min(units, max(1, int(self.density * units + rng.random())))
