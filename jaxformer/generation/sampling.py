"""How the next token is drawn from its logits."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.generation.text_rules import TextRules, TextSoFar, permitted, require, within


@dataclass(frozen=True)
class Sampling(TextRules):
    """How a token is drawn: greedily at temperature 0, else at random from what the filters leave
    of the tokens that the rules permit. Raises ConfigError for a value out of range."""

    temperature: float = 1.0
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    # Keep the fewest likeliest tokens with at least this probability together (arXiv:1904.09751).
    top_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (
                0 <= self.temperature < math.inf,
                f"temperature={self.temperature} must be at least 0, and finite",
            ),
            (self.top_k >= 0, f"top_k={self.top_k} must be at least 0 (0 keeps all tokens)"),
            (0 < self.top_p <= 1, f"top_p={self.top_p} must be above 0 and at most 1"),
        )


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Logits [B, V] with all but the k largest at -inf; ties with the k-th stay."""
    smallest_kept = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]  # [B, 1]
    return jnp.where(logits < smallest_kept, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Logits [B, V] with a token at -inf where the likelier ones have probability p together; the
    likeliest stays, however small p is."""
    ranked = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # of all likelier tokens
    likeliest = jnp.arange(ranked.shape[-1]) == 0  # it stays also where p rounds to 0
    nucleus = jnp.where((likelier < p) | likeliest, ranked, jnp.inf)
    smallest_kept = jnp.min(nucleus, axis=-1, keepdims=True)  # [B, 1]
    return jnp.where(logits < smallest_kept, -jnp.inf, logits)


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
    """Logits [B, V] over a temperature above 0. The largest of each row is subtracted first, so
    that its quotient is 0 at any temperature. A temperature that float32 rounds to 0 or to infinity
    is replaced by the nearest one whose reciprocal is a float32 too."""
    smallest = float(np.finfo(np.float32).tiny)
    bounded = min(max(temperature, smallest), 1 / smallest)
    return (logits - logits.max(axis=-1, keepdims=True)) / bounded


def draw(
    logits: jax.Array, key: jax.Array, sampling: Sampling, written: TextSoFar | None = None
) -> jax.Array:
    """The next token of each row: logits [B, V] float32 -> [B] int32. The rules on the text hold
    where the texts so far are given, `written`."""
    logits = within(logits, sampling.vocab_size)
    if written is not None:
        logits = permitted(logits, sampling, written)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = tempered(logits, sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
