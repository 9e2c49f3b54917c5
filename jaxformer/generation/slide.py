"""Generation beyond the context, from a window of the newest tokens."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.sampling import Sampling, TextRules
from jaxformer.generation.stop_strings import StopText
from jaxformer.generation.text_so_far import end_tokens
from jaxformer.models.transformer import context_of

# The share of the window that stays. More gives the next tokens more context, but the window is
# full again sooner, and then read again.
KEPT_SHARE = 0.75


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
    Of the rules on the text, no_repeat_ngram_size, bad_words, the penalties and the rule of the
    caller know the window alone."""
    if config.family != "decoder":
        raise ConfigError(
            f"sliding over the newest tokens needs model.family='decoder', not {config.family!r}."
        )
    rules = Sampling(**sampling)
    if rules.n > 1:
        raise ConfigError(f"n={rules.n} texts cannot slide together: write one at a time.")
    stops = None
    if rules.stop_strings:
        # They are looked for here, since a string may begin in one window and end in the next.
        stops = StopText.of(rules.stop_strings, rules.tokenizer, config.vocab_size, 1)
        sampling = sampling | {"stop_strings": ()}
    end = {*end_tokens(rules.end_token)}
    context = context_of(params, config)
    cut_length = max(int(KEPT_SHARE * context), beginning + 1)
    window, remaining = [*prompt], max_new_tokens
    for number in itertools.count():
        window_key = jax.random.fold_in(key, number) if number else key
        count = min(remaining, max(context - len(window), 1))
        window_rules = _window_rules(rules, max_new_tokens - remaining, count < remaining)
        pieces = stream_tokens(
            params, config, [window], count, key=window_key, **sampling | window_rules
        )
        for piece in pieces:  # [1, n]
            if stops is not None:
                piece, stops = _until_stop(piece, stops)
            yield piece
            if stops is not None and bool(stops.reached[0]):
                return
            window += piece[0].tolist()
            remaining -= piece.shape[1]
            if remaining <= 0 or not end.isdisjoint(piece[0].tolist()):
                return
        window = window[:beginning] + window[beginning - cut_length :]


def _until_stop(piece: np.ndarray, stops: StopText) -> tuple[np.ndarray, StopText]:
    """The piece [1, n], up to the token that completes a stop string, and the automaton after."""
    for index, token in enumerate(piece[0]):
        stops = stops.after(jnp.array([token]))
        if bool(stops.reached[0]):
            return piece[:, : index + 1], stops
    return piece, stops


def _window_rules(rules: TextRules, made: int, goes_on: bool) -> dict[str, Any]:
    """The rules on a text that change with its window, after `made` new tokens: those on the
    beginning and on the length hold for the first window, that on the end for the last one."""
    changed: dict[str, Any] = {"forced_eos_token_id": None} if goes_on else {}
    if made:
        changed |= {"begin_suppress_tokens": (), "min_length": 0}
        changed |= {"min_new_tokens": max(0, rules.min_new_tokens - made)}
    return changed
