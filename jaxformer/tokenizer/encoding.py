"""Encodes texts on all cores, long ones in parts whose ids, joined, are those of the text; with
tiktoken, which is several times as fast as the tokenizers library, where its ids are the same."""

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from jaxformer.files import ConfigError
from jaxformer.tokenizer.byte_level import split_into_words
from jaxformer.tokenizer.pieces import BYTES, without_panic
from jaxformer.tokenizer.words import PART_CHARACTERS, WORD_PATTERNS, Cuts

if TYPE_CHECKING:
    import tiktoken

FAST_CHARACTERS = 1 << 14  # from so many on it pays to find out whether `Fast` can be used
BLOCKS_IN_FLIGHT = 16  # blocks of a stream that are encoded together

# The longest text that tiktoken reads here: its regular expressions fail at a million white spaces
# in a row.
MOST_CHARACTERS = 1 << 18

# Letters or digits that are new in the versions of Unicode from 13 to 17: two libraries that agree
# on all of them use the same tables of characters.
NEWEST = (
    "\u08be\U00011950\u0870\U00016ac0\U0001df25\U0001e4f0\U0002ebf0\U000105c0\U00010d40\U00010940"
    "\U00011de0"
)
# Settings of a BPE model that change how it merges.
MERGE_SETTINGS = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)


class Fast:
    """tiktoken's encoder of plain text, which runs without the GIL.

    `reads_names` says that it can also encode text in which names of special tokens are these
    tokens.
    """

    def __init__(self, core: "tiktoken.Encoding", names: dict[str, int], reads_names: bool) -> None:
        self._core = core
        self._names = names
        self.reads_names = reads_names
        longest_first = sorted(names, key=len, reverse=True)
        self._names_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @classmethod
    def of(cls, spec: dict[str, Any], backend: tokenizers.Tokenizer) -> "Fast | None":
        """Return the encoder for a tokenizer.json; None where its ids could differ.

        tiktoken merges two pieces if together they are the bytes of a token, BPE only the two that
        the merge of this token names. Both give the same ids where BPE encodes the bytes of each
        token as this token: as long as no merge crosses the borders of a token, the merges inside
        do not depend on the text around it.
        """
        pattern = word_pattern(spec)
        model = spec["model"]
        has_settings = any(model.get(name) for name in MERGE_SETTINGS)
        if not pattern or model["type"] != "BPE" or spec["normalizer"] or has_settings:
            return None
        added = spec["added_tokens"]
        # Those that are not special are tokens in plain text too.
        if not all(token["special"] for token in added):
            return None
        vocab: dict[str, int] = model["vocab"]
        made = ["".join(pair) for pair in model["merges"]]
        order = [vocab[token] for token in made]
        # Ids are tiktoken's ranks, so those of merges must ascend, each once.
        if order != sorted({*order}) or not {*"".join(made)} <= BYTES.keys() <= vocab.keys():
            return None
        merge = backend.model.tokenize
        if any(len(merge(token)) > 1 for token in made):
            return None
        # The core lacks entries that no merge makes, such as GPT-2's end of text where no file says
        # that it is special. They must not occur in words, which are spelled in BYTES.
        for token in vocab.keys() - {*made, *BYTES}:
            if {*token} <= BYTES.keys() and any(piece.value == token for piece in merge(token)):
                return None
        import tiktoken  # short texts do without

        ranks = {bytes(map(BYTES.__getitem__, token)): vocab[token] for token in (*BYTES, *made)}
        core = tiktoken.Encoding(
            pattern,
            pat_str=WORD_PATTERNS[pattern].words,
            mergeable_ranks=ranks,
            # Without a special token the core would search for the empty one, at every byte.
            special_tokens={"\0 not a token": max(ranks.values()) + 1},
        )
        # A plain search matches names where the library does, if all are searched in the text as it
        # is or all in the normalized text, and none strips spaces or must stand between spaces.
        names = {}
        reads_names = True
        for token in added:
            names[token["content"]] = token["id"]
            if token["normalized"] != added[0]["normalized"]:
                reads_names = False
            if token["single_word"] or token["lstrip"] or token["rstrip"]:
                reads_names = False
        fast = cls(core, names, reads_names)
        # The tables of characters of the two libraries may be of different versions of Unicode.
        probe = " ".join(f"{letter}a{letter}1 {letter}." for letter in NEWEST)
        expected = backend.encode(probe, add_special_tokens=False).ids
        if fast.encode(probe, False).tolist() != expected:
            return None
        return fast

    def encode(self, text: str, names_are_tokens: bool) -> np.ndarray:
        """Return the ids of a text of at most MOST_CHARACTERS characters: uint32."""
        if not names_are_tokens or not self._names:
            return self._core.encode_to_numpy(text, disallowed_special=())
        # Split by a group, a text gives plain text at even indices and names at odd ones.
        rows = []
        for index, piece in enumerate(self._names_pattern.split(text)):
            if index % 2:
                rows.append(np.array([self._names[piece]], np.uint32))
            else:
                rows.append(self.encode(piece, False))
        return np.concatenate(rows)


def word_pattern(spec: dict[str, Any]) -> str | None:
    """Return the name of the entry of `WORD_PATTERNS` by which a byte-level tokenizer.json splits
    text; None for another pattern."""
    for name, pattern in WORD_PATTERNS.items():
        words = json.loads(split_into_words(pattern.words).__getstate__())
        if _without_offsets(words) == _without_offsets(spec["pre_tokenizer"]):
            return name
    return None


