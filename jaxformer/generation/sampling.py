"""The settings of the rules of a token, and how the next one is drawn from its logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxformer.files import ConfigError
from jaxformer.generation import token_rules as apply
from jaxformer.generation.text_so_far import EndToken, TextSoFar
from jaxformer.generation.token_rules import (
    LogitRule,
    RuleContext,
    Values,
    apply_rules,
    are_ids,
    are_words,
    is_end,
    is_function,
    number_from,
    rules_of,
    tempered,
    whole_from,
)

TOKEN_IDS = Values(are_ids, "a tuple of token ids")
TOKEN_WORDS = Values(are_words, "a tuple of tuples of token ids")
END_TOKENS = Values(is_end, "a token id, a tuple of them or None")
WHOLE_NUMBER = Values(whole_from(0), "a whole number, at least 0")
WITHIN_TWO = Values(number_from(-2, 2), "from -2 to 2")
PENALTY_FACTOR = Values(
    number_from(0, math.inf, 0, math.inf), "above 0, and finite (1 changes nothing)"
)
LOGITS_FUNCTION = Values(
    is_function, "a function (logits [B, V], tokens [B, S]) -> logits [B, V] that can be hashed"
)
TEMPERATURES = Values(number_from(0, math.inf, math.inf), "at least 0, and finite")
POSITIVE_SHARE = Values(number_from(0, 1, 0), "above 0 and at most 1")
SHARE_OF_ONE = Values(number_from(0, 1), "from 0 to 1")


@dataclass(frozen=True)
class TextRules:
    """What a text may hold, whichever way its tokens are chosen. The rules are applied in this
    order, which is that of transformers. Lengths count the tokens of a row without its padding."""

    vocab_size: int | None = None  # ids from here on are padding of the table and never written
    # A text stops after it, or after any of several.
    end_token: Annotated[EndToken, LogitRule("stop", END_TOKENS)] = None
    # Above 1, tokens of the text and its prompt are less likely.
    repetition_penalty: Annotated[
        float, LogitRule("penalty", PENALTY_FACTOR, apply.repetition_penalty)
    ] = 1.0
    # Subtracted once from the logits of tokens that were written.
    presence_penalty: Annotated[float, LogitRule("penalty", WITHIN_TWO, apply.presence_penalty)] = (
        0.0
    )
    # Subtracted each time that a token was written.
    frequency_penalty: Annotated[
        float, LogitRule("penalty", WITHIN_TWO, apply.frequency_penalty)
    ] = 0.0
    # No sequence of so many tokens is written twice.
    no_repeat_ngram_size: Annotated[int, LogitRule("text", WHOLE_NUMBER, apply.no_repeat_ngram)] = 0
    # Sequences of tokens that are not written.
    bad_words: Annotated[
        tuple[tuple[int, ...], ...], LogitRule("text", TOKEN_WORDS, apply.bad_words)
    ] = ()
    # Tokens with the prompt, before which no end token is written.
    min_length: Annotated[int, LogitRule("text", WHOLE_NUMBER, apply.min_length)] = 0
    # New tokens before which no end token is written.
    min_new_tokens: Annotated[int, LogitRule("text", WHOLE_NUMBER, apply.min_new_tokens)] = 0
    # Never written.
    suppress_tokens: Annotated[
        tuple[int, ...], LogitRule("text", TOKEN_IDS, apply.suppress_tokens)
    ] = ()
    # Not written as the first new token.
    begin_suppress_tokens: Annotated[
        tuple[int, ...], LogitRule("text", TOKEN_IDS, apply.begin_suppress_tokens)
    ] = ()
    # The last of max_new_tokens is this token, or one of several, if the text has not ended before.
    forced_eos_token_id: Annotated[
        EndToken, LogitRule("text", END_TOKENS, apply.forced_eos_token)
    ] = None
    # A function of the caller. Of the tokens the newest is last, and -1 stands before the first.
    rule: Annotated[
        Callable[[jax.Array, jax.Array], jax.Array] | None,
        LogitRule("caller", LOGITS_FUNCTION, apply.callers_rule),
    ] = None

    def __post_init__(self) -> None:
        messages = []
        for name, row in rules_of(type(self)).items():
            value = getattr(self, name)
            if not row.values.allowed(value):
                messages.append(f"{name}={value!r} must be {row.values.words}")
        if messages:
            raise ConfigError("; ".join(messages))


@dataclass(frozen=True)
class Sampling(TextRules):
    """How a token is drawn: greedily at temperature 0, else at random from what the filters leave
    of the tokens that the rules permit."""

    temperature: Annotated[float, LogitRule("filter", TEMPERATURES)] = 1.0
    # Keep the k likeliest tokens.
    top_k: Annotated[int, LogitRule("filter", WHOLE_NUMBER, apply.keep_top_k)] = 0
    # Keep the fewest likeliest tokens with this probability together.
    top_p: Annotated[float, LogitRule("filter", POSITIVE_SHARE, apply.keep_top_p)] = 1.0
    # Keep tokens with this share of the largest probability.
    min_p: Annotated[float, LogitRule("filter", SHARE_OF_ONE, apply.keep_min_p)] = 0.0


def sampling_key(key: jax.Array | None, sampling: Sampling) -> jax.Array:
    """Return the key of the draws, which greedy texts do without."""
    if key is None and sampling.temperature > 0:
        raise ConfigError(
            "sampling at a temperature needs key=jax.random.key(...); with temperature=0 (greedy)"
            " leave it out."
        )
    return jax.random.key(0) if key is None else key


def within(logits: jax.Array, vocab_size: int | None) -> jax.Array:
    """Logits [B, V] with the ids from `vocab_size` on, padding of the table, at -inf."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def permitted(
    scores: jax.Array, rules: TextRules, written: TextSoFar, certain: jax.Array | float = 0.0
) -> jax.Array:
    """Scores [B, V] after the penalties, with the tokens that may not come next at -inf; where the
    end is forced, its score is `certain` [B, 1]."""
    step = RuleContext(written, rules.end_token, certain)
    return apply_rules(scores, rules, ("penalty", "text", "caller"), step)


def draw(
    logits: jax.Array, key: jax.Array, sampling: Sampling, written: TextSoFar | None = None
) -> jax.Array:
    """Return the next token of each row: logits [B, V] float32 -> [B] int32. The rules on the text
    hold where the texts so far are given, `written`."""
    logits = choices(logits, sampling, written)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def choices(logits: jax.Array, sampling: Sampling, written: TextSoFar | None = None) -> jax.Array:
    """Return the logits [B, V] from which `draw` draws, or of which it takes the largest."""
    logits = within(logits, sampling.vocab_size)
    if written is not None:
        logits = permitted(logits, sampling, written)
    if sampling.temperature == 0:
        return logits
    return apply_rules(tempered(logits, sampling.temperature), sampling, ("filter",))
