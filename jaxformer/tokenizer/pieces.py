"""What the tokens of a vocabulary stand for: their bytes, and whether these are inside a word."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxformer.files import ConfigError
from jaxformer.tokenizer.words import WORD_PATTERNS

ResultT = TypeVar("ResultT")

ANY_CHARACTER = r"[\s\S]"  # the pre-tokenizer of tokenizers whose tokens are characters
SPACE = "▁"  # SentencePiece's mark for a space (arXiv:1808.06226)


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte: that of Latin-1 where it is visible, else the next
    code point from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def check_pattern(pattern: str) -> None:
    """Raises ConfigError for a name that is not one of `WORD_PATTERNS`."""
    if pattern not in WORD_PATTERNS:
        raise ConfigError(f"pattern={pattern!r} must be one of {', '.join(WORD_PATTERNS)}.")


def check_special_tokens(names: Sequence[str]) -> None:
    """Raises ConfigError for anything but a list of distinct strings that are not empty."""
    if isinstance(names, str):
        raise ConfigError(f"special_tokens={names!r} must be a list of names: write [{names!r}].")
    for place, name in enumerate(names):
        where = f"special_tokens={[*names]} holds {name!r}"
        if not isinstance(name, str):
            raise ConfigError(f"{where}: a special token is a string.")
        if not name:
            raise ConfigError(f"{where}: leave out the empty name.")
        if name in names[:place]:
            raise ConfigError(f"{where} twice: name each once.")


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer.json spells text in its tokens; `added` says of each added token whether it
    is special."""

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
        """The bytes of a token, with the space before it, without the mark of a continued word."""
        if token in self.added:
            return token.encode()
        if self.byte_level and BYTES.keys() >= {*token}:
            return bytes(BYTES[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])  # byte fallback
        text = token.replace(SPACE, " ") if self.spaced else token
        return text.removeprefix(self.continuation).encode()

    def size(self, token: str) -> int:
        """How many bytes of text a token stands for: 0 for a special token."""
        return 0 if self.added.get(token) else len(self.raw(token))

    def edges(self, token: str) -> tuple[bool, bool]:
        """Whether a token begins, and whether it ends, inside a word; neither where it is
        special."""
        if self.added.get(token):
            return False, False
        if self.continuation:
            return token.startswith(self.continuation), True
        raw = self.raw(token)
        text = raw.decode("latin-1") if self.byte_level else raw.decode("utf-8", "surrogateescape")
        return (self._inside(text[0]), self._inside(text[-1])) if text else (False, False)

    def _inside(self, character: str) -> bool:
        """Whether a character is part of a word; a byte beyond ASCII that is one by itself counts
        as a letter."""
        by_itself = character > "\x7f" if self.byte_level else "\udc80" <= character <= "\udcff"
        return by_itself or character.isalnum() or character == "_"


def _strings(value: Any) -> set[str]:
    """All strings that are values in a part of a tokenizer.json."""
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, dict) else value
    return set().union(*map(_strings, inner)) if isinstance(value, dict | list) else set()


def without_panic(call: Callable[..., ResultT], *given: Any, **more: Any) -> ResultT:
    """The result of a call of a library in Rust, whose panic becomes a RuntimeError."""
    try:
        return call(*given, **more)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which is no Exception
            raise
        raise RuntimeError(f"its library gave up: {error}") from None
