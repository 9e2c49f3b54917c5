"""The rules by which the next token is chosen: one row each, in the order in which they apply.

Penalties come first, then what a text may hold, a rule of the caller, and the filters of a draw, as
in transformers. A rule that is not used adds nothing to a program. In the comments, B is the number
of rows, S the slots for a prompt and the new tokens, and V the size of the vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
class TokenRule:
    """A rule. `name` is its setting, which is `off` where it is not used. `allowed` says whether a
    value is one, and `must_be` what it has to be. `apply(logits, value, step)` gives the logits
    [B, V] after it; None where the loop over tokens does the work itself. `formula` has z for
    logits and p for probabilities."""

    name: str
    kind: Literal["penalty", "text", "caller", "filter", "stop"]
    off: Any
    allowed: Callable[[Any], bool]
    must_be: str
    apply: Callable[..., jax.Array] | None
    formula: str
    source: str


def repetition_penalty(logits: jax.Array, penalty: float, step: RuleContext) -> jax.Array:
    """Logits of the tokens of a text and its prompt over the penalty, or times it below 0."""
    seen = step.written.counts(logits.shape[-1]) > 0
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def presence_penalty(logits: jax.Array, penalty: float, step: RuleContext) -> jax.Array:
    """Logits less the penalty for each token that is among the new ones."""
    return logits - penalty * (step.written.counts(logits.shape[-1], new=True) > 0)


def frequency_penalty(logits: jax.Array, penalty: float, step: RuleContext) -> jax.Array:
    """Logits less the penalty for each time that a token is among the new ones."""
    return logits - penalty * step.written.counts(logits.shape[-1], new=True)


def _without(logits: jax.Array, banned: jax.Array) -> jax.Array:
    return jnp.where(banned, -jnp.inf, logits)


def no_repeat_ngram(logits: jax.Array, size: int, step: RuleContext) -> jax.Array:
    """Without the tokens that would end a sequence of `size` tokens that the text has already."""
    return _without(logits, step.written.repeating(size, logits.shape[-1]))


def bad_words(
    logits: jax.Array, words: tuple[tuple[int, ...], ...], step: RuleContext
) -> jax.Array:
    """Without the last token of each word whose other tokens are the newest of the text."""
    banned = jnp.zeros(logits.shape, bool)
    single_ends = [(token,) for token in end_tokens(step.end_token)]
    for size in sorted({len(word) for word in words}):
        group = np.array([word for word in words if len(word) == size and word not in single_ends])
        if group.size:
            newest = step.written.newest(size - 1)  # [B, size - 1]
            matches = (newest[:, None] == group[:, :-1]).all(axis=-1)  # [B, words]
            banned = banned.at[:, group[:, -1]].max(matches)
    return _without(logits, banned)


def min_length(logits: jax.Array, length: int, step: RuleContext) -> jax.Array:
    """Without end tokens where the text and its prompt have fewer tokens."""
    early = step.written.lengths() < length
    return _without(logits, early[:, None] & ends(_ids(logits), step.end_token))


def min_new_tokens(logits: jax.Array, count: int, step: RuleContext) -> jax.Array:
    """Without end tokens where fewer new tokens are written."""
    return _without(logits, (step.written.count < count) & ends(_ids(logits), step.end_token))


def suppress_tokens(logits: jax.Array, tokens: tuple[int, ...], _: RuleContext) -> jax.Array:
    """Without these tokens."""
    return _without(logits, ends(_ids(logits), tokens))


def begin_suppress_tokens(
    logits: jax.Array, tokens: tuple[int, ...], step: RuleContext
) -> jax.Array:
    """Without these tokens as the first new one."""
    return _without(logits, (step.written.count == 0) & ends(_ids(logits), tokens))


def forced_eos_token(logits: jax.Array, token: EndToken, step: RuleContext) -> jax.Array:
    """Only this token, or one of several, where the last of max_new_tokens is chosen."""
    forced = jnp.where(ends(_ids(logits), token), step.certain, -jnp.inf)
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


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
    """Logits [B, V] over a temperature above 0. The largest of each row is subtracted first, so
    that its quotient is 0 at any temperature. A temperature that float32 rounds to 0 or to infinity
    is replaced by the nearest one whose reciprocal is a float32 too."""
    smallest = float(np.finfo(np.float32).tiny)
    bounded = min(max(temperature, smallest), 1 / smallest)
    return (logits - logits.max(axis=-1, keepdims=True)) / bounded


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


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
    """Logits [B, V] with a token at -inf whose probability is below p times the largest one."""
    smallest_kept = logits.max(axis=-1, keepdims=True) + math.log(p)
    return jnp.where(logits < smallest_kept, -jnp.inf, logits)


def keep_typical_p(logits: jax.Array, p: float) -> jax.Array:
    """Logits [B, V] with all at -inf but the fewest tokens that have probability p together, those
    first whose information is nearest to the entropy; ties with the last of them stay."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(logs)
    entropy = -jnp.where(probabilities > 0, probabilities * logs, 0.0).sum(axis=-1, keepdims=True)
    distances = jnp.abs(-logs - entropy)
    order = jnp.argsort(distances, axis=-1)
    totals = jnp.cumsum(jnp.take_along_axis(probabilities, order, axis=-1), axis=-1)
    last = jnp.minimum((totals < p).sum(axis=-1, keepdims=True), logits.shape[-1] - 1)  # [B, 1]
    largest_kept = jnp.take_along_axis(distances, jnp.take_along_axis(order, last, 1), axis=-1)
    return jnp.where(distances > largest_kept, -jnp.inf, logits)


