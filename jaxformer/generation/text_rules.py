"""What a text may hold, whichever way its tokens are chosen: tokens that are never written, its
least length, its end.

In the comments, B is the number of rows, T the length of a prompt, S the slots for a prompt and the
new tokens, n a number of new tokens and V the size of the vocabulary.
"""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.files import ConfigError

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


def require(*conditions: tuple[bool, str]) -> None:
    """Raises ConfigError with the messages of the conditions that do not hold."""
    messages = [message for holds, message in conditions if not holds]
    if messages:
        raise ConfigError("; ".join(messages))


@dataclass(frozen=True)
class TextRules:
    """What a text may hold. The fields from `suppress_tokens` on are the settings of transformers'
    GenerationConfig with the same names, which `writing_rules` reads from a model's files. Lengths
    count the tokens of a row without its padding."""

    end_token: EndToken = None  # a text stops after it, or after any of several
    vocab_size: int | None = None  # ids from here on are padding of the table and never written
    suppress_tokens: tuple[int, ...] = ()  # never written
    begin_suppress_tokens: tuple[int, ...] = ()  # not written as the first new token
    min_length: int = 0  # tokens with the prompt, before which no end token is written
    min_new_tokens: int = 0  # new tokens before which no end token is written
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens is written twice; 0: any may be
    # The last of max_new_tokens is this token, or one of several, if the text has not ended before.
    forced_eos_token_id: EndToken = None

    def __post_init__(self) -> None:
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            ids = getattr(self, name)
            are_ids = isinstance(ids, tuple) and all(type(token) is int for token in ids)
            require((are_ids, f"{name}={ids!r} must be a tuple of token ids"))
        for name in ("min_length", "min_new_tokens", "no_repeat_ngram_size"):
            number = getattr(self, name)
            require((number >= 0, f"{name}={number} must be at least 0"))

    @property
    def free(self) -> bool:
        """Whether no rule is set but the end and the size of the vocabulary."""
        rules = fields(TextRules)[2:]
        return all(getattr(self, rule.name) == rule.default for rule in rules)


@struct.dataclass
class TextSoFar:
    """The texts so far: `tokens` [B, S] int32 are the prompts, each ending before the slot `begin`
    (-1 on padding), and from there on the new tokens. `count` of `limit` new tokens are written;
    the slots after them hold anything."""

    tokens: jax.Array
    begin: jax.Array
    count: jax.Array
    limit: jax.Array

    @classmethod
    def prompt(
        cls, tokens: jax.Array, segments: jax.Array, slots: int, limit: jax.Array
    ) -> "TextSoFar":
        """Prompts [B, T], padded on any side where `segments` [B, T] are 0, with space for `slots`
        tokens, of which at most `limit` are new ones."""
        # Padding is moved to the front, so that all rows continue in the same slot.
        order = jnp.argsort(segments != 0, axis=1, stable=True)
        tokens = jnp.take_along_axis(jnp.where(segments != 0, tokens, -1), order, axis=1)
        length = tokens.shape[1]
        tokens = jnp.pad(tokens, ((0, 0), (0, slots - length)))  # [B, S]
        return cls(tokens, jnp.int32(length), jnp.int32(0), jnp.asarray(limit, jnp.int32))

    def add(self, tokens: jax.Array) -> "TextSoFar":
        """With one more token [B] of each row."""
        longer = jax.lax.dynamic_update_slice(self.tokens, tokens[:, None], (0, self.end))
        return TextSoFar(longer, self.begin, self.count + 1, self.limit)

    def replace_new(self, tokens: jax.Array, count: jax.Array) -> "TextSoFar":
        """With other new tokens [B, n], of which `count` are written."""
        longer = jax.lax.dynamic_update_slice(self.tokens, tokens, (0, self.begin))
        return TextSoFar(longer, self.begin, count, self.limit)

    @property
    def end(self) -> jax.Array:
        """The slot of the next token."""
        return self.begin + self.count

    def lengths(self) -> jax.Array:
        """Tokens of each row [B], the prompt with them."""
        return jnp.sum(self._real(), axis=1)

    def _real(self) -> jax.Array:
        """bool [B, S]: which slots hold a token, neither padding nor one that is still to come."""
        return (self.tokens >= 0) & (jnp.arange(self.tokens.shape[1]) < self.end)

    def repeating(self, size: int, vocab_size: int) -> jax.Array:
        """The tokens [B, V] that would end a sequence of `size` tokens that a row has already."""
        batch, slots = self.tokens.shape
        context = size - 1  # tokens of a sequence before its last one
        starts = slots - context  # slots at which a sequence can begin
        if starts < 1:
            return jnp.zeros((batch, vocab_size), bool)
        newest = jax.lax.dynamic_slice(self.tokens, (0, self.end - context), (batch, context))
        # repeats[b, i]: the sequence that begins at slot i of row b has been written in full, and
        # begins with the newest tokens of the row. Its last token would make a second one.
        repeats = self._real()[:, context:] & (self.end >= context)  # [B, starts]
        for step in range(context):
            earlier = self.tokens[:, step : step + starts]
            repeats &= (earlier >= 0) & (earlier == newest[:, step, None])
        # Where nothing repeats the index is beyond the vocabulary, and dropped.
        banned = jnp.where(repeats, self.tokens[:, context:], vocab_size)
        rows = jnp.arange(batch)[:, None]
        return jnp.zeros((batch, vocab_size), bool).at[rows, banned].set(True, mode="drop")


def within(logits: jax.Array, vocab_size: int | None) -> jax.Array:
    """Logits [B, V] with the ids from `vocab_size` on, padding of the table, at -inf."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def permitted(
    scores: jax.Array, rules: TextRules, written: TextSoFar, certain: jax.Array | float = 0.0
) -> jax.Array:
    """Scores [B, V] with the tokens that may not come next at -inf; where the end is forced, its
    score is `certain` [B, 1]."""
    if rules.free:
        return scores
    ids = jnp.arange(scores.shape[-1])
    banned = ends(ids, rules.suppress_tokens)  # [V]
    banned |= (written.count == 0) & ends(ids, rules.begin_suppress_tokens)
    early = (written.lengths() < rules.min_length) | (written.count < rules.min_new_tokens)
    banned = banned | (early[:, None] & ends(ids, rules.end_token))  # [B, V]
    if rules.no_repeat_ngram_size:
        banned |= written.repeating(rules.no_repeat_ngram_size, scores.shape[-1])
    scores = jnp.where(banned, -jnp.inf, scores)
    if rules.forced_eos_token_id is None:
        return scores
    forced = jnp.where(ends(ids, rules.forced_eos_token_id), certain, -jnp.inf)
    return jnp.where(written.count == written.limit - 1, forced, scores)
