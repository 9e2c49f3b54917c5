"""Texts of tokens as a reader sees them."""

JOINERS = "\u200c\u200d"  # not printable, but they shape the characters around them
VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥", **{char: char for char in JOINERS}}


def visible(token: str) -> str:
    """A token's text with its white space shown as `·`, `↵` or `⇥`, and `∅` for no text at all."""
    return "".join(map(_visible, token)) or "∅"


def _visible(char: str) -> str:
    if char in VISIBLE or char.isspace():
        return VISIBLE.get(char, "·")
    return char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"
