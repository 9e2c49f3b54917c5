"""`Tokenizer`: a `tokenizers.Tokenizer` with what training and evaluation need; `Frame`, the
special tokens around a text; and tokenizers of a BPE trained on texts, of the 256 bytes, or of
the characters of texts."""

import functools
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxformer.files import ConfigError, located, store_of, write_text
from jaxformer.tokenizer.bpe import train_on
from jaxformer.tokenizer.byte_level import (
    byte_level_backend,
    byte_level_bpe,
    from_files,
    gpt2_files,
)
from jaxformer.tokenizer.encoding import Encoder, word_pattern
from jaxformer.tokenizer.gguf_tokenizer import read_gguf
from jaxformer.tokenizer.metadata import (
    END_OF_TEXT,
    ID_KEYS,
    ROLES,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    TokenizerMetadata,
    guessed_roles,
    read_backend,
    read_optional,
    tokenizer_file,
)
from jaxformer.tokenizer.pieces import BYTES, SPACE, Spelling

MOST_TOKENS = 1 << 24  # of a vocabulary: tables of as many entries are made
IdSequence = Sequence[int] | np.ndarray

# What loses its space when decoded text is cleaned up, as tokenizer_config.json may request.
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")

# Values of model_type whose tokenizer.json may have been written with the pattern of Llama 3.
MISTRAL_TYPES = ("mistral", "mistral3", "ministral", "ministral3", "pixtral", "voxtral")


class Slot(NamedTuple):
    """A special token, or None where the next text goes, and the token type."""

    token: int | None
    kind: int


