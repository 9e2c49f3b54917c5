"""The one tokenizer object: a `tokenizers.Tokenizer` with what training and evaluation ask of it."""

import contextlib
import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"

# What published tokenizers call the token that ends a document, the likeliest first.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")

# Special tokens by what they are for, and what published tokenizers call them, the likeliest first.
ROLES = {
    "cls": ("[CLS]", "<s>", "<|cls|>"),
    "sep": ("[SEP]", "</s>", "<|sep|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
MARKS = tuple(names[0] for names in ROLES.values())
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(100))


class Tokenizer:
    """Text to token ids and back. Names of special tokens in a text are encoded as the plain text they are.

    Raises ConfigError where no token can end a document.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", origin: str = "the tokenizer") -> None:
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        ends = [self._vocab[name] for name in END_NAMES if name in self._vocab]
        if not ends:
            raise ConfigError(
                f"{origin} has no token that ends a document (looked for {', '.join(END_NAMES)}): "
                "add one of them to its added_tokens, or take another tokenizer."
            )
        self.end_token: int = ends[0]
        self.vocab_size: int = max(self._vocab.values()) + 1

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """A tokenizer.json, or the directory that holds one. Raises ConfigError where there is none or it cannot be read."""
        import tokenizers

        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist: set tokenizer.path to a tokenizer.json, or leave it empty.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): set tokenizer.path to a tokenizer.json.") from None
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"{file} is not a tokenizer.json of the tokenizers library ({error}): set tokenizer.path to one."
            ) from None
        return cls(backend, str(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one tokenizer.json, complete or not at all, that the tokenizers library and transformers load."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            draft.write_text(self._backend.to_str(pretty=True), encoding="utf-8")
            os.replace(draft, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end token. Raises ConfigError for a character that the tokenizer does not have."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, made on all cores."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise self._unencodable(texts, error) from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids: special tokens left out, bytes that are no UTF-8 shown as replacement characters."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=True))

    def shown(self, token: int) -> str:
        """A token by itself: a special one by its name, bytes that are no UTF-8 as \\xNN, an id without a token as <id>."""
        name = self._backend.id_to_token(token)
        if name is None:
            return f"<{token}>"
        text = str(self._backend.decode([token], skip_special_tokens=False))
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        values = {character: byte for byte, character in enumerate(byte_characters())}
        raw = bytes.fromhex(name[3:5]) if name.startswith("<0x") else bytes(values[c] for c in name if c in values)
        return raw.decode("utf-8", "backslashreplace") or text

    def special(self, role: str) -> int | None:
        """The id of the token for a role of `ROLES` (cls, sep, mask); None where there is none."""
        return next((self._vocab[name] for name in ROLES[role] if name in self._vocab), None)

    def sentinels(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1> and so on, as many as there are in a row (T5, arXiv:1910.10683)."""
        names = itertools.takewhile(self._vocab.__contains__, map("<extra_id_{}>".format, itertools.count()))
        return [self._vocab[name] for name in names]

    def ordinary(self) -> np.ndarray:
        """The ids of tokens that stand for text, ascending: int32."""
        special = {index for index, token in self._backend.get_added_tokens_decoder().items() if token.special}
        return np.array(sorted({*self._vocab.values()} - special), np.int32)

    def word_edges(self) -> np.ndarray:
        """Whether each token begins, and whether it ends, inside a word: bool [vocab_size, 2].

        A word is a run of letters and digits with the white space before it; two tokens belong to one where the first
        ends and the second begins inside. Special tokens do neither.
        """
        spec = json.loads(self._backend.to_str())
        inside = (
            _inside_byte if "ByteLevel" in _types(spec["decoder"]) | _types(spec["pre_tokenizer"]) else _inside_character
        )
        pieces = spec["model"]["type"] == "WordPiece"
        edges = np.zeros((self.vocab_size, 2), bool)
        ordinary = {*self.ordinary().tolist()}
        for token, index in self._vocab.items():
            if token and index in ordinary:
                edges[index] = (token.startswith("##"), True) if pieces else (inside(token[0]), inside(token[-1]))
        return edges

    def token_bytes(self) -> np.ndarray:
        """How many UTF-8 bytes of text each token stands for: int32 [vocab_size], 0 for special tokens and unused ids."""
        spec = json.loads(self._backend.to_str())
        byte_level = "ByteLevel" in _types(spec["decoder"]) | _types(spec["pre_tokenizer"])
        added = {entry["content"]: entry["special"] for entry in spec["added_tokens"]}
        continuation = "##" if spec["model"]["type"] == "WordPiece" else ""
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, index in self._vocab.items():
            if token in added:
                sizes[index] = 0 if added[token] else len(token.encode())
            elif byte_level:
                sizes[index] = len(token)  # one printable character stands for one byte
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                sizes[index] = 1  # byte fallback
            else:
                sizes[index] = len(token.replace("▁", " ").removeprefix(continuation).encode())
        return sizes

    def fingerprint(self) -> str:
        """A digest that is equal for tokenizers that are equal in every setting."""
        settings = json.dumps(json.loads(self._backend.to_str()), sort_keys=True)
        return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()

    def _unencodable(self, texts: Sequence[str], error: Exception) -> ConfigError:
        unseen = [char for char in sorted(set("".join(texts))) if char not in self._vocab]
        if "UNK" not in str(error) or not unseen:
            return ConfigError(f"the tokenizer cannot encode this text: {error}.")
        shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in unseen[:5]) + (", ..." if len(unseen) > 5 else "")
        return ConfigError(
            f"the character tokenizer has never seen {shown}: leave {'it' if len(unseen) == 1 else 'them'} out, "
            "or train with tokenizer.kind=bytes or bpe, which encode any text."
        )


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte: Latin-1's own where it is visible, else the next code point from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def _inside_byte(character: str) -> bool:
    """Whether a byte, by GPT-2's stand-in for it, is of a letter or digit; every byte beyond ASCII counts as one."""
    code = ord(character)
    return character.isalnum() or character == "_" if code < 128 else not 256 <= code < 290


def _inside_character(character: str) -> bool:
    return character.isalnum() or character == "_"


def _types(part: Any) -> set[str]:
    """The names of the components in one part of a tokenizer.json, sequences opened."""
    if isinstance(part, dict):
        return {str(part.get("type"))}.union(*(_types(value) for value in part.values()))
    return set().union(*(_types(value) for value in part)) if isinstance(part, list) else set()
