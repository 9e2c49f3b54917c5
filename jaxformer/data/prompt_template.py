"""The template of a prompt and its answer, and how a prompt is cut."""

import numpy as np

from jaxformer.data.examples import ExampleStore
from jaxformer.data.rows import NumpyBatch, RowFormat
from jaxformer.data.templates import Template, joined
from jaxformer.tokenizer import Tokenizer

CUT_PROMPT = "at the start of the prompt, and then at the end"


class SFTTemplate(Template):
    """A prompt, its answer and the end token, of which only the answer and its end are learned.

    Where they do not fit, the prompt loses its start, but keeps at least half a row, and then the
    answer its end; with the cut "end" the answer loses its end alone.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.before = tokenizer.as_prompt([])
        self.cut_where = CUT_PROMPT if self.cut == "prompt" else "at the end"

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.sum(1, keepdims=True) + len(self.before)

    def have_targets(self, store: ExampleStore) -> np.ndarray:
        prompts, answers = store.lengths().T + np.array([[len(self.before)], [1]])
        if self.cut == "prompt":
            prompts = np.minimum(prompts, prompt_capacity(answers, self.length))
        ends = np.minimum(prompts + answers, self.length + 1)
        return ends > np.maximum(prompts, 1)  # the first token of a row is no target

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, answer = joined(self.before, parts[0]), joined(parts[1], [self.end])
        if self.cut == "prompt":
            capacity = int(prompt_capacity(len(answer), self.length))
            prompt = without_start(prompt, capacity, self.before)
        text = joined(prompt, answer)[: self.length + 1]
        learned = np.arange(1, len(text)) >= len(prompt)
        return {"tokens": text[:-1], "targets": text[1:], "weights": learned.astype(np.float32)}


def prompt_capacity(answer: int | np.ndarray, length: int) -> np.ndarray:
    """How many tokens a prompt keeps of a row of `length` before an answer of so many: those that
    the answer leaves, but at least half. The last token of an example is a target alone."""
    return np.maximum(length + 1 - answer, (length + 1) // 2)


def without_start(prompt: np.ndarray, capacity: int, before: list[int]) -> np.ndarray:
    """The last tokens of a prompt that has more than `capacity`, after those that begin a text,
    `before`, where it begins with them."""
    if len(prompt) <= capacity:
        return prompt
    kept = len(before) if prompt[: len(before)].tolist() == before else 0
    return joined(prompt[:kept], prompt[len(prompt) - capacity + kept :])