class Frame(NamedTuple):
    """The special tokens and the texts, one or two, in their order."""

    slots: tuple[Slot, ...]

    @property
    def added(self) -> int:
        """The number of special tokens."""
        return sum(slot.token is not None for slot in self.slots)

    def fill(self, texts: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the special tokens and of the texts between them, and the type of each
        token: both int32 [tokens]."""
        remaining = iter(texts)
        pieces = []
        kinds = []
        for slot in self.slots:
            piece = next(remaining) if slot.token is None else [slot.token]
            pieces.append(np.asarray(piece, np.int32))
            kinds.append(np.full(len(piece), slot.kind, np.int32))
        return np.concatenate(pieces), np.concatenate(kinds)

    @classmethod
    def of(
        cls, backend: tokenizers.Tokenizer, name: str, texts: int, origin: str
    ) -> "Frame | None":
        """Return the frame that the post-processor of a tokenizer.json puts around one text or two;
        None where it adds nothing. `name` is a text that the backend can encode."""
        if not backend.num_special_tokens_to_add(texts == 2):
            return None
        encoding = backend.encode(name, name if texts == 2 else None)
        slots: list[Slot] = []
        order: list[int] = []  # of the texts
        previous = None  # the index of the text of the previous token
        for token, text, kind in zip(
            encoding.ids, encoding.sequence_ids, encoding.type_ids, strict=True
        ):
            if text is None:
                slots.append(Slot(token, kind))
            elif text != previous:
                slots.append(Slot(None, kind))
                order.append(text)
            previous = text
        if order != [*range(texts)]:
            raise ConfigError(
                f"{origin}: its post_processor does not put each of {texts} texts once and in their"
                " order: mend its template."
            )
        return cls(tuple(slots))


def closed(start: list[int], stop: list[int], texts: int) -> Frame:
    """Return the frame for a tokenizer without a template: `start`, then each text with `stop`
    after it. The type of a token is the index of its text."""
    slots = [Slot(token, 0) for token in start]
    for kind in range(texts):
        slots += [Slot(None, kind), *(Slot(token, kind) for token in stop)]
    return Frame(tuple(slots))


class Tokenizer:
    """Text to token ids and back.

    Names of special tokens in a text are encoded as plain text, since a text must not contain
    commands, and special tokens are left out of decoded text. Only a tokenizer of `from_bpe`, whose
    caller names the tokens, reads and writes them.

    `end_token` ends a document, and each of `end_tokens` ends generated text; the decoder of an
    encoder-decoder reads `start_token` first, and writes `forced_token` first, where there is one
    (BART). The first three raise ConfigError where no token ends a document.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        origin: str = "the tokenizer",
        metadata: TokenizerMetadata | None = None,
        special_tokens: bool = False,
    ) -> None:
        # A tokenizer.json may state a length at which texts are cut, and a padding: documents would
        # lose their ends without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.origin = origin
        self._reads_names = special_tokens
        self.metadata = metadata or TokenizerMetadata()
        split_names = bool(self.metadata.settings.get("split_special_tokens"))
        self.encoder = Encoder(backend, split_names, origin)
        self._cleans = self.metadata.cleans(backend)
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        named: dict[int, str] = {}
        for token, index in self._vocab.items():
            if index in named:
                raise ConfigError(
                    f"{origin} gives the id {index} to {named[index]!r} and to {token!r}:"
                    " restore it."
                )
            named[index] = token
        if max(named, default=0) >= MOST_TOKENS:
            raise ConfigError(
                f"{origin} gives {named[max(named)]!r} the id {max(named)}, and ids are below"
                f" {MOST_TOKENS}: restore it."
            )
        self._guessed = guessed_roles(self._vocab)
        self._roles = self._guessed | self.metadata.ids | self.metadata.named_ids
        self.forced_token: int | None = self._roles.get("forced")
        self.vocab_size: int = max(self._vocab.values()) + 1
        self._frames: dict[int, Frame | None] = {}  # by the number of texts

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which ids are stored: uint16 where all fit, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def end_token(self) -> int:
        if "eos" not in self._roles:
            raise ConfigError(
                f"{self.origin} has no token that ends a document: add one of"
                f" {', '.join(ROLES['eos'])} to its special tokens, or take another tokenizer."
            )
        return self._roles["eos"]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([self.end_token, *self.metadata.ends]))

    @property
    def start_token(self) -> int:
        if "start" in self._roles:
            return self._roles["start"]
        return self.end_token

    @classmethod
    def from_bpe(
        cls,
        vocab: dict[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = (),
        pattern: str = "gpt2",
    ) -> "Tokenizer":
        """Return a byte-level BPE of a vocabulary and merges, as `train_bpe` returns them;
        `pattern` names how text is split into words (gpt2, llama3).

        Special tokens that the vocabulary lacks follow its last id. Of overlapping names in a text
        the longest is taken."""
        backend = byte_level_bpe(vocab, merges, special_tokens or (), pattern)
        return cls(backend, special_tokens=True)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Return the tokenizer of a tokenizer.json, or of GPT-2's vocab.json and
        merges.txt, or a directory of either, with the settings in the files beside it; or that of a
        GGUF file.

        The roles of special tokens are taken from tokenizer_config.json, special_tokens_map.json,
        generation_config.json and config.json, in this order, or follow from their names. Warns of
        Mistral's files that split text by another model's pattern."""
        location = located(path)
        if location.suffix == ".gguf":
            # Imported here, because it reads weights, too.
            from jaxformer.interop.gguf_files import GgufFiles

            return cls.of_gguf(GgufFiles(store_of(location).local_copy()).metadata, str(location))
        file = tokenizer_file(location)
        backend = from_files(file) if file.name == VOCABULARY_FILE else read_backend(file)
        # A directory may hold many files of other names, whose settings are not in it.
        if file.name not in (TOKENIZER_FILE, VOCABULARY_FILE):
            return cls(backend, str(file))
        # A tokenizer.json of Mistral's Tekken may split text by the pattern of Llama 3, as
        # transformers wrote it up to 4.57.2: digits come in groups of three, and words with
        # capital letters and apostrophes are split otherwise than in training. A model of this
        # architecture that was trained with another tokenizer lacks the token [INST].
        model_type = read_optional(file.with_name("config.json")).get("model_type")
        tokenizer = cls(backend, str(file), TokenizerMetadata.read(file.parent, backend))
        is_tekken = model_type in MISTRAL_TYPES and backend.token_to_id("[INST]") is not None
        if is_tekken and word_pattern(tokenizer.encoder.spec()) == "llama3":
            name = repr(str(file.parent))
            warnings.warn(
                f"{file} splits text by the pattern of Llama 3, which transformers wrote for"
                " Mistral's models by mistake, so that the model reads other tokens than it was"
                " trained on. Write the right pattern with transformers:"
                f" AutoTokenizer.from_pretrained({name},"
                f" fix_mistral_regex=True).save_pretrained({name}).",
                stacklevel=2,
            )
        return tokenizer

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], origin: str) -> "Tokenizer":
        """Return the tokenizer in the metadata of a GGUF file; `origin` names the file in
        messages."""
        backend, metadata_of_files = read_gguf(metadata, origin)
        return cls(backend, origin, metadata_of_files)

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """Return the tokenizer in a model's directory; None where it has none of a supported
        kind."""
        file = tokenizer_file(folder)
        if not file.is_file() or (file.name != TOKENIZER_FILE and gpt2_files(file) is None):
            return None
        return cls.load(file)

    def with_special_tokens(self, names: Sequence[str]) -> "Tokenizer":
        """Return the tokenizer with special tokens behind its last id; those that it has keep
        theirs."""
        missing_names = [name for name in names if name not in self._vocab]
        if not missing_names:
            return self
        # A copy, because this tokenizer took its vocabulary from its backend when it was made, and
        # would not know the new tokens.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens(missing_names)
        return Tokenizer(backend, self.origin, self.metadata, self._reads_names)

    def id_of(self, name: str) -> int | None:
        """Return the id of the token with this name in the vocabulary; None where there is none."""
        return self._vocab.get(name)

    def save(self, path: str | Path, max_length: int | None = None, follow: bool = True) -> None:
        """Write tokenizer.json, from which transformers loads the same tokenizer.

        `path` is that file or its directory, which has no suffix. The files beside it are
        tokenizer_config.json, with `max_length` as model_max_length unless it has one, the chat
        template, and generation_config.json, with the ids that the other files do not give. Under
        another name the file is written alone. Without `follow` a symbolic link at one of these
        names is replaced, and the file that it leads to stays as it is.
        """
        file = located(path)
        if file.is_dir() or not file.suffix:
            file = file / TOKENIZER_FILE
        if file.name == TOKENIZER_FILE:
            added = self._backend.get_added_tokens_decoder()
            names = {}
            for role, token in self._roles.items():
                if role in ROLES and token in added:
                    names[role] = added[token].content
            ids = self.ids()
            # Where there are rules, transformers takes no ids from config.json, so all are written.
            if not self.metadata.rules:
                implied = self._guessed | self.metadata.named_ids
                implied.setdefault("start", implied.get("eos", -1))
                for key in [*ids]:
                    if ids[key] == implied.get(ID_KEYS[key]):
                        del ids[key]
            self.metadata.write(file.parent, names, ids, max_length, follow)
        # Last, because a directory with this file is one with a tokenizer (`find`). After a kill a
        # new directory has none, rather than one without its settings.
        write_text(file, self._backend.to_str(pretty=True), follow)

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text, without an end token. Raises ConfigError for a character
        that the tokenizer does not have.

        By default the text stands alone: a BERT adds no [CLS] and [SEP] and a Llama no BOS, unlike
        transformers, whose ids are those of `tokenizer.encode(text, special_tokens=True)`. Then the
        text is put in the tokenizer's template, and names of special tokens in it are these tokens.
        `from_bpe` makes a tokenizer for which this is the default.
        """
        return self.encode_batch([text], special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool | None = None
    ) -> list[list[int]]:
        """Return the token ids of each text, as `encode` gives them, computed on all cores."""
        reads_names, before, after = self._reading(special_tokens)
        rows = self.encoder.rows(texts, reads_names)
        return [[*before, *row.tolist(), *after] for row in rows]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text as plain text, uint32, computed on all cores."""
        return self.encoder.rows(texts, False)

    def encode_iterable(
        self, iterable: Iterable[str], special_tokens: bool | None = None
    ) -> Iterator[int]:
        """Yield the ids that `encode` gives for the joined strings of an iterable, such as an open
        file.

        It takes little memory where text is split as by GPT-2 or Llama 3. Other tokenizers, such as
        SentencePiece's, need all of the text at once.
        """
        reads_names, before, after = self._reading(special_tokens)
        yield from before
        for row in self.encoder.stream(iterable, reads_names):
            yield from row.tolist()
        yield from after

    def _reading(self, special_tokens: bool | None) -> tuple[bool, list[int], list[int]]:
        """Return whether names of special tokens are read, and what is then around a text."""
        if special_tokens is None:
            special_tokens = self._reads_names
        if special_tokens:
            return True, self.prefix, self.suffix
        return False, [], []

    def decode(self, ids: IdSequence, skip_special_tokens: bool | None = None) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become replacement characters."""
        if skip_special_tokens is None:
            skip_special_tokens = not self._reads_names
        text = str(self._backend.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens))
        if self._cleans:
            for spaced in SPACED:
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
        frame = self.frame(1)
        if frame is None:
            return [], []
        tokens = [slot.token for slot in frame.slots]
        text = tokens.index(None)
        return tokens[:text], tokens[text + 1 :]  # type: ignore[return-value]

    def frame(self, texts: int) -> Frame | None:
        """Return the frame that the template puts around one text, or around two that are read
        together; None where it adds nothing."""
        if texts not in self._frames:
            # A text that can be encoded with every vocabulary, as far as possible.
            name = None
            if "eos" in self._roles:
                name = self._backend.id_to_token(self._roles["eos"])
            frame = Frame.of(self.encoder.marking, name or "a", texts, self.origin)
            if frame:
                largest = max(slot.token or 0 for slot in frame.slots)
                if largest >= self.vocab_size:
                    raise ConfigError(
                        f"{self.origin}: its post_processor adds the id {largest}, and its tokens"
                        f" are {self.vocab_size}: restore it."
                    )
            self._frames[texts] = frame
        return self._frames[texts]

    def as_prompt(self, ids: IdSequence) -> list[int]:
        """Return the tokens of a text as the prompt of a decoder."""
        return [*self.prefix, *map(int, ids)]

    def as_source(self, ids: IdSequence) -> list[int]:
        """Return the tokens of a text as the source of an encoder-decoder: in the template, and an
        end token last where the template has none behind a text (mBART's has a language there)."""
        end = [] if self.end_token in self.suffix else [self.end_token]
        return [*self.as_prompt(ids), *self.suffix, *end]

    def as_target(self, ids: IdSequence) -> list[int]:
        """Return the tokens of a text as the decoder of an encoder-decoder reads it: after the
        start token and any forced token. Its targets lack the start token, and have the end
        token."""
        forced = [] if self.forced_token is None else [self.forced_token]
        return [self.start_token, *forced, *map(int, ids)]

    def shown(self, token: int) -> str:
        """Return a token by itself; bytes that are not UTF-8 as \\xNN, an id without a token as
        <id>."""
        name = self._backend.id_to_token(token)
        if name is None:
            return f"<{token}>"
        # A token of WordPiece is shown with its mark.
        if self._spelling.continuation:
            return str(name)
        return self.raw(token).decode("utf-8", "backslashreplace")

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token, with the space before it; none for an id without a token."""
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        return self._spelling.raw(name)

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self.encoder.spec())

    def special(self, role: str) -> int | None:
        """Return the id of the token with a role of `ROLES` (bos, eos, pad, unk, cls, sep, mask);
        None where there is none."""
        return self._roles.get(role)

    def ids(self) -> dict[str, int | list[int]]:
        """Return the ids of special tokens by their keys in a Hugging Face config.json; several end
        tokens are a list."""
        ids_by_role: dict[str, Any] = {**self._roles}
        if "eos" in ids_by_role:
            ids_by_role["start"] = self.start_token
            if len(self.end_tokens) > 1:
                ids_by_role["eos"] = [*self.end_tokens]
        return {key: ids_by_role[role] for key, role in ID_KEYS.items() if role in ids_by_role}

    def sentinels(self) -> list[int]:
        """Return the ids of <extra_id_0>, <extra_id_1> and so on (T5, arXiv:1910.10683)."""
        names = map("<extra_id_{}>".format, itertools.count())
        return [self._vocab[name] for name in itertools.takewhile(self._vocab.__contains__, names)]

    def ordinary(self) -> np.ndarray:
        """Return the ids of all tokens that are not special, ascending: int32."""
        special = self._spelling.added
        ids = [index for token, index in self._vocab.items() if not special.get(token)]
        return np.array(sorted(ids), np.int32)

    def word_edges(self) -> np.ndarray:
        """Return whether each token begins inside a word, and whether it ends inside one: bool
        [vocab_size, 2].

        A word is a run of letters and digits with the white space before it. Two tokens belong to
        the same word where the first ends and the second begins inside. Special tokens do neither.
        """
        edges = np.zeros((self.vocab_size, 2), bool)
        for token, index in self._vocab.items():
            edges[index] = self._spelling.edges(token)
        return edges

    def token_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each token's text: int32 [vocab_size], 0 for special
        and unused ids."""
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, index in self._vocab.items():
            sizes[index] = self._spelling.size(token)
        return sizes

    def spelled_space(self) -> tuple[int, ...]:
        """Return the ids of the three tokens of a byte that spell a space, where the vocabulary has
        no token for SentencePiece's mark of it; else empty. They stand for one byte together."""
        names = [f"<0x{byte:02X}>" for byte in SPACE.encode()]
        if not self._spelling.spaced or SPACE in self._vocab or not {*names} <= self._vocab.keys():
            return ()
        return tuple(self._vocab[name] for name in names)

    def has_space_before(self) -> bool:
        """Return whether a text gets a space before it, as by SentencePiece, which the text has
        not."""
        if not self._spelling.spaced:
            return False
        try:
            first = self.encode("a")
        except ConfigError:  # it has no "a"
            return False
        return self.shown(first[0]).startswith(" ") or tuple(first[:3]) == self.spelled_space()

    def fingerprint(self) -> str:
        """Return a digest that is equal for tokenizers that agree in everything that affects
        training."""
        settings = json.dumps(self.encoder.spec(), sort_keys=True)
        end = self._roles.get("eos")
        guess = self._guessed.get("eos")
        ends = [end, self._roles.get("start", end), self.forced_token]
        # Roles that the files name otherwise than the names of tokens say.
        if ends != [guess, guess, None]:
            settings += json.dumps(ends)
        return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()


