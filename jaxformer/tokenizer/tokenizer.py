"""The one tokenizer object: a `tokenizers.Tokenizer` with what training and evaluation ask of
it."""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.tokenizer.encoding import Encoder
from jaxformer.tokenizer.files import (
    IDS,
    IDS_FILE,
    ROLES,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    Beside,
    read_backend,
    read_object,
    tokenizer_file,
    write_whole,
)
from jaxformer.tokenizer.pieces import Spelling
from jaxformer.tokenizer.table import byte_level_bpe, from_files, is_gpt2

if TYPE_CHECKING:
    import tokenizers

MARKS = tuple(ROLES[role][0] for role in ("cls", "sep", "mask"))
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(100))

# Spaces that decoding takes away where tokenizer_config.json asks for it, by what stands around
# them.
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """Text to token ids and back.

    Names of special tokens in a text are encoded as the plain text they are, since a text must not
    give orders, and special tokens are left out of decoded text; those of `from_bpe`, where the
    caller names the tokens, are read and written.

    `end_token` ends a document, and what a model writes, as do others of `end_tokens`;
    `start_token` begins what the decoder of an encoder-decoder reads, and `forced_token`, where
    there is one (BART), is then the first that it writes. Asking for the first three raises
    ConfigError where no token can end a document.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        origin: str = "the tokenizer",
        beside: Beside | None = None,
        special_tokens: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._origin, self._reads_names = backend, origin, special_tokens
        self._beside = beside or Beside()
        self._encoder = Encoder(backend, bool(self._beside.settings.get("split_special_tokens")))
        self._cleans = self._beside.cleans(backend)
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        by_name = {
            role: [self._vocab[name] for name in names if name in self._vocab]
            for role, names in ROLES.items()
        }
        self._guessed = {role: ids[0] for role, ids in by_name.items() if ids}
        self._roles = self._guessed | self._beside.ids | self._beside.named
        self.forced_token: int | None = self._roles.get("forced")
        self.vocab_size: int = max(self._vocab.values()) + 1

    @property
    def dtype(self) -> np.dtype:
        """What holds an id: uint16 as long as all fit, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def end_token(self) -> int:
        if "eos" not in self._roles:
            raise ConfigError(
                f"{self._origin} has no token that ends a document (looked for"
                f" {', '.join(ROLES['eos'])}): add one of them to its special tokens, or take"
                " another tokenizer."
            )
        return self._roles["eos"]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([self.end_token, *self._beside.ends]))

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
        """A byte-level BPE of just these ids, as `train_bpe` returns them; `pattern` parts text
        into words (gpt2, llama3).

        Special tokens that the vocabulary lacks follow its last id. Their names in a text are these
        tokens, of overlapping ones the longest, unless the caller of `encode` says otherwise.
        Raises ConfigError for tables that do not fit.
        """
        return cls(
            byte_level_bpe(vocab, merges, special_tokens or (), pattern), special_tokens=True
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """A tokenizer.json or GPT-2's vocab.json and merges.txt, or a directory of one, with what
        the files beside it say.

        The role of a special token is that of tokenizer_config.json, special_tokens_map.json,
        generation_config.json, config.json, in this order, or follows from its name. Raises
        ConfigError where there is no such file, where a file cannot be read, and where one speaks
        of a token that is not in the vocabulary.
        """
        file = tokenizer_file(Path(os.path.expanduser(path)))
        backend = from_files(file) if file.name == VOCABULARY_FILE else read_backend(file)
        # A file of another name is one of many in its directory, whose other files are not about
        # it.
        known = file.name in (TOKENIZER_FILE, VOCABULARY_FILE)
        return cls(backend, str(file), Beside.read(file.parent, backend) if known else None)

    @classmethod
    def beside(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer in a model's directory; None where there is none, or one that is not read.
        Raises as `load` does."""
        file = tokenizer_file(folder)
        return (
            cls.load(file)
            if file.is_file() and (file.name == TOKENIZER_FILE or is_gpt2(file))
            else None
        )

    def save(self, path: str | os.PathLike[str], max_length: int | None = None) -> None:
        """Writes tokenizer.json, each file complete or not at all, so that transformers loads the
        same tokenizer.

        `path` is that file or its directory, which has no suffix. Beside it go
        tokenizer_config.json, with the roles of special tokens, with what it held when it was read,
        and with `max_length` as model_max_length where it says none; chat_template.jinja, if there
        was one; and in generation_config.json the ids that the other files do not tell. Under
        another name it stands alone.
        """
        file = Path(os.path.expanduser(path))
        file = file / TOKENIZER_FILE if file.is_dir() or not file.suffix else file
        if file.name == TOKENIZER_FILE:
            _write_json(file.with_name(SETTINGS_FILE), self._settings(max_length))
            if self._beside.template is not None:
                write_whole(file.with_name(TEMPLATE_FILE), self._beside.template)
            told = self._guessed | self._beside.named
            told |= {"start": told["eos"]} if "eos" in told else {}
            if untold := {
                key: token for key, token in self.ids().items() if token != told.get(IDS[key])
            }:
                _write_json(
                    file.with_name(IDS_FILE), read_object(file.with_name(IDS_FILE)) | untold
                )
        write_whole(file, self._backend.to_str(pretty=True))

    def _settings(self, max_length: int | None) -> dict[str, Any]:
        """What tokenizer_config.json is to hold: what was read, or else the special tokens that are
        known by name."""
        added = self._backend.get_added_tokens_decoder()
        roles = {
            f"{role}_token": added[self._roles[role]].content
            for role in ROLES
            if self._roles.get(role) in added
        }
        space = {} if max_length is None else {"model_max_length": max_length}
        read = self._beside.settings
        own = {} if "tokenizer_class" in read else roles  # else its class knows them
        clean = {} if read else {"clean_up_tokenization_spaces": False}
        return {"tokenizer_class": "PreTrainedTokenizerFast"} | space | clean | own | read

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text, without an end token. Raises ConfigError for a character that the
        tokenizer does not have.

        With `special_tokens` names of special tokens in the text are these tokens, and the
        tokenizer's template stands around it, as when transformers' tokenizer is called with the
        text; None leaves that to how the tokenizer was made.
        """
        return self.encode_batch([text], special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool | None = None
    ) -> list[list[int]]:
        """Token ids of each text, as `encode` gives them, made on all cores."""
        named = self._reads_names if special_tokens is None else special_tokens
        rows = [
            row if isinstance(row, list) else row.tolist()
            for row in self._encoder.rows(texts, named)
        ]
        return (
            [[*self.prefix, *row, *self.suffix] for row in rows]
            if named and (self.prefix or self.suffix)
            else rows
        )

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text as plain text, uint32, made on all cores: what a store of many
        texts is made by."""
        return [np.asarray(row, np.uint32) for row in self._encoder.rows(texts, False)]

    def encode_iterable(
        self, iterable: Iterable[str], special_tokens: bool | None = None
    ) -> Iterator[int]:
        """The ids that `encode` gives of all the strings joined, in little memory: of a file
        handle, its lines, any pieces.

        With the words of GPT-2, Llama 3 and BERT, bytes and characters. Tokenizers that read a text
        as a whole, such as SentencePiece's, need all of it at once.
        """
        named = self._reads_names if special_tokens is None else special_tokens
        yield from self.prefix if named else ()
        for row in self._encoder.stream(iterable, named):
            yield from row if isinstance(row, list) else row.tolist()
        yield from self.suffix if named else ()

    def decode(
        self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool | None = None
    ) -> str:
        """The text of token ids, special tokens left out or by name; bytes that are no UTF-8 are
        replacement characters."""
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
        name = self._backend.id_to_token(self._roles["eos"]) if "eos" in self._roles else "a"
        found = self._encoder.marking.encode(name)  # any text that can surely be encoded
        places = [place for place, added in enumerate(found.special_tokens_mask) if not added]
        return found.ids[: places[0]], found.ids[places[-1] + 1 :]

    def as_prompt(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of a text as a decoder reads it to write on."""
        return [*self.prefix, *map(int, ids)]

    def as_source(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of a text as an encoder-decoder reads it: in the template, and closed by the
        end token."""
        end = [] if self.suffix[-1:] == [self.end_token] else [self.end_token]
        return [*self.prefix, *map(int, ids), *self.suffix, *end]

    def as_target(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The tokens of a text as the decoder of an encoder-decoder reads it: after the start token
        and any forced token.

        What it writes is the same without the start token, and with the end token.
        """
        forced = [] if self.forced_token is None else [self.forced_token]
        return [self.start_token, *forced, *map(int, ids)]

    def shown(self, token: int) -> str:
        """A token by itself: a special one by its name, bytes that are no UTF-8 as \\xNN, an id
        without a token as <id>."""
        name = self._backend.id_to_token(token)
        if name is None or self._spelling.continuation:
            return f"<{token}>" if name is None else name
        return self._spelling.raw(name).decode("utf-8", "backslashreplace")

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self._encoder.spec())

    def special(self, role: str) -> int | None:
        """The id of the token for a role of `ROLES` (bos, eos, pad, unk, cls, sep, mask); None
        where there is none."""
        return self._roles.get(role)

    def ids(self) -> dict[str, int | list[int]]:
        """The ids that a Hugging Face config.json gives, by its keys, as far as they are known; a
        list of several ends."""
        known: dict[str, Any] = {**self._roles}
        if "eos" in known:
            known |= {
                "start": self.start_token,
                "eos": [*self.end_tokens] if len(self.end_tokens) > 1 else self.end_token,
            }
        return {key: known[role] for key, role in IDS.items() if role in known}

    def sentinels(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1> and so on, as many as there are in a row (T5,
        arXiv:1910.10683)."""
        names = itertools.takewhile(
            self._vocab.__contains__, map("<extra_id_{}>".format, itertools.count())
        )
        return [self._vocab[name] for name in names]

    def ordinary(self) -> np.ndarray:
        """The ids of tokens that stand for text, ascending: int32."""
        special = {
            index
            for index, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
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
        """A digest that is equal for tokenizers that are equal in every setting that training
        reads."""
        settings = json.dumps(self._encoder.spec(), sort_keys=True)
        end, guess = self._roles.get("eos"), self._guessed.get("eos")
        ends = [end, self._roles.get("start", end), self.forced_token]
        said = "" if ends == [guess, guess, None] else json.dumps(ends)
        return hashlib.blake2b((settings + said).encode(), digest_size=16).hexdigest()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
