"""What the tokens of a vocabulary stand for: their bytes, and where these are inside words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.config import ConfigError

ANY_CHARACTER = r"[\s\S]"  # the pre-tokenizer of tokenizers whose tokens are characters
SPACE = "▁"  # SentencePiece's stand-in for a space (arXiv:1808.06226)


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte: Latin-1's own where it is visible, else the next
    code point from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def check_special_tokens(names: Sequence[str]) -> None:
    """ConfigError for anything but a list of names that are unlike and not empty."""
    if isinstance(names, str):
        raise ConfigError(f"special_tokens={names!r} must be a list of names: write [{names!r}].")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(
            f"special_tokens={[*names]} holds {wrong[0]!r}: a special token is a string."
        )
    if "" in names:
        raise ConfigError(f"special_tokens={[*names]} holds an empty name: leave it out.")
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ConfigError(f"special_tokens={[*names]} holds {twice[0]!r} twice: name each once.")


BYTES = {character: byte for byte, character in enumerate(byte_characters())}


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer.json writes text in its tokens. `added` maps added tokens to whether they are
    special."""

    byte_level: bool
    spaced: bool
    continuation: str
    added: dict[str, bool]

    @classmethod
    def of(cls, spec: dict[str, Any]) -> "Spelling":
        parts = [spec[name] for name in ("normalizer", "pre_tokenizer", "decoder")]
        return cls(
            byte_level="ByteLevel" in _values(parts[1:]),
            spaced=any(SPACE in value for value in _values(parts)),
            continuation="##" if spec["model"]["type"] == "WordPiece" else "",
            added={entry["content"]: entry["special"] for entry in spec["added_tokens"]},
        )

    def raw(self, token: str) -> bytes:
        """The bytes of a token, with the space before it, without the mark of a word that goes
        on."""
        if token in self.added:
            return token.encode()
        if self.byte_level and all(character in BYTES for character in token):
            return bytes(BYTES[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])  # byte fallback
        return (
            (token.replace(SPACE, " ") if self.spaced else token)
            .removeprefix(self.continuation)
            .encode()
        )

    def size(self, token: str) -> int:
        """How many bytes of text a token stands for: none where it is special."""
        return 0 if self.added.get(token) else len(self.raw(token))

    def edges(self, token: str) -> tuple[bool, bool]:
        """Whether an ordinary token begins, and whether it ends, inside a word."""
        if self.continuation:
            return token.startswith(self.continuation), True
        text = self.raw(token).decode(
            *(("latin-1",) if self.byte_level else ("utf-8", "surrogateescape"))
        )
        return (self._inside(text[0]), self._inside(text[-1])) if text else (False, False)

    def _inside(self, character: str) -> bool:
        """Whether a character is of a letter or digit; a byte beyond ASCII that stands by itself
        counts as one."""
        by_itself = character > "\x7f" if self.byte_level else "\udc80" <= character <= "\udcff"
        return by_itself or character.isalnum() or character == "_"


def _values(part: Any) -> set[str]:
    """All strings that stand as values in a part of a tokenizer.json."""
    if isinstance(part, str):
        return {part}
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return set().union(*map(_values, inner))