# Tokenizers that are made here; all are deterministic. `specials` are the tokens that an objective
# needs besides the end token; their ids follow that of the end token.


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = (), pattern: str = "gpt2"
) -> Tokenizer:
    """Return a byte-level BPE of texts; no word extends from one text into the next. Ids are the
    end token (0), `specials`, the 256 bytes, and the merges.

    Texts that are too small for `vocab_size` entries give fewer."""
    lowest = 257 + len(specials)
    if vocab_size < lowest:
        raise ConfigError(
            f"tokenizer.vocab_size={vocab_size} must be at least {lowest}: the 256"
            f" bytes, the end of text and {len(specials)} tokens that the objective needs."
        )
    special_tokens = [END_OF_TEXT, *specials]
    each = ([text] for text in texts)
    vocab, merges = train_on(each, vocab_size, special_tokens, pattern=pattern)
    return Tokenizer(byte_level_bpe(vocab, merges, special_tokens, pattern))


def byte_tokenizer(specials: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token for each byte of UTF-8, whose id is the byte; then the end
    token, 256, and `specials`."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = byte_level_backend(BYTES, [], words)
    backend.add_special_tokens([END_OF_TEXT, *specials])
    return Tokenizer(backend)


def character_tokenizer(texts: Iterable[str], specials: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token for each character of the texts, in the order of code points;
    then the end token and `specials`."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    vocab = {char: index for index, char in enumerate(sorted(alphabet))}
    # The unknown token is not in the vocabulary, so that an unseen character is an error: without
    # one the library drops it.
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END_OF_TEXT, *specials])
    return Tokenizer(backend)
