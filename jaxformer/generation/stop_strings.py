"""Stop strings: where the new tokens of a text complete one, and the text before them."""

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxformer.files import ConfigError


class TokenBytes(Protocol):
    """What is needed of a tokenizer: the bytes of each token."""

    def raw(self, token: int) -> bytes: ...


class StopStrings:
    """The strings that end a text, found in the bytes of its new tokens, also across the borders of
    tokens."""

    def __init__(self, stops: Sequence[str], tokenizer: TokenBytes | None) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError(f"stop_strings={stops!r} must be a tuple of texts that are not empty")
        if tokenizer is None:
            raise ConfigError(
                f"stop_strings={[*stops]} need the texts of tokens: give tokenizer= as well, for"
                " example that of jf.load."
            )
        self._stops = [stop.encode() for stop in stops]
        self._tokenizer = tokenizer

    def length(self, tokens: Iterable[int]) -> int:
        """How many tokens a text has with the one that completes a stop string; 0 where none
        does."""
        pieces = [self._tokenizer.raw(token) for token in tokens]
        text = b"".join(pieces)
        ends = [text.find(stop) + len(stop) for stop in self._stops if stop in text]
        if not ends:
            return 0
        # The token that has the last byte of the stop string that is complete first.
        read = 0
        count = 0
        while read < min(ends):
            read += len(pieces[count])
            count += 1
        return count


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it."""
    if not stops:
        return text
    return re.split("|".join(map(re.escape, stops)), text, maxsplit=1)[0]
