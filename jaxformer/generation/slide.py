"""Generation beyond the context, from a window of the newest tokens."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.prompts import context_of
from jaxformer.generation.sampling import Sampling, end_tokens
from jaxformer.params import Params

KEPT = 0.75  # of the window; a larger part gives more context, and is read again more often


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
    """`stream_tokens` of one row, not limited by the context: arrays [1, n] as they are made.

    At model.max_length tokens the window is cut to three quarters: the first `beginning` tokens of
    the prompt (such as a start-of-text token) and the newest ones. These are read again at
    positions from 0, and generation continues. Until then the tokens are those of `stream_tokens`.
    Raises ConfigError as that does, and for an encoder-decoder.
    """
    if config.family != "decoder":
        raise ConfigError(
            f"sliding over the newest tokens needs model.family='decoder', not {config.family!r}."
        )
    end = {*end_tokens(Sampling(**sampling).end_token)}
    context = context_of(params, config)
    kept = max(int(KEPT * context), beginning + 1)
    window, left = [*prompt], max_new_tokens
    for number in itertools.count():
        draws = jax.random.fold_in(key, number) if number else key
        count = min(left, max(context - len(window), 1))
        for piece in stream_tokens(params, config, [window], count, key=draws, **sampling):
            yield piece
            window += piece[0].tolist()
            left -= piece.shape[1]
            if left <= 0 or not end.isdisjoint(piece[0].tolist()):
                return
        window = window[:beginning] + window[beginning - kept :]
