"""Texts with the log-probabilities that their writer had of them."""

import jax
import numpy as np

from jaxformer.generation.refill import CHUNK, RowWriter
from jaxformer.generation.sampling import NUMBERS, Sampling


def written(params, config, prompts, counts, rows, **rules):
    """The tokens of a text of each prompt, in so many rows beside each other, and their
    log-probabilities."""
    rules = Sampling(vocab_size=config.vocab_size, **rules)
    longest = max(map(len, prompts))
    writer = RowWriter(params, config, rules, rows, (longest, 0), own_numbers=True)
    numbers = {name: getattr(rules, name) for name in NUMBERS}
    texts = [([], []) for _ in prompts]
    of_row = {}
    for number, prompt in enumerate(prompts):
        while not writer.free():
            _take(writer, of_row)
        key = jax.random.key(number)
        row = writer.read(prompt, key, counts[number], scored=True, **numbers)
        of_row[row] = texts[number]
    while len(writer.free()) < rows:
        _take(writer, of_row)
    return [(tokens, np.array(logs, np.float32)) for tokens, logs in texts]


def _take(writer, of_row):
    for row, new in writer.advance(CHUNK).items():
        tokens, logs = of_row[row]
        tokens.extend(new.tokens.tolist())
        logs.extend(new.log_probs.tolist())
