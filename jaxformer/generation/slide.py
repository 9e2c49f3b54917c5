"""Generation past the context: a window of the newest tokens that moves on when it is full."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.sampling import Sampling
from jaxformer.params import Params

KEPT = 0.75  # of the window; a larger part is more to go on from, and is read again more often


def slide_tokens(
    params: Params,
    config: ModelConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    key: jax.Array,
    beginning: int = 0,
    **sampling: Any,
) -> Iterator[np.ndarray]:
    """`stream_tokens` of one row without the limit of the context: arrays [1, n] as they are made.

    When model.max_length tokens are reached, the first `beginning` tokens of the prompt (such as a
    start-of-text token) and the newest ones, three quarters of the window together, are read again
    at the positions from 0, and the text goes on from these. Up to then the tokens are those of
    `stream_tokens`. Raises ConfigError as that does, and for an encoder-decoder.
    """
    if config.family != "decoder":
        raise ConfigError(
            f"a window of the newest tokens needs model.family='decoder', not {config.family!r}."
        )
    rules, kept = Sampling(**sampling), max(int(KEPT * config.max_length), beginning + 1)
    end = rules.end_token if isinstance(rules.end_token, tuple) else (rules.end_token,)
    window, left = [*prompt], max_new_tokens
    for number in itertools.count():
        draws = jax.random.fold_in(key, number) if number else key
        count = min(left, max(config.max_length - len(window), 1))
        for piece in stream_tokens(params, config, [window], count, key=draws, **sampling):
            yield piece
            window += piece[0].tolist()
            left -= piece.shape[1]
            if left <= 0 or not {*end}.isdisjoint(piece[0].tolist()):
                return
        window = window[:beginning] + window[beginning - kept :]
