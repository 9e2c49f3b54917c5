"""Tokens that share the bytes of a character are a group: the least run of whole characters."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jaxformer.tokenizer.pieces import character_groups


def test_tokens_that_share_characters_are_groups_and_bytes_that_are_no_text_are_none() -> None:
    you, good = "你".encode(), "好".encode()
    pieces = [
        b"a",
        you[:1],
        you[1:],
        b"b",
        you + good[:1],
        good[1:2],
        good[2:],
        b"\xff",
        you[:2],
        b"c",
    ]
    assert character_groups(pieces) == [(1, 3, "你"), (4, 7, "你好")]
    assert character_groups([you[:1], you[:1], you[1:]]) == [(1, 3, "你")]
    assert character_groups([you[:1], b"", you[1:]]) == []


@given(st.text(max_size=12), st.lists(st.integers(0, 40)))
def test_groups_are_the_least_runs_of_whole_characters(text: str, cuts: list[int]) -> None:
    try:
        raw = text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in itertools.pairwise(places)]
    groups = character_groups(pieces)
    grouped = {i for first, last, _ in groups for i in range(first, last)}
    for first, last, shown in groups:
        assert b"".join(pieces[first:last]).decode() == shown and last > first + 1
    for i, piece in enumerate(pieces):
        if i not in grouped:
            piece.decode()
    # No group could be cut in two at a place between characters.
    starts = {len(text[:i].encode()) for i in range(len(text) + 1)}
    assert not any(places[i] in starts for a, b, _ in groups for i in range(a + 1, b))
