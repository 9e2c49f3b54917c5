"""The bytes that tokens stand for: how a vocabulary spells them, whether they are inside a word,
and which tokens share a character."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxformer.files import ConfigError
from jaxformer.tokenizer.words import WORD_PATTERNS

ResultT = TypeVar("ResultT")

SPACE = "▁"  # SentencePiece's mark for a space (arXiv:1808.06226)


def byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte: that of Latin-1 where it is visible, else
    the next code point from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def check_pattern(pattern: str) -> None:
    """Raise ConfigError for a name that is not one of `WORD_PATTERNS`."""
    if pattern not in WORD_PATTERNS:
        raise ConfigError(f"pattern={pattern!r} must be one of {', '.join(WORD_PATTERNS)}.")


def check_special_tokens(names: Sequence[str]) -> None:
    """Raise ConfigError for anything but a list of distinct strings that are not empty."""
    are_strings = all(isinstance(name, str) and name for name in names)
    if isinstance(names, str) or not are_strings or len({*names}) < len(names):
        raise ConfigError(
            f"special_tokens={names!r} must be a list of names, each a string that is not empty,"
            " and each once."
        )


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer.json spells text in its tokens.

    `byte_level` says that a character stands for a byte (GPT-2), `spaced` that `SPACE` stands for a
    space (SentencePiece). `continuation` is the mark of tokens that continue a word (WordPiece).
    `added` says of each added token whether it is special.
    """

    byte_level: bool
    spaced: bool
    continuation: str
    added: dict[str, bool]

    @classmethod
    def of(cls, spec: dict[str, Any]) -> "Spelling":
        steps = [spec[name] for name in ("normalizer", "pre_tokenizer", "decoder")]
        return cls(
            byte_level="ByteLevel" in _strings(steps[1:]),
            spaced=any(SPACE in value for value in _strings(steps)),
            continuation="##" if spec["model"]["type"] == "WordPiece" else "",
            added={entry["content"]: entry["special"] for entry in spec["added_tokens"]},
        )

    def raw(self, token: str) -> bytes:
        """Return the bytes of a token, with the space before it and without the mark of a
        continuation."""
        if token in self.added:
            return token.encode()
        if self.byte_level and BYTES.keys() >= {*token}:
            return bytes(BYTES[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])  # byte fallback
        if self.spaced:
            token = token.replace(SPACE, " ")
        return token.removeprefix(self.continuation).encode()

    def size(self, token: str) -> int:
        """Return the number of bytes of text that a token stands for, 0 for a special token."""
        if self.added.get(token):
            return 0
        return len(self.raw(token))

    def edges(self, token: str) -> tuple[bool, bool]:
        """Return whether a token begins inside a word, and whether it ends inside one; neither for
        a special token."""
        if self.added.get(token):
            return False, False
        if self.continuation:
            return token.startswith(self.continuation), True
        raw = self.raw(token)
        if not raw:
            return False, False
        text = raw.decode("utf-8", "surrogateescape")
        if self.byte_level:
            text = raw.decode("latin-1")
        return self._inside(text[0]), self._inside(text[-1])

    def _inside(self, character: str) -> bool:
        """Return whether a character belongs to a word. A single byte beyond ASCII counts as a
        letter."""
        is_byte = "\udc80" <= character <= "\udcff"
        if self.byte_level:
            is_byte = character > "\x7f"
        return is_byte or character.isalnum() or character == "_"


def _strings(value: Any) -> set[str]:
    """Return all strings among the values of a JSON value."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, list):
        return set()
    return set().union(*map(_strings, value))


def character_groups(pieces: Sequence[bytes]) -> list[tuple[int, int, str]]:
    """Return the runs of tokens that share characters, as (first token, one past the last, text of
    all).

    `pieces` are the bytes of each token. Several tokens may share a character that has several
    bytes in UTF-8; a run begins and ends between characters. Bytes that are not UTF-8 belong to no
    run.
    """
    groups = []
    first = 0
    while first < len(pieces):
        # One past the token that completes the characters that begin at `first`.
        end = first
        decoder = codecs.getincrementaldecoder("utf-8")()
        for index in range(first, len(pieces)):
            try:
                decoder.decode(pieces[index])
            except UnicodeDecodeError:
                break
            if not pieces[index]:  # an id without a token
                break
            if not decoder.getstate()[0]:  # no character is incomplete
                end = index + 1
                break
        if end > first + 1:
            groups.append((first, end, b"".join(pieces[first:end]).decode()))
        first = max(end, first + 1)
    return groups


def without_panic(call: Callable[..., ResultT], *arguments: Any, **keywords: Any) -> ResultT:
    """Return the result of a call into a Rust library, whose panic becomes a RuntimeError."""
    try:
        return call(*arguments, **keywords)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a subclass of BaseException alone
            raise
        raise RuntimeError(f"its library gave up: {error}") from None
