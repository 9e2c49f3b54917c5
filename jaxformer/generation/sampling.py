"""The settings of the rules of a token, what they do to its logits, and how it is drawn from them.

A rule that is not used, because it has its default, adds nothing to a program. In the comments, B
is the number of rows, S the slots for a prompt and the new tokens, and V the size of the
vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.files import ConfigError
from jaxformer.generation.text_so_far import EndToken, TextSoFar, end_tokens, ends


class Values(NamedTuple):
    """Which values a setting takes: `allowed` says whether a value is one, `words` what it has to
    be."""

    allowed: Callable[[Any], bool]
    words: str


def number_from(low: float, high: float, *besides: float) -> Callable[[Any], bool]:
    """Return whether a value is a number of this range, but none of those `besides`."""

    def allowed(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high and value not in besides

    return allowed


def whole_from(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    """Return whether a value is a whole number of this range."""
    return lambda value: type(value) is int and low <= value <= high


def _are_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(token) is int for token in value)


def _are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(word and _are_ids(word) for word in value)


def _is_end(value: Any) -> bool:
    return value is None or all(isinstance(token, int | np.integer) for token in end_tokens(value))


def _is_function(value: Any) -> bool:
    """Return whether a value is None, or a function that a compiled program takes as argument."""
    try:
        hash(value)
    except TypeError:
        return False
    return value is None or callable(value)


# The rules that change the logits of tokens which they permit, but for the caller's own.
LOGIT_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# What a draw has beside the rules on its text.
FILTERS = ("temperature", "top_k", "top_p", "min_p")
# The rules that are numbers, of which each row may have its own while a program runs (`used`).
NUMBERS = (*LOGIT_PENALTIES, *FILTERS)
ROW_AXIS = "rows"  # the mapped axis of rows that have numbers of their own
TOKEN_IDS = Values(_are_ids, "a tuple of token ids")
END_TOKENS = Values(_is_end, "a token id, a tuple of them or None")
COUNT = Values(whole_from(0), "a whole number, at least 0")
PENALTY = Values(number_from(-2, 2), "from -2 to 2")


@dataclass(frozen=True)
class TextRules:
    """What a text may hold, whichever way its tokens are chosen. The rules are applied in this
    order, which is that of transformers. Lengths count the tokens of a row without its padding."""

    values: ClassVar[dict[str, Values]] = {
        "end_token": END_TOKENS,
        "repetition_penalty": Values(
            number_from(0, math.inf, 0, math.inf), "above 0, and finite (1 changes nothing)"
        ),
        "presence_penalty": PENALTY,
        "frequency_penalty": PENALTY,
        "no_repeat_ngram_size": COUNT,
        "bad_words": Values(_are_words, "a tuple of tuples of token ids"),
        "min_length": COUNT,
        "min_new_tokens": COUNT,
        "suppress_tokens": TOKEN_IDS,
        "begin_suppress_tokens": TOKEN_IDS,
        "forced_eos_token_id": END_TOKENS,
        "rule": Values(
            _is_function,
            "a function (logits [B, V], tokens [B, S]) -> logits [B, V] that can be hashed",
        ),
    }

    vocab_size: int | None = None  # ids from here on are padding of the table and never written
    end_token: EndToken = None  # a text stops after it, or after any of several
    repetition_penalty: float = 1.0  # above 1, tokens of the text and its prompt are less likely
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens that were written
    frequency_penalty: float = 0.0  # subtracted each time that a token was written
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens is written twice
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are not written
    min_length: int = 0  # tokens with the prompt, before which no end token is written
    min_new_tokens: int = 0  # new tokens before which no end token is written
    suppress_tokens: tuple[int, ...] = ()  # never written
    begin_suppress_tokens: tuple[int, ...] = ()  # not written as the first new token
    # The last of max_new_tokens is this token, or one of several, if the text has not ended before.
    forced_eos_token_id: EndToken = None
    # A function of the caller. Of the tokens the newest is last, and -1 stands before the first.
    rule: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    def __post_init__(self) -> None:
        messages = []
        for name, (allowed, words) in self.values.items():
            value = getattr(self, name)
            # The numbers of rows were checked before the program.
            if not isinstance(value, jax.core.Tracer) and not allowed(value):
                messages.append(f"{name}={value!r} must be {words}")
        if messages:
            raise ConfigError("; ".join(messages))


@dataclass(frozen=True)
class Sampling(TextRules):
    """How a token is drawn: greedily at temperature 0, else at random from what the filters leave
    of the tokens that the rules permit."""

    values: ClassVar[dict[str, Values]] = TextRules.values | {
        "temperature": Values(number_from(0, math.inf, math.inf), "at least 0, and finite"),
        "top_k": COUNT,
        "top_p": Values(number_from(0, 1, 0), "above 0 and at most 1"),
        "min_p": Values(number_from(0, 1), "from 0 to 1"),
    }

    temperature: float = 1.0
    top_k: int = 0  # keep the k likeliest tokens
    top_p: float = 1.0  # keep the fewest likeliest tokens with this probability together
    min_p: float = 0.0  # keep tokens with this share of the largest probability


def sampling_key(key: jax.Array | None, sampling: Sampling) -> jax.Array:
    """Return the key of the draws, which greedy texts do without."""
    if key is None and sampling.temperature > 0:
        raise ConfigError(
            "sampling at a temperature needs key=jax.random.key(...); with temperature=0 (greedy)"
            " leave it out."
        )
    if key is None:
        return jax.random.key(0)
    return key


def within(logits: jax.Array, vocab_size: int | None) -> jax.Array:
    """Return the logits [B, V] with the ids from `vocab_size` on, padding of the table, at -inf."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    return _without(logits, jnp.arange(logits.shape[-1]) >= vocab_size)