def _without_offsets(steps: dict[str, Any] | None) -> str:
    """Return the steps of a pre-tokenizer as text, without a setting that changes no id."""
    return json.dumps(steps).replace('"trim_offsets": true', '"trim_offsets": false')


def cuts_of(spec: dict[str, Any], names_are_tokens: bool) -> Cuts:
    """Return the cuts for a tokenizer.json; without a pattern where it may read more than a word at
    a time. `names_are_tokens` says that names of special tokens in a text are these tokens."""
    pattern = word_pattern(spec)
    if spec["normalizer"] is not None or not pattern:
        return Cuts("")
    names = []
    for token in spec["added_tokens"]:
        if names_are_tokens or not token["special"]:
            names.append(token["content"])
    return Cuts(WORD_PATTERNS[pattern].cuts, tuple(names))


def _text(chunk: object) -> str:
    if not isinstance(chunk, str):
        raise ConfigError(
            f"a piece of the text is {type(chunk).__name__}, not str: open the file as text."
        )
    return chunk


class Encoder:
    """Encodes texts without the template around them.

    `reads_names` in its methods says that names of special tokens in a text are these tokens.
    `split_names` says that they never are, as split_special_tokens in tokenizer_config.json.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, split_names: bool, origin: str = "the tokenizer"
    ) -> None:
        backend.encode_special_tokens = True
        self._backend = backend
        self._split_names = split_names
        self._origin = origin

    def spec(self) -> dict[str, Any]:
        """Return the tokenizer.json as an object."""
        return json.loads(self._backend.to_str())  # type: ignore[no-any-return]

    @functools.cached_property
    def marking(self) -> tokenizers.Tokenizer:
        """Return a copy of the backend that reads names of special tokens as these tokens. Setting
        this back and forth on one backend would affect other threads."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = self._split_names
        return backend

    def rows(self, texts: Sequence[str], reads_names: bool) -> list[np.ndarray]:
        """Return the ids of each text: uint32."""
        # One text starts no threads: where memory is short, a thread may never begin to run.
        parallel = len(texts) > 1
        if max(map(len, texts), default=0) <= 2 * PART_CHARACTERS:
            return self._rows(texts, reads_names, parallel)
        # The parts of all texts are encoded together, and then joined text by text.
        split_texts = [[*self._cuts[reads_names].parts(text)] for text in texts]
        all_parts = [*itertools.chain.from_iterable(split_texts)]
        rows = iter(self._rows(all_parts, reads_names, parallel))
        return [np.concatenate([*itertools.islice(rows, len(parts))]) for parts in split_texts]

    def stream(self, chunks: Iterable[str], reads_names: bool) -> Iterator[np.ndarray]:
        """Yield the ids of a text that comes in chunks of any size, part after part, in the memory
        of a few parts. A file is read in blocks rather than lines, which may be long."""
        if hasattr(chunks, "read"):
            chunks = iter(functools.partial(chunks.read, 2 * PART_CHARACTERS), "")
        blocks = self._cuts[reads_names].blocks(map(_text, chunks))
        while batch := [*itertools.islice(blocks, BLOCKS_IN_FLIGHT)]:
            yield from self._rows(batch, reads_names, False)

    @functools.cached_property
    def _cuts(self) -> dict[bool, Cuts]:
        spec = self.spec()
        return {
            False: cuts_of(spec, names_are_tokens=False),
            True: cuts_of(spec, names_are_tokens=not self._split_names),
        }

    @functools.cached_property
    def _fast(self) -> Fast | None:
        return Fast.of(self.spec(), self._backend)

    def _rows(self, texts: Sequence[str], reads_names: bool, parallel: bool) -> list[np.ndarray]:
        names_are_tokens = reads_names and not self._split_names
        fast = None
        # To find out whether `Fast` can be used takes longer than few characters.
        if sum(map(len, texts)) >= FAST_CHARACTERS:
            fast = self._fast
        if names_are_tokens and fast and not fast.reads_names:
            fast = None
        backend = self._backend
        if reads_names:
            backend = self.marking

        def slow(texts: Sequence[str]) -> list[np.ndarray]:
            encodings = without_panic(backend.encode_batch_fast, [*texts], add_special_tokens=False)
            return [np.array(encoding.ids, np.uint32) for encoding in encodings]

        def encode(text: str) -> np.ndarray:
            if fast and len(text) <= MOST_CHARACTERS:
                return without_panic(fast.encode, text, names_are_tokens)
            return slow([text])[0]

        try:
            if not fast:
                return slow(texts)
            if not parallel:
                return [*map(encode, texts)]
            with ThreadPool() as pool:
                return pool.map(encode, texts)
        except Exception as error:  # the libraries raise nothing narrower
            raise self.unencodable(texts, error) from None

    def unencodable(self, texts: Sequence[str], error: Exception) -> ConfigError:
        """Return the ConfigError for an error of the library on these texts."""
        unseen = []
        for char in sorted({*"".join(texts)}):
            if "\ud800" <= char <= "\udfff":
                return ConfigError(
                    f"the text holds {char!r} (U+{ord(char):04X}), half of a surrogate pair of"
                    ' UTF-16: decode it with errors="replace".'
                )
            if self._backend.token_to_id(char) is None:
                unseen.append(char)
        if "UNK" not in str(error) or not unseen:
            return ConfigError(f"{self._origin} cannot encode this text: {error}.")
        return ConfigError(
            f"the character tokenizer has no token for {', '.join(map(repr, unseen[:5]))}: leave"
            " such characters out of the text, or train with tokenizer.kind=bytes or bpe, which"
            " encode any text."
        )
