"""Encodes texts on all cores, long ones in parts, with a faster encoder where it gives the same
ids."""

import copy
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import tokenizers

from jaxformer.files import ConfigError
from jaxformer.tokenizer.cuts import PART_CHARACTERS, Cuts
from jaxformer.tokenizer.fast import MOST_CHARACTERS, Fast
from jaxformer.tokenizer.pieces import without_panic

EncodedIds = list[int] | np.ndarray

FAST_CHARACTERS = 1 << 14  # from so many on it pays to find out whether `Fast` can be used
BLOCKS_IN_FLIGHT = 16  # blocks of a stream that are encoded together


class Encoder:
    """Encodes texts without the template around them.

    `reads_names` in its methods says that names of special tokens in a text are these tokens.
    `split_names` says that they never are, as split_special_tokens in tokenizer_config.json.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, split_names: bool, origin: str = "the tokenizer"
    ) -> None:
        backend.encode_special_tokens = True
        self._backend, self._split_names, self._origin = backend, split_names, origin

    def spec(self) -> dict[str, Any]:
        """The tokenizer.json as an object."""
        return json.loads(self._backend.to_str())  # type: ignore[no-any-return]

    @functools.cached_property
    def marking(self) -> tokenizers.Tokenizer:
        """A copy of the backend that reads names of special tokens as these tokens. Setting this
        back and forth on one backend would affect other threads."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = self._split_names
        return backend

    def rows(self, texts: Sequence[str], reads_names: bool) -> list[EncodedIds]:
        """The ids of each text. Raises ConfigError for what the tokenizer cannot encode."""
        # One text starts no threads: where memory is short, a thread may never begin to run.
        parallel = len(texts) > 1
        if max(map(len, texts), default=0) <= 2 * PART_CHARACTERS:
            return self._rows(texts, reads_names, parallel)
        # The parts of all texts are encoded together, and then joined text by text.
        split_texts = [[*self._cuts[reads_names].parts(text)] for text in texts]
        all_parts = [*itertools.chain.from_iterable(split_texts)]
        rows = iter(self._rows(all_parts, reads_names, parallel))
        return [_joined([*itertools.islice(rows, len(parts))]) for parts in split_texts]

    def stream(self, chunks: Iterable[str], reads_names: bool) -> Iterator[EncodedIds]:
        """The ids of a text that comes in chunks of any size, part after part, in the memory of a
        few parts."""
        blocks = self._cuts[reads_names].blocks(_checked(chunks))
        while batch := [*itertools.islice(blocks, BLOCKS_IN_FLIGHT)]:
            yield from self._rows(batch, reads_names, False)

    @functools.cached_property
    def _cuts(self) -> dict[bool, Cuts]:
        spec = self.spec()
        return {
            False: Cuts.of(spec, names_are_tokens=False),
            True: Cuts.of(spec, names_are_tokens=not self._split_names),
        }

    @functools.cached_property
    def _fast(self) -> Fast | None:
        return Fast.of(self.spec(), self._backend)

    def _rows(self, texts: Sequence[str], reads_names: bool, parallel: bool) -> list[EncodedIds]:
        fast = self._fast if sum(map(len, texts)) >= FAST_CHARACTERS else None
        names_are_tokens = reads_names and not self._split_names

        def encode(text: str) -> EncodedIds:
            if fast and len(text) <= MOST_CHARACTERS:
                return without_panic(fast.encode, text, names_are_tokens)
            return self._slow([text], reads_names)[0]

        try:
            if fast and (fast.reads_names or not names_are_tokens):
                if not parallel or not fast.threads:
                    return [*map(encode, texts)]
                with ThreadPool() as pool:
                    return pool.map(encode, texts)
            return self._slow(texts, reads_names)
        except Exception as error:  # the libraries raise nothing narrower
            raise self.unencodable(texts, error) from None

    def _slow(self, texts: Sequence[str], reads_names: bool) -> list[EncodedIds]:
        backend = self.marking if reads_names else self._backend
        encodings = without_panic(backend.encode_batch_fast, [*texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def unencodable(self, texts: Sequence[str], error: Exception) -> ConfigError:
        """The ConfigError for an error of the library on these texts."""
        characters = sorted({*"".join(texts)})
        surrogate = next((char for char in characters if "\ud800" <= char <= "\udfff"), None)
        if surrogate is not None:
            return ConfigError(
                f"the text holds {surrogate!r} (U+{ord(surrogate):04X}), half of a surrogate pair"
                ' of UTF-16: decode it with errors="replace".'
            )
        unseen = [char for char in characters if self._backend.token_to_id(char) is None]
        if "UNK" not in str(error) or not unseen:
            return ConfigError(f"{self._origin} cannot encode this text: {error}.")
        shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in unseen[:5])
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        return ConfigError(
            f"the character tokenizer has no token for {shown}{more}: leave them out of the text,"
            " or train with tokenizer.kind=bytes or bpe, which encode any text."
        )


def _checked(chunks: Iterable[str]) -> Iterator[str]:
    """The strings of an iterable. A file is read in blocks rather than lines, which may be long."""
    read = getattr(chunks, "read", None)
    if read is not None:
        chunks = itertools.takewhile(len, map(read, itertools.repeat(2 * PART_CHARACTERS)))
    for chunk in chunks:
        if not isinstance(chunk, str):
            raise ConfigError(
                f"a piece of the text is {type(chunk).__name__}, not str: open the file as text."
            )
        yield chunk


def _joined(rows: list[EncodedIds]) -> EncodedIds:
    if len(rows) == 1:
        return rows[0]
    if all(isinstance(row, list) for row in rows):
        return [*itertools.chain.from_iterable(rows)]
    return np.concatenate([np.asarray(row, np.uint32) for row in rows])


def as_list(row: EncodedIds) -> list[int]:
    """The ids of a text as a list."""
    return row if isinstance(row, list) else row.tolist()
