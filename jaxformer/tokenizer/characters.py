"""Characters that are spread over several tokens."""

import codecs
from collections.abc import Sequence


def character_groups(pieces: Sequence[bytes]) -> list[tuple[int, int, str]]:
    """Runs of tokens that share characters, as (first token, one past the last, text of all).

    `pieces` are the bytes of each token. A character of which UTF-8 has several bytes may be spread
    over several tokens; a run begins and ends with whole characters. Bytes that are no UTF-8 belong
    to no run.
    """
    found, first = [], 0
    while first < len(pieces):
        last = _whole_from(pieces, first)
        if last > first + 1:
            found.append((first, last, b"".join(pieces[first:last]).decode()))
        first = max(last, first + 1)
    return found


def _whole_from(pieces: Sequence[bytes], first: int) -> int:
    """One past the token with which the characters that begin at token `first` are whole; `first`
    if they never are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for place in range(first, len(pieces)):
        try:
            decoder.decode(pieces[place])
        except UnicodeDecodeError:
            break
        if not pieces[place]:  # an id without a token
            break
        if not decoder.getstate()[0]:  # no character is left open
            return place + 1
    return first
