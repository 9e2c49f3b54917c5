"""The texts that are being written: their tokens so far, and what ends them.

In the comments, B is the number of rows, T the length of a prompt, S the slots for a prompt and the
new tokens, n a number of new tokens and V the size of the vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

EndToken = int | tuple[int, ...] | None


def end_tokens(end_token: EndToken) -> tuple[int, ...]:
    """Return the end tokens: none, one or several."""
    if end_token is None:
        return ()
    if isinstance(end_token, tuple):
        return end_token
    return (end_token,)


def ends(tokens: jax.Array, end_token: EndToken) -> jax.Array:
    """Return which of the tokens are an end token."""
    return jnp.isin(tokens, jnp.array(end_tokens(end_token), jnp.int32))


def filler(end_token: EndToken) -> int:
    """Return the token that fills a row after its end."""
    return (*end_tokens(end_token), 0)[0]


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
        return self.with_new(tokens[:, None], self.count, self.count + 1)

    def with_new(self, tokens: jax.Array, first: jax.Array | int, count: jax.Array) -> "TextSoFar":
        """With other new tokens [B, n] from the `first` one on, of which `count` are written."""
        longer = jax.lax.dynamic_update_slice(self.tokens, tokens, (0, self.begin + first))
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

    def newest(self, size: int) -> jax.Array:
        """Return the newest tokens [B, size] of each row; -1 where it has fewer."""
        batch, slots = self.tokens.shape
        if size > slots:
            return jnp.full((batch, size), -1, jnp.int32)
        # A slice that begins before the first slot would be moved to it, and is replaced below.
        newest = jax.lax.dynamic_slice(self.tokens, (0, self.end - size), (batch, size))
        return jnp.where(self.end >= size, newest, -1)

    def newest_last(self) -> jax.Array:
        """Return the tokens [B, S] of each row with the newest last, and -1 before its first."""
        real = jnp.where(self._real(), self.tokens, -1)
        return jnp.roll(real, self.tokens.shape[1] - self.end, axis=1)

    def counts(self, vocab_size: int, new: bool = False) -> jax.Array:
        """How often each row has each token [B, V]; among its new ones alone if `new`."""
        is_new = jnp.arange(self.tokens.shape[1]) >= self.begin
        counted = self._real() & (is_new | (not new))
        return _counts(jnp.where(counted, self.tokens, vocab_size), vocab_size)

    def occurrences(self, size: int) -> jax.Array:
        """Return bool [B, S - size]: the slots where the newest `size` tokens of a row stand, and
        another token behind them."""
        starts = max(self.tokens.shape[1] - size, 0)
        newest = self.newest(size)
        found = self._real()[:, size:] & (newest >= 0).all(axis=1, keepdims=True)
        for step in range(size):
            found &= self.tokens[:, step : step + starts] == newest[:, step, None]
        return found

    def repeating(self, size: int, vocab_size: int) -> jax.Array:
        """Return the tokens [B, V] that would end a sequence of `size` tokens that a row has
        already."""
        following = self.tokens[:, size - 1 :]
        repeated = self.occurrences(size - 1)
        return _counts(jnp.where(repeated, following, vocab_size), vocab_size) > 0


def _counts(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Return how often each row of ids [B, N] has each token: int32 [B, V]. Ids from `vocab_size`
    on stand for no token."""
    rows = jnp.arange(len(ids))[:, None]
    return jnp.zeros((len(ids), vocab_size), jnp.int32).at[rows, ids].add(1, mode="drop")