def _ids(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1])


def _filter(keep: Callable[[jax.Array, Any], jax.Array]) -> Callable[..., jax.Array]:
    """A filter, which reads the logits alone, as a rule."""
    return lambda logits, value, step: keep(logits, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _are_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(token) is int for token in value)


def _is_end(value: Any) -> bool:
    return value is None or all(isinstance(token, int | np.integer) for token in end_tokens(value))


def _are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(word and _are_ids(word) for word in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _is_function(value: Any) -> bool:
    if value is None:
        return True
    try:
        hash(value)
    except TypeError:
        return False
    return callable(value)


WITHIN_TWO = "from -2 to 2"

RULES: tuple[TokenRule, ...] = (
    TokenRule(
        *("repetition_penalty", "penalty", 1.0),
        *(lambda r: _is_number(r) and 0 < r < math.inf, "above 0, and finite (1 changes nothing)"),
        repetition_penalty,
        "z_i / r if z_i >= 0 else z_i * r, for the tokens i of the text and its prompt",
        "arXiv:1909.05858 (CTRL), section 4.1; transformers",
    ),
    TokenRule(
        *("presence_penalty", "penalty", 0.0),
        *(lambda a: _is_number(a) and -2 <= a <= 2, WITHIN_TWO),
        presence_penalty,
        "z_i - a [c_i > 0], where c_i counts token i among the new ones",
        "the API of OpenAI; vLLM",
    ),
    TokenRule(
        *("frequency_penalty", "penalty", 0.0),
        *(lambda a: _is_number(a) and -2 <= a <= 2, WITHIN_TWO),
        frequency_penalty,
        "z_i - a c_i, where c_i counts token i among the new ones",
        "the API of OpenAI; vLLM",
    ),
    TokenRule(
        *("no_repeat_ngram_size", "text", 0, _at_least(0), "at least 0", no_repeat_ngram),
        "no n tokens in a row occur twice in a text and its prompt",
        "arXiv:1705.04304; transformers",
    ),
    TokenRule(
        *("bad_words", "text", (), _are_words, "a tuple of tuples of token ids", bad_words),
        "the last token of a word is not written where its other tokens are the newest ones",
        "transformers (bad_words_ids)",
    ),
    TokenRule(
        *("min_length", "text", 0, _at_least(0), "at least 0", min_length),
        "no end token before so many tokens, the prompt with them",
        "transformers",
    ),
    TokenRule(
        *("min_new_tokens", "text", 0, _at_least(0), "at least 0", min_new_tokens),
        "no end token before so many new tokens",
        "transformers",
    ),
    TokenRule(
        *("suppress_tokens", "text", (), _are_ids, "a tuple of token ids", suppress_tokens),
        "these tokens are never written",
        "transformers",
    ),
    TokenRule(
        *("begin_suppress_tokens", "text", (), _are_ids, "a tuple of token ids"),
        begin_suppress_tokens,
        "these tokens are not the first new one",
        "transformers",
    ),
    TokenRule(
        *("forced_eos_token_id", "text", None, _is_end, "a token id, a tuple of them or None"),
        forced_eos_token,
        "the last of max_new_tokens is this token, where the text has not ended before",
        "transformers",
    ),
    TokenRule(
        *("rule", "caller", None, _is_function),
        "a function (logits [B, V], tokens [B, S]) -> logits [B, V] that can be hashed",
        callers_rule,
        "z = rule(z, tokens); the newest token is last, and -1 stands before the first",
        "the caller",
    ),
    TokenRule(
        *("temperature", "filter", None),
        *(lambda t: _is_number(t) and 0 <= t < math.inf, "at least 0, and finite"),
        _filter(tempered),
        "z / t; at 0 the likeliest token is written",
        "arXiv:1503.02531",
    ),
    TokenRule(
        *("top_k", "filter", 0, _at_least(0), "at least 0 (0 keeps all tokens)"),
        _filter(keep_top_k),
        "keeps the k likeliest tokens, and ties with the last",
        "arXiv:1805.04833",
    ),
    TokenRule(
        *("top_p", "filter", 1.0),
        *(lambda p: _is_number(p) and 0 < p <= 1, "above 0 and at most 1"),
        _filter(keep_top_p),
        "keeps the fewest likeliest tokens of probability p together",
        "arXiv:1904.09751",
    ),
    TokenRule(
        *("min_p", "filter", 0.0),
        *(lambda p: _is_number(p) and 0 <= p <= 1, "from 0 to 1 (0 keeps all tokens)"),
        _filter(keep_min_p),
        "keeps token i where p_i >= p max_j p_j",
        "arXiv:2407.01082",
    ),
    TokenRule(
        *("typical_p", "filter", 1.0),
        *(lambda p: _is_number(p) and 0 < p <= 1, "above 0 and at most 1 (1 keeps all tokens)"),
        _filter(keep_typical_p),
        "keeps the fewest tokens of probability p together, by |-log p_i - H|, H the entropy",
        "arXiv:2202.00666",
    ),
    TokenRule(
        *("end_token", "stop", None, _is_end, "a token id, a tuple of them or None", None),
        "a text ends after this token, or after any of several",
        "transformers (eos_token_id)",
    ),
    TokenRule(
        *("stop_strings", "stop", (), _are_texts, "a tuple of texts that are not empty", None),
        "a text ends with the token that completes one of these texts among the new tokens",
        "transformers, vLLM (stop); CACM 18(6), 1975",
    ),
)


def apply_rules(
    logits: jax.Array, settings: Any, step: RuleContext | None, kinds: tuple[str, ...]
) -> jax.Array:
    """Logits [B, V] after the rules of these kinds that the settings use; filters need no step."""
    for rule in RULES:
        if rule.kind in kinds and rule.apply is not None and is_used(settings, rule):
            logits = rule.apply(logits, getattr(settings, rule.name), step)
    return logits


def is_used(settings: Any, rule: TokenRule) -> bool:
    """Whether the settings have the rule, with a value that is not `off`."""
    return getattr(settings, rule.name, rule.off) != rule.off


def uses(settings: Any, *kinds: str) -> bool:
    """Whether the settings use a rule of these kinds."""
    return any(rule.kind in kinds and is_used(settings, rule) for rule in RULES)


def check_values(settings: Any) -> None:
    """Raises ConfigError with one message for all values that are out of range."""
    require(
        *(
            (rule.allowed(value), f"{rule.name}={value!r} must be {rule.must_be}")
            for rule in RULES
            if hasattr(settings, rule.name)
            for value in [getattr(settings, rule.name)]
        )
    )


def require(*conditions: tuple[bool, str]) -> None:
    """Raises ConfigError with the messages of the conditions that do not hold."""
    messages = [message for holds, message in conditions if not holds]
    if messages:
        raise ConfigError("; ".join(messages))
