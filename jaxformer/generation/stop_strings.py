"""Stop strings: an automaton over the bytes of tokens, which finds them also across the borders of
tokens, and the text before them.

In the comments, B is the number of rows, V the size of the vocabulary and S the number of states.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.files import ConfigError

STATES = 16  # the number of states is rounded up to this, so that few programs compile


class TokenBytes(Protocol):
    """What is needed of a tokenizer: its number of ids, and the bytes of each."""

    @property
    def vocab_size(self) -> int: ...

    def raw(self, token: int) -> bytes: ...


@struct.dataclass
class StopText:
    """How much of a stop string each row ends with: the `state` [B] int32 of the automaton of Aho
    and Corasick (CACM 18(6), 1975), of which `table` [V, S] has the state after each token, uint8
    or uint16. The last state means that a stop string has been written; it is never left."""

    table: jax.Array
    state: jax.Array

    @classmethod
    def of(
        cls, stops: Sequence[str], tokenizer: TokenBytes | None, vocab_size: int, rows: int
    ) -> "StopText":
        """The automaton at the beginning of new texts."""
        if tokenizer is None:
            raise ConfigError(
                f"stop_strings={[*stops]} need the texts of tokens: give tokenizer= as well, for"
                " example that of jf.load."
            )
        size = min(vocab_size, tokenizer.vocab_size)
        texts = [tokenizer.raw(token) for token in range(size)]
        for stop in stops:
            if not _occurs(_table([stop.encode()], texts)):
                raise ConfigError(
                    f"the stop string {stop!r} cannot occur: no tokens of this tokenizer have that"
                    " text. Leave it out, or spell it as the tokenizer does (it may write lower"
                    " case, or have no line breaks)."
                )
        table = _table([stop.encode() for stop in stops], texts)
        # An id without a text leads to state 0, and from the last state to itself.
        full = np.zeros((vocab_size, table.shape[1]), table.dtype)
        full[:, -1] = table.shape[1] - 1
        full[:size] = table
        return cls(jnp.asarray(full), jnp.zeros(rows, jnp.int32))

    def after(self, tokens: jax.Array) -> "StopText":
        """With one more token of each row, of the shape of the state."""
        return StopText(self.table, self.table[tokens, self.state].astype(jnp.int32))

    def of_rows(self, rows: jax.Array) -> "StopText":
        """The states of these rows, of any shape."""
        return StopText(self.table, self.state[rows])

    @property
    def reached(self) -> jax.Array:
        """Which rows have a stop string."""
        return self.state == self.table.shape[1] - 1


def _automaton(stops: Sequence[bytes]) -> np.ndarray:
    """The state after each byte: int [S, 256], of which the last state is the one of a match."""
    children: list[dict[int, int]] = [{}]
    ends_stop = [False]
    for stop in stops:
        node = 0
        for byte in stop:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends_stop.append(False)
            node = children[node][byte]
        ends_stop[node] = True
    after = np.zeros((len(children), 256), np.int64)
    fallback = [0] * len(children)
    queue = [0]
    for node in queue:
        after[node] = after[fallback[node]] if node else 0
        for byte, child in children[node].items():
            fallback[child] = int(after[node, byte]) if node else 0
            after[node, byte] = child
            ends_stop[child] |= ends_stop[fallback[child]]
            queue.append(child)
    count = -(-(len(children) + 1) // STATES) * STATES
    padded = np.zeros((count, 256), np.int64)
    padded[: len(children)] = np.where(np.array(ends_stop)[after], count - 1, after)
    padded[-1] = count - 1
    return padded


def _table(stops: Sequence[bytes], texts: Sequence[bytes]) -> np.ndarray:
    """The state after each token from each state: uint8 or uint16 [V, S]."""
    after = _automaton(stops)
    count = len(after)
    after = after.astype(np.uint8 if count <= 256 else np.uint16)
    lengths = np.array([len(text) for text in texts])
    order = np.argsort(-lengths, kind="stable")  # longest first
    states = np.tile(np.arange(count, dtype=after.dtype), (len(texts), 1))  # in that order
    for index in range(lengths.max(initial=0)):
        longer = int((lengths > index).sum())
        new_bytes = np.array([texts[token][index] for token in order[:longer]])
        states[:longer] = after[states[:longer], new_bytes[:, None]]
    table = np.empty_like(states)
    table[order] = states
    return table


def _occurs(table: np.ndarray) -> bool:
    """Whether the last state can be reached from the first by tokens."""
    reachable = np.zeros(table.shape[1], bool)
    newest = np.array([0])
    while newest.size:
        reachable[newest] = True
        states = np.unique(table[:, newest])
        newest = states[~reachable[states]]
    return bool(reachable[-1])


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    starts = [text.find(stop) for stop in stops]
    return text[: min((start for start in starts if start >= 0), default=len(text))]


def stream_before_stop(texts: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The pieces of a text up to its first stop string. What may be the beginning of one waits for
    the next piece."""
    waiting = ""
    for text in texts:
        waiting += text
        before = before_stop(waiting, stops)
        if len(before) < len(waiting):
            yield before
            return
        sizes = [
            size
            for stop in stops
            for size in range(1, min(len(stop), len(waiting) + 1))
            if waiting.endswith(stop[:size])
        ]
        ready = len(waiting) - max(sizes, default=0)
        yield waiting[:ready]
        waiting = waiting[ready:]
    yield waiting
