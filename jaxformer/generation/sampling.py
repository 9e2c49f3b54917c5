"""How the next token is drawn from its logits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ConfigError

EndToken = int | tuple[int, ...] | None


def end_tokens(end_token: EndToken) -> tuple[int, ...]:
    """The end tokens: none, one or several."""
    if isinstance(end_token, tuple):
        return end_token
    return () if end_token is None else (end_token,)


def ends(tokens: jax.Array, end_token: EndToken) -> jax.Array:
    """Which of the tokens are an end token."""
    return jnp.isin(tokens, jnp.array(end_tokens(end_token), jnp.int32))


def filler(end_token: EndToken) -> int:
    """The token that fills a row after its end."""
    return (*end_tokens(end_token), 0)[0]


def refuse(problems: Mapping[str, bool]) -> None:
    """ConfigError with the messages of the conditions that do not hold."""
    if not all(problems.values()):
        raise ConfigError("; ".join(message for message, fine in problems.items() if not fine))


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: greedily at temperature 0, else at random from what the filters leave.
    Raises ConfigError for a value out of range."""

    temperature: float = 1.0
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    # Keep the fewest likeliest tokens with at least this probability together (arXiv:1904.09751).
    top_p: float = 1.0
    end_token: EndToken = None  # a row stops after it, or after any of several
    vocab_size: int | None = None  # ids from here on are padding of the table and never drawn

    def __post_init__(self) -> None:
        refuse(
            {
                f"temperature={self.temperature} must be at least 0, and finite": (
                    0 <= self.temperature < math.inf
                ),
                f"top_k={self.top_k} must be at least 0 (0 keeps all tokens)": self.top_k >= 0,
                f"top_p={self.top_p} must be above 0 and at most 1": 0 < self.top_p <= 1,
            }
        )


def within(logits: jax.Array, vocab_size: int | None) -> jax.Array:
    """[B, V] with the ids from `vocab_size` on, padding of the table, at -inf."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """[B, V] with all but the k largest at -inf; ties with the k-th stay."""
    least = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """[B, V] with a token at -inf where the likelier ones have probability p together; the
    likeliest stays, however small p is."""
    ranked = jnp.sort(logits, axis=-1, descending=True)
    shares = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # the probability of all likelier tokens
    likeliest = jnp.arange(ranked.shape[-1]) == 0  # nothing is before it, and p may round to 0
    least = jnp.min(jnp.where((before < p) | likeliest, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
    """[B, V] over a temperature above 0, less the largest of each row, so that its quotient is 0
    at any temperature. One that float32 rounds to 0 or to infinity is replaced by the nearest that
    it has, of which the reciprocal is one of its numbers too."""
    least = float(np.finfo(np.float32).tiny)
    bounded = min(max(temperature, least), 1 / least)
    return (logits - logits.max(axis=-1, keepdims=True)) / bounded


def draw(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row: [B, V] float32 -> [B] int32."""
    logits = within(logits, sampling.vocab_size)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = tempered(logits, sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
