"""The one tokenizer object: a `tokenizers.Tokenizer` with what training and evaluation ask of it."""

import contextlib
import hashlib
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


def _types(part: Any) -> set[str]:
    """The names of the components in one part of a tokenizer.json, sequences opened."""
    if isinstance(part, dict):
        return {str(part.get("type"))}.union(*(_types(value) for value in part.values()))
    return set().union(*(_types(value) for value in part)) if isinstance(part, list) else set()
