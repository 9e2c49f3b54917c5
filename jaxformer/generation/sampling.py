"""The settings of the rules of a token, and how the next one is drawn from its logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp

from jaxformer.files import ConfigError
from jaxformer.generation.stop_strings import TokenBytes
from jaxformer.generation.text_so_far import EndToken, TextSoFar
from jaxformer.generation.token_rules import RuleContext, apply_rules, check_values


@dataclass(frozen=True)
class TextRules:
    """What a text may hold, whichever way its tokens are chosen. Lengths count the tokens of a row
    without its padding."""

    end_token: EndToken = None  # a text stops after it, or after any of several
    vocab_size: int | None = None  # ids from here on are padding of the table and never written
    suppress_tokens: tuple[int, ...] = ()  # never written
    begin_suppress_tokens: tuple[int, ...] = ()  # not written as the first new token
    min_length: int = 0  # tokens with the prompt, before which no end token is written
    min_new_tokens: int = 0  # new tokens before which no end token is written
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens is written twice; 0: any may be
    # The last of max_new_tokens is this token, or one of several, if the text has not ended before.
    forced_eos_token_id: EndToken = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are not written
    repetition_penalty: float = 1.0  # above 1, tokens of the text and its prompt are less likely
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens that were written
    frequency_penalty: float = 0.0  # subtracted each time that a token was written
    # A function (logits [B, V], tokens [B, S]) -> logits of the caller. The newest token is last.
    rule: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    stop_strings: tuple[str, ...] = ()  # a text stops after the token that completes one of these
    tokenizer: TokenBytes | None = None  # whose tokens have the texts in which these are found

    def __post_init__(self) -> None:
        check_values(self)

    def of_program(self) -> Self:
        """The settings that a compiled program depends on."""
        return replace(self, stop_strings=(), tokenizer=None)


@dataclass(frozen=True)
class Sampling(TextRules):
    """How a token is drawn: greedily at temperature 0, else at random from what the filters leave
    of the tokens that the rules permit."""

    temperature: float = 1.0
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest likeliest tokens with this probability together
    min_p: float = 0.0  # keep tokens with this share of the largest probability
    typical_p: float = 1.0  # keep tokens of nearly typical information, of this probability
    n: int = 1  # texts for each prompt, which is read once

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.n) is not int or self.n < 1:
            raise ConfigError(f"n={self.n!r} must be at least 1")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"n={self.n} texts of one prompt are equal at temperature=0 (greedy): sample at a"
                " temperature, or search with jf.beam_search(..., beams=n)."
            )

    def of_program(self) -> Self:
        return replace(super().of_program(), n=1)


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
    return apply_rules(scores, rules, step, ("penalty", "text", "caller"))


def draw(
    logits: jax.Array, key: jax.Array, sampling: Sampling, written: TextSoFar | None = None
) -> jax.Array:
    """The next token of each row: logits [B, V] float32 -> [B] int32. The rules on the text hold
    where the texts so far are given, `written`."""
    logits = choices(logits, sampling, written)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def choices(logits: jax.Array, sampling: Sampling, written: TextSoFar | None = None) -> jax.Array:
    """The logits [B, V] from which `draw` draws, or of which it takes the largest."""
    logits = within(logits, sampling.vocab_size)
    if written is not None:
        logits = permitted(logits, sampling, written)
    if sampling.temperature == 0:
        return logits
    return apply_rules(logits, sampling, None, ("filter",))
