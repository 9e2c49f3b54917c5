"""The template of preferences: a prompt, the completion that is preferred, and the one that is
not."""

import numpy as np

from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.templates import Template, joined
from jaxformer.tokenizer import Tokenizer


class PreferenceTemplate(Template):
    """One pair a row, each array [2, T]: the prompt with the chosen completion and its end token,
    and the same prompt with the rejected one. Targets of a completion have the weight 1.

    Where the longer side does not fit, both lose the same tokens at the start of their prompt,
    which keeps at least half a row; what is still too long is cut at the end of its completion, and
    has no end token. So a completion keeps its beginning, with the end of the prompt before it.
    """

    packs = False
    cut_where = "at the start of the prompt, and then at the end"

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.length, self.length)
        self.before = tokenizer.as_prompt([])

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # Prompt, completion and end token, of which the last is a target alone.
        return lengths[:, :1] + lengths[:, 1:] + len(self.before)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, *completions = parts
        # The prompt keeps what the longer completion and its end token leave of a side, whose last
        # token is a target alone, but at least half of it.
        side = self.length + 1
        left = max(side - max(map(len, completions)) - 1, side // 2) - len(self.before)
        prompt = joined(self.before, prompt[max(len(prompt) - left, 0) :])
        sides = [self._side(prompt, completion) for completion in completions]
        return {name: np.stack([side[name] for side in sides]) for name in sides[0]}

    def _side(self, prompt: np.ndarray, completion: np.ndarray) -> NumpyBatch:
        """The arrays [T] of one side, padded with zeros: token 0, weight 0, segment 0."""
        text = joined(prompt, completion, [self.end])[: self.length + 1]
        used = len(text) - 1
        row = {name: np.zeros(self.length, np.int32) for name in ("tokens", "targets")}
        row["tokens"][:used], row["targets"][:used] = text[:-1], text[1:]
        place = np.arange(self.length)
        told = (place + 1 >= len(prompt)) & (place < used)
        row["weights"] = told.astype(np.float32)
        row["segment_ids"] = (place < used).astype(np.int32)
        return row

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        (pair,) = examples
        return pair
