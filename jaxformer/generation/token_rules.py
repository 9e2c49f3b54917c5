"""The rules by which the next token is chosen: what each does to the logits.

A rule is a field of `Sampling` whose type has a `LogitRule`. A rule that is not used, because it
has its default, adds nothing to a program. In the comments, B is the number of rows, S the slots
for a prompt and the new tokens, and V the size of the vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.files import ConfigError
from jaxformer.generation.text_so_far import EndToken, TextSoFar, end_tokens, ends


class RuleContext(NamedTuple):
    """What a rule may read beside the logits: the texts so far, the end token of the settings, and
    the score [B, 1] of a token that is certain."""

    written: TextSoFar
    end_token: EndToken = None
    certain: jax.Array | float = 0.0


@dataclass(frozen=True)
class Values:
    """Which values a setting takes: `allowed` says whether a value is one, `words` what it has to
    be."""

    allowed: Callable[[Any], bool]
    words: str


@dataclass(frozen=True)
class LogitRule:
    """A rule. `apply(logits, value, step)` gives the logits [B, V] after it, and of a filter
    `apply(logits, value)`; None where the loop over tokens does the work itself."""

    kind: Literal["penalty", "text", "caller", "filter", "stop", "search"]
    values: Values
    apply: Callable[..., jax.Array] | None = None


def rules_of(settings: type) -> dict[str, LogitRule]:
    """Return the rules of a class of settings by name, in the order in which they are applied."""
    rules = {}
    for name, hint in get_type_hints(settings, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, LogitRule):
                rules[name] = extra
    return rules


def apply_rules(
    logits: jax.Array, settings: Any, kinds: tuple[str, ...], *step: RuleContext
) -> jax.Array:
    """Logits [B, V] after the rules of these kinds that the settings use; filters need no step."""
    for name, row in rules_of(type(settings)).items():
        if row.kind in kinds and row.apply is not None and is_used(settings, name):
            logits = row.apply(logits, getattr(settings, name), *step)
    return logits


def is_used(settings: Any, name: str) -> bool:
    """Return whether a rule has another value than its default."""
    return getattr(settings, name) != getattr(type(settings), name)


def number_from(low: float, high: float, *besides: float) -> Callable[[Any], bool]:
    """Return whether a value is a number of this range, but none of those `besides`."""

    def allowed(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high and value not in besides

    return allowed


def whole_from(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    """Return whether a value is a whole number of this range."""
    return lambda value: type(value) is int and low <= value <= high


def are_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(token) is int for token in value)


def is_end(value: Any) -> bool:
    return value is None or all(isinstance(token, int | np.integer) for token in end_tokens(value))


def are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(word and are_ids(word) for word in value)


def is_function(value: Any) -> bool:
    """Return whether a value is None, or a function that a compiled program takes as argument."""
    try:
        hash(value)
    except TypeError:
        return False
    return value is None or callable(value)


# Penalties and what a text may hold


def repetition_penalty(logits: jax.Array, penalty: float, step: RuleContext) -> jax.Array:
    """Logits of the tokens of a text and its prompt over the penalty, or times it below 0 (CTRL,
    arXiv:1909.05858, section 4.1)."""
    in_text = step.written.counts(logits.shape[-1]) > 0
    return jnp.where(in_text, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def presence_penalty(logits: jax.Array, penalty: float, step: RuleContext) -> jax.Array:
    """Logits less the penalty for each token that is among the new ones."""
    return logits - penalty * (step.written.counts(logits.shape[-1], new=True) > 0)


def frequency_penalty(logits: jax.Array, penalty: float, step: RuleContext) -> jax.Array:
    """Logits less the penalty for each time that a token is among the new ones."""
    return logits - penalty * step.written.counts(logits.shape[-1], new=True)


def _without(logits: jax.Array, banned: jax.Array) -> jax.Array:
    return jnp.where(banned, -jnp.inf, logits)


def no_repeat_ngram(logits: jax.Array, size: int, step: RuleContext) -> jax.Array:
    """Without the tokens that would end a sequence of `size` tokens that the text has already
    (arXiv:1705.04304)."""
    return _without(logits, step.written.repeating(size, logits.shape[-1]))


def bad_words(
    logits: jax.Array, words: tuple[tuple[int, ...], ...], step: RuleContext
) -> jax.Array:
    """Without the last token of each word whose other tokens are the newest of the text."""
    banned = jnp.zeros(logits.shape, bool)
    single_ends = [(token,) for token in end_tokens(step.end_token)]
    for size in sorted({len(word) for word in words}):
        # Words of a size are compared at once: a model may have thousands of them.
        group = np.array([word for word in words if len(word) == size and word not in single_ends])
        if group.size:
            newest = step.written.newest(size - 1)  # [B, size - 1]
            matches = (newest[:, None] == group[:, :-1]).all(axis=-1)  # [B, words]
            # Words may end in the same token, which any of them bans.
            banned = banned.at[:, group[:, -1]].max(matches)
    return _without(logits, banned)


def min_length(logits: jax.Array, length: int, step: RuleContext) -> jax.Array:
    """Without end tokens where the text and its prompt have fewer tokens."""
    early = step.written.lengths() < length
    return _without(logits, early[:, None] & _among(logits, step.end_token))


def min_new_tokens(logits: jax.Array, count: int, step: RuleContext) -> jax.Array:
    """Without end tokens where fewer new tokens are written."""
    return _without(logits, (step.written.count < count) & _among(logits, step.end_token))


def suppress_tokens(logits: jax.Array, tokens: tuple[int, ...], _: RuleContext) -> jax.Array:
    """Without these tokens."""
    return _without(logits, _among(logits, tokens))


def begin_suppress_tokens(
    logits: jax.Array, tokens: tuple[int, ...], step: RuleContext
) -> jax.Array:
    """Without these tokens as the first new one."""
    return _without(logits, (step.written.count == 0) & _among(logits, tokens))


def forced_eos_token(logits: jax.Array, token: EndToken, step: RuleContext) -> jax.Array:
    """Only this token, or one of several, where the last of max_new_tokens is chosen."""
    forced = jnp.where(_among(logits, token), step.certain, -jnp.inf)
    return jnp.where(step.written.count == step.written.limit - 1, forced, logits)


def callers_rule(logits: jax.Array, rule: Callable[..., Any], step: RuleContext) -> jax.Array:
    """What a function of the caller makes of the logits."""
    changed = jnp.asarray(rule(logits, step.written.newest_last()), jnp.float32)
    if changed.shape != logits.shape:
        raise ConfigError(
            f"rule={rule!r} returned an array {list(changed.shape)}: it must return logits of the"
            f" shape that it is called with, {list(logits.shape)}."
        )
    return changed


def _among(logits: jax.Array, tokens: EndToken) -> jax.Array:
    """Return which of the ids [V] are one of these tokens."""
    return ends(jnp.arange(logits.shape[-1]), tokens)


# Filters of a draw


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
    """Logits [B, V] over a temperature above 0. The largest of each row is subtracted first, so
    that its quotient is 0 at any temperature. A temperature that float32 rounds to 0 or to infinity
    is replaced by the nearest one whose reciprocal is a float32 too."""
    smallest = float(np.finfo(np.float32).tiny)
    bounded = min(max(temperature, smallest), 1 / smallest)
    return (logits - logits.max(axis=-1, keepdims=True)) / bounded


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Logits [B, V] with all but the k largest at -inf; ties with the k-th stay
    (arXiv:1805.04833)."""
    smallest_kept = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]  # [B, 1]
    return _without(logits, logits < smallest_kept)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Logits [B, V] with a token at -inf where the likelier ones have probability p together; the
    likeliest stays, however small p is (arXiv:1904.09751)."""
    ranked = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # of all likelier tokens
    likeliest = jnp.arange(ranked.shape[-1]) == 0  # it stays also where p rounds to 0
    nucleus = jnp.where((likelier < p) | likeliest, ranked, jnp.inf)
    return _without(logits, logits < jnp.min(nucleus, axis=-1, keepdims=True))


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
    """Logits [B, V] with a token at -inf whose probability is below p times the largest one
    (arXiv:2407.01082)."""
    # A ratio of probabilities is a difference of logits, which takes no softmax.
    return _without(logits, logits < logits.max(axis=-1, keepdims=True) + math.log(p))