def used(
    is_used: bool | jax.Array, rule: Callable[[jax.Array], jax.Array], logits: jax.Array
) -> jax.Array:
    """Return `rule(logits)` where a rule is used, else the logits. Of rows with numbers of their
    own, which are mapped over the axis `ROW_AXIS`, the rule is computed where any row uses it, and
    has to change nothing in the others."""
    if isinstance(is_used, jax.core.Tracer):
        by_any = jax.lax.pmax(jnp.asarray(is_used, jnp.int32), ROW_AXIS) > 0
        return jax.lax.cond(by_any, rule, lambda same: same, logits)  # type: ignore[no-any-return]
    if is_used:
        return rule(logits)
    return logits


def permitted(
    scores: jax.Array, rules: TextRules, written: TextSoFar, certain: jax.Array | float = 0.0
) -> jax.Array:
    """Return scores [B, V] after the penalties, with the tokens that may not come next at -inf;
    where the end is forced, its score is `certain` [B, 1]."""
    size = scores.shape[-1]
    ids = jnp.arange(size)
    penalty = rules.repetition_penalty

    def repeated_less(scores: jax.Array) -> jax.Array:
        # CTRL, arXiv:1909.05858, section 4.1.
        penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
        return jnp.where(written.counts(size) > 0, penalized, scores)

    def with_presence(scores: jax.Array) -> jax.Array:
        return scores - rules.presence_penalty * (written.counts(size, new=True) > 0)

    def with_frequency(scores: jax.Array) -> jax.Array:
        return scores - rules.frequency_penalty * written.counts(size, new=True)

    scores = used(penalty != 1, repeated_less, scores)
    scores = used(rules.presence_penalty != 0, with_presence, scores)
    scores = used(rules.frequency_penalty != 0, with_frequency, scores)
    if rules.no_repeat_ngram_size:
        # Those that would end a sequence that the text has already (arXiv:1705.04304).
        scores = _without(scores, written.repeating(rules.no_repeat_ngram_size, size))
    for length in sorted({len(word) for word in rules.bad_words}):
        # The last token of each word whose other tokens are the newest of the text. Words of a
        # length are compared at once: a model may have thousands of them.
        group = []
        for word in rules.bad_words:
            is_end = length == 1 and word[0] in end_tokens(rules.end_token)
            if len(word) == length and not is_end:
                group.append(word)
        if group:
            words = np.array(group)
            newest = written.newest(length - 1)  # [B, length - 1]
            matches = (newest[:, None] == words[:, :-1]).all(axis=-1)  # [B, words]
            # Words may end in the same token, which any of them bans.
            banned = jnp.zeros(scores.shape, bool).at[:, words[:, -1]].max(matches)
            scores = _without(scores, banned)
    # Before these lengths a text does not end.
    if rules.min_length:
        early = written.lengths() < rules.min_length
        scores = _without(scores, early[:, None] & ends(ids, rules.end_token))
    if rules.min_new_tokens:
        early = written.count < rules.min_new_tokens
        scores = _without(scores, early & ends(ids, rules.end_token))
    if rules.suppress_tokens:
        scores = _without(scores, ends(ids, rules.suppress_tokens))
    if rules.begin_suppress_tokens:
        is_first = written.count == 0
        scores = _without(scores, is_first & ends(ids, rules.begin_suppress_tokens))
    if rules.forced_eos_token_id is not None:
        forced = jnp.where(ends(ids, rules.forced_eos_token_id), certain, -jnp.inf)
        scores = jnp.where(written.count == written.limit - 1, forced, scores)
    if rules.rule is not None:
        changed = jnp.asarray(rules.rule(scores, written.newest_last()), jnp.float32)
        if changed.shape != scores.shape:
            raise ConfigError(
                f"rule={rules.rule!r} returned an array {list(changed.shape)}: it must return"
                f" logits of the shape that it is called with, {list(scores.shape)}."
            )
        scores = changed
    return scores


