"""`Tokenizer`: a `tokenizers.Tokenizer` with what training and evaluation need of it."""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.files import write_text
from jaxformer.settings import ConfigError
from jaxformer.tokenizer.encoding import Encoder
from jaxformer.tokenizer.files import (
    IDS,
    IDS_FILE,
    ROLES,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    TokenizerMetadata,
    read_backend,
    read_optional,
    tokenizer_file,
)
from jaxformer.tokenizer.pieces import Spelling
from jaxformer.tokenizer.table import byte_level_bpe, from_files, is_gpt2

if TYPE_CHECKING:
    import tokenizers

MARKS = tuple(ROLES[role][0] for role in ("cls", "sep", "mask"))
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(100))

# What loses its space when decoded text is cleaned up, as tokenizer_config.json may ask for.
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """Text to token ids and back.

    Names of special tokens in a text are encoded as plain text, since a text must not contain
    commands, and special tokens are left out of decoded text. Only with `from_bpe`, where the
    caller names the tokens, are they read and written.

    `end_token` ends a document, and with the others of `end_tokens` it ends generated text;
    `start_token` begins the input of the decoder of an encoder-decoder, and `forced_token`, where
    there is one (BART), is then the first that it writes. Reading the first three raises
    ConfigError where no token ends a document.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        origin: str = "the tokenizer",
        metadata: TokenizerMetadata | None = None,
        special_tokens: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._origin, self._reads_names = backend, origin, special_tokens
        self._metadata = metadata or TokenizerMetadata()
        split_names = bool(self._metadata.settings.get("split_special_tokens"))
        self._encoder = Encoder(backend, split_names)
        self._cleans = self._metadata.cleans(backend)
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._guessed: dict[str, int] = {}  # roles by the names of tokens alone
        for role, names in ROLES.items():
            if known := [self._vocab[name] for name in names if name in self._vocab]:
                self._guessed[role] = known[0]
        self._roles = self._guessed | self._metadata.ids | self._metadata.named
        self.forced_token: int | None = self._roles.get("forced")
        self.vocab_size: int = max(self._vocab.values()) + 1

    @property
    def dtype(self) -> np.dtype:
        """The type of stored ids: uint16 where all fit, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def end_token(self) -> int:
        if "eos" not in self._roles:
            raise ConfigError(
                f"{self._origin} has no token that ends a document (looked for"
                f" {', '.join(ROLES['eos'])}): add one to its special tokens, or take another"
                " tokenizer."
            )
        return self._roles["eos"]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([self.end_token, *self._metadata.ends]))

    @property
    def start_token(self) -> int:
        start = self._roles.get("start")
        return self.end_token if start is None else start

    @classmethod
    def from_bpe(
        cls,
        vocab: dict[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = (),
        pattern: str = "gpt2",
    ) -> "Tokenizer":
        """A byte-level BPE of these ids, as `train_bpe` returns them; `pattern` names how text is
        split into words (gpt2, llama3).

        Special tokens that the vocabulary lacks follow its last id. Their names in a text are these
        tokens, of overlapping names the longest, unless `encode` is told otherwise. Raises
        ConfigError for a vocabulary and merges that do not belong together.
        """
        backend = byte_level_bpe(vocab, merges, special_tokens or (), pattern)
        return cls(backend, special_tokens=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """A tokenizer.json, or GPT-2's vocab.json and merges.txt, or a directory of either, with
        the settings in the files beside it.

        The role of a special token is that of tokenizer_config.json, special_tokens_map.json,
        generation_config.json, config.json, in this order, or follows from its name. Raises
        ConfigError where there is no such file, where a file cannot be read, and where it names a
        token that is not in the vocabulary.
        """
        file = tokenizer_file(Path(os.path.expanduser(path)))
        backend = from_files(file) if file.name == VOCABULARY_FILE else read_backend(file)
        # A directory may hold many files of other names, whose settings are not in it.
        if file.name not in (TOKENIZER_FILE, VOCABULARY_FILE):
            return cls(backend, str(file))
        return cls(backend, str(file), TokenizerMetadata.read(file.parent, backend))

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer in a model's directory; None where there is none, or one that cannot be
        read. Raises as `load` does."""
        file = tokenizer_file(folder)
        found = file.is_file() and (file.name == TOKENIZER_FILE or is_gpt2(file))
        return cls.load(file) if found else None

    def save(self, path: str | os.PathLike[str], max_length: int | None = None) -> None:
        """Writes tokenizer.json, each file complete or not at all, so that transformers loads the
        same tokenizer.

        `path` is that file or its directory, which has no suffix. Beside it go
        tokenizer_config.json, with the roles of special tokens, what it held when it was read, and
        `max_length` as model_max_length where it says none; chat_template.jinja, if there was one;
        and, in generation_config.json, the ids that the other files do not give. Under another name
        the file is written alone.
        """
        file = Path(os.path.expanduser(path))
        file = file / TOKENIZER_FILE if file.is_dir() or not file.suffix else file
        if file.name == TOKENIZER_FILE:
            _write_json(file.with_name(SETTINGS_FILE), self._settings(max_length))
            if self._metadata.template is not None:
                write_text(file.with_name(TEMPLATE_FILE), self._metadata.template)
            told = self._guessed | self._metadata.named
            told |= {"start": told["eos"]} if "eos" in told else {}
            untold = {
                key: token for key, token in self.ids().items() if token != told.get(IDS[key])
            }
            if untold:
                ids_file = file.with_name(IDS_FILE)
                _write_json(ids_file, read_optional(ids_file) | untold)
        write_text(file, self._backend.to_str(pretty=True))

    def _settings(self, max_length: int | None) -> dict[str, Any]:
        """The content of tokenizer_config.json: what was read, or else the special tokens."""
        read = self._metadata.settings
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if max_length is not None:
            settings["model_max_length"] = max_length
        if not read:
            settings["clean_up_tokenization_spaces"] = False
        if "tokenizer_class" not in read:  # a class knows its special tokens
            added = self._backend.get_added_tokens_decoder()
            for role in ROLES:
                if (token := added.get(self._roles.get(role))) is not None:
                    settings[f"{role}_token"] = token.content
        return settings | read

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text, without an end token. Raises ConfigError for a character that the
        tokenizer does not have.

        With `special_tokens`, names of special tokens in the text are these tokens, and the
        tokenizer's template is put around it, as by a tokenizer of transformers when it is called.
        None does what is the rule for the tokenizer (see the class).
        """
        return self.encode_batch([text], special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool | None = None
    ) -> list[list[int]]:
        """Token ids of each text, as `encode` gives them, computed on all cores."""
        named = self._reads_names if special_tokens is None else special_tokens
        before, after = self._template if named else ([], [])
        rows = map(_as_list, self._encoder.rows(texts, named))
        return [[*before, *row, *after] for row in rows] if before or after else [*rows]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text as plain text, uint32, computed on all cores."""
        return [np.asarray(row, np.uint32) for row in self._encoder.rows(texts, False)]

    def encode_iterable(
        self, iterable: Iterable[str], special_tokens: bool | None = None
    ) -> Iterator[int]:
        """The ids that `encode` gives for all strings joined, in little memory: those of an open
        file, or of any pieces of a text.

        This holds for tokenizers that split text as GPT-2, Llama 3 or BERT do, and for those of
        bytes and characters. Others, such as SentencePiece's, need all of the text at once.
        """
        named = self._reads_names if special_tokens is None else special_tokens
        yield from self.prefix if named else ()
        for row in self._encoder.stream(iterable, named):
            yield from _as_list(row)
        yield from self.suffix if named else ()

    def decode(
        self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool | None = None
    ) -> str:
        """The text of token ids, with special tokens left out or by name; bytes that are not UTF-8
        become replacement characters."""
        skip = not self._reads_names if skip_special_tokens is None else skip_special_tokens
        text = str(self._backend.decode([int(token) for token in ids], skip_special_tokens=skip))
        for spaced in SPACED if self._cleans else ():
            text = text.replace(spaced, spaced.strip())
        return text

    @property
    def prefix(self) -> list[int]:
        """The tokens that the template puts before a text."""
        return self._template[0]

    @property
    def suffix(self) -> list[int]:
        """The tokens that the template puts after a text."""
        return self._template[1]

    @functools.cached_property
    def _template(self) -> tuple[list[int], list[int]]:
        if not self._backend.num_special_tokens_to_add(False):
            return [], []
        # Any text that can surely be encoded: what is marked as special around it is the template.
        name = self._backend.id_to_token(self._roles["eos"]) if "eos" in self._roles else "a"
        found = self._encoder.marking.encode(name)
        places = [place for place, added in enumerate(found.special_tokens_mask) if not added]
        return found.ids[: places[0]], found.ids[places[-1] + 1 :]

    def as_prompt(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of a text as the prompt of a decoder."""
        return [*self.prefix, *map(int, ids)]

    def as_source(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of a text as the source of an encoder-decoder: in the template, and closed by
        the end token."""
        end = [] if self.suffix[-1:] == [self.end_token] else [self.end_token]
        return [*self.prefix, *map(int, ids), *self.suffix, *end]

    def as_target(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of a text as the input of the decoder of an encoder-decoder: after the start
        token and any forced token.

        Its targets are the same without the start token, and with the end token.
        """
        forced = [] if self.forced_token is None else [self.forced_token]
        return [self.start_token, *forced, *map(int, ids)]

    def shown(self, token: int) -> str:
        """A token by itself: a special one by its name, bytes that are not UTF-8 as \\xNN, an id
        without a token as <id>."""
        name = self._backend.id_to_token(token)
        if name is None or self._spelling.continuation:
            return f"<{token}>" if name is None else name
        return self._spelling.raw(name).decode("utf-8", "backslashreplace")

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self._encoder.spec())

    def special(self, role: str) -> int | None:
        """The id of the token with a role of `ROLES` (bos, eos, pad, unk, cls, sep, mask); None
        where there is none."""
        return self._roles.get(role)

    def ids(self) -> dict[str, int | list[int]]:
        """The ids that a Hugging Face config.json gives, by its keys, as far as they are known; a
        list where several tokens end a text."""
        known: dict[str, Any] = {**self._roles}
        if "eos" in known:
            ends = [*self.end_tokens]
            known |= {"start": self.start_token, "eos": ends if len(ends) > 1 else ends[0]}
        return {key: known[role] for key, role in IDS.items() if role in known}

    def sentinels(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1> and so on, up to the first that there is not (T5,
        arXiv:1910.10683)."""
        names = map("<extra_id_{}>".format, itertools.count())
        return [self._vocab[name] for name in itertools.takewhile(self._vocab.__contains__, names)]

    def ordinary(self) -> np.ndarray:
        """The ids of all tokens that are not special, ascending: int32."""
        added = self._backend.get_added_tokens_decoder()
        special = {index for index, token in added.items() if token.special}
        return np.array(sorted({*self._vocab.values()} - special), np.int32)

    def word_edges(self) -> np.ndarray:
        """Whether each token begins, and whether it ends, inside a word: bool [vocab_size, 2].

        A word is a run of letters and digits with the white space before it; two tokens belong to
        one where the first ends and the second begins inside. Special tokens do neither.
        """
        edges = np.zeros((self.vocab_size, 2), bool)
        ordinary = {*self.ordinary().tolist()}
        for token, index in self._vocab.items():
            if index in ordinary:
                edges[index] = self._spelling.edges(token)
        return edges

    def token_bytes(self) -> np.ndarray:
        """How many UTF-8 bytes of text each token stands for: int32 [vocab_size], 0 for special
        tokens and unused ids."""
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, index in self._vocab.items():
            sizes[index] = self._spelling.size(token)
        return sizes

    def fingerprint(self) -> str:
        """A digest that is the same for tokenizers that agree in all that training depends on."""
        settings = json.dumps(self._encoder.spec(), sort_keys=True)
        end, guess = self._roles.get("eos"), self._guessed.get("eos")
        ends = [end, self._roles.get("start", end), self.forced_token]
        said = "" if ends == [guess, guess, None] else json.dumps(ends)
        return hashlib.blake2b((settings + said).encode(), digest_size=16).hexdigest()


def _as_list(row: list[int] | np.ndarray) -> list[int]:
    return row if isinstance(row, list) else row.tolist()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