def _without(logits: jax.Array, banned: jax.Array) -> jax.Array:
    return jnp.where(banned, -jnp.inf, logits)


def draw(
    logits: jax.Array, key: jax.Array, sampling: Sampling, written: TextSoFar | None = None
) -> jax.Array:
    """Return the next token of each row: logits [B, V] float32 -> [B] int32. The rules on the text
    hold where the texts so far are given, `written`."""
    logits = choices(logits, sampling, written)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn(_: jax.Array) -> jax.Array:
        token = jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
        return jnp.where(sampling.temperature == 0, greedy, token)

    return used(sampling.temperature > 0, drawn, greedy)


def choices(logits: jax.Array, sampling: Sampling, written: TextSoFar | None = None) -> jax.Array:
    """Return the logits [B, V] from which `draw` draws, or of which it takes the largest."""
    temperature, top_k, top_p, min_p = (getattr(sampling, name) for name in FILTERS)
    logits = within(logits, sampling.vocab_size)
    if written is not None:
        logits = permitted(logits, sampling, written)
    if not isinstance(temperature, jax.core.Tracer) and temperature == 0:
        return logits

    def likeliest_k(logits: jax.Array) -> jax.Array:
        # Ties with the k-th stay (arXiv:1805.04833).
        if isinstance(top_k, jax.core.Tracer):
            ranked = jnp.sort(logits, axis=-1, descending=True)
            last = jnp.take(ranked, jnp.minimum(top_k, logits.shape[-1]) - 1, axis=-1)[:, None]
            return _without(logits, (top_k > 0) & (logits < last))
        best, _ = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))
        return _without(logits, logits < best[:, -1:])

    def nucleus(logits: jax.Array) -> jax.Array:
        # Without a token where the likelier ones have this probability together
        # (arXiv:1904.09751).
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # of all likelier tokens
        likeliest = jnp.arange(ranked.shape[-1]) == 0  # it stays also where top_p rounds to 0
        kept = (likelier < top_p) | likeliest | (top_p == 1)
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        return _without(logits, logits < least)

    def above_share(logits: jax.Array) -> jax.Array:
        # A ratio of probabilities is a difference of logits, which takes no softmax
        # (arXiv:2407.01082).
        log: Callable[[Any], Any] = math.log
        if isinstance(min_p, jax.core.Tracer):
            log = jnp.log
        return _without(logits, logits < logits.max(axis=-1, keepdims=True) + log(min_p))

    logits = used(temperature > 0, lambda logits: tempered(logits, temperature), logits)
    logits = used(top_k != 0, likeliest_k, logits)
    logits = used(top_p != 1, nucleus, logits)
    return used(min_p != 0, above_share, logits)


def tempered(logits: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """Return logits [B, V] over a temperature above 0. The largest of each row is subtracted first,
    so that its quotient is 0 at any temperature. A temperature that float32 rounds to 0 or to
    infinity is replaced by the nearest one whose reciprocal is a float32 too. At 0, which a row of
    its own may have, logits stay."""
    smallest = float(np.finfo(np.float32).tiny)
    bounded: float | jax.Array
    if isinstance(temperature, jax.core.Tracer):
        bounded = jnp.clip(temperature, smallest, 1 / smallest)
    else:
        bounded = min(max(temperature, smallest), 1 / smallest)
    quotients = (logits - logits.max(axis=-1, keepdims=True)) / bounded
    return jnp.where(temperature == 0, logits, quotients)
