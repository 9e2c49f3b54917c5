"""Encodes texts on all cores: long ones in parts, and by a faster encoder where it gives the same
ids."""

import copy
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.files import ConfigError
from jaxformer.tokenizer.cuts import PART_CHARACTERS, Cuts
from jaxformer.tokenizer.fast import MOST_CHARACTERS, Fast
from jaxformer.tokenizer.pieces import without_panic

if TYPE_CHECKING:
    import tokenizers

TokenIds = list[int] | np.ndarray

MUCH = 1 << 14  # characters from which on it pays to find out whether `Fast` can be used
BLOCKS_IN_FLIGHT = 16  # blocks of a stream that are encoded together


class Encoder:
    """Ids of texts, without a template around them; `named` says whether names of special tokens in
    a text are these tokens."""

    def __init__(
        self, backend: "tokenizers.Tokenizer", split_names: bool, origin: str = "the tokenizer"
    ) -> None:
        backend.encode_special_tokens = True
        self._backend, self._split_names, self._origin = backend, split_names, origin

    def spec(self) -> dict[str, Any]:
        """The tokenizer.json as an object."""
        return json.loads(self._backend.to_str())  # type: ignore[no-any-return]

    @functools.cached_property
    def marking(self) -> "tokenizers.Tokenizer":
        """A copy of the backend that reads names of special tokens as these tokens. Setting this
        back and forth on one backend would affect other threads."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = self._split_names
        return backend

    def rows(self, texts: Sequence[str], named: bool) -> list[TokenIds]:
        """The ids of each text. Raises ConfigError for what the tokenizer cannot encode."""
        # One text starts no threads: where memory is short, a thread may never begin to run.
        cores = len(texts) > 1
        if max(map(len, texts), default=0) <= 2 * PART_CHARACTERS:
            return self._rows(texts, named, cores)
        # The parts of all texts are encoded together, and then joined again text by text.
        parts = [[*self._cuts[named].parts(text)] for text in texts]
        rows = iter(self._rows([*itertools.chain.from_iterable(parts)], named, cores))
        return [_joined([*itertools.islice(rows, len(of_text))]) for of_text in parts]

    def stream(self, chunks: Iterable[str], named: bool) -> Iterator[TokenIds]:
        """The ids of a text that comes in chunks of any size, part after part, in the memory of a
        few parts."""
        blocks = self._cuts[named].blocks(_checked(chunks))
        while several := [*itertools.islice(blocks, BLOCKS_IN_FLIGHT)]:
            yield from self._rows(several, named, False)

    @functools.cached_property
    def _cuts(self) -> dict[bool, Cuts]:
        spec = self.spec()
        return {named: Cuts.of(spec, named and not self._split_names) for named in (False, True)}

    @functools.cached_property
    def _fast(self) -> Fast | None:
        return Fast.of(self.spec(), self._backend)

    def _rows(self, texts: Sequence[str], named: bool, cores: bool) -> list[TokenIds]:
        fast = self._fast if sum(map(len, texts)) >= MUCH else None
        names = named and not self._split_names

        def encode(text: str) -> TokenIds:
            if fast and len(text) <= MOST_CHARACTERS:
                return without_panic(fast.encode, text, names)
            return self._slow([text], named)[0]

        try:
            if fast and (fast.marks or not names):
                if not cores or not fast.threads:
                    return [*map(encode, texts)]
                with ThreadPool() as pool:
                    return pool.map(encode, texts)
            return self._slow(texts, named)
        except Exception as error:  # the libraries raise nothing narrower
            raise self.unencodable(texts, error) from None

    def _slow(self, texts: Sequence[str], named: bool) -> list[TokenIds]:
        backend = self.marking if named else self._backend
        encodings = without_panic(backend.encode_batch_fast, [*texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def unencodable(self, texts: Sequence[str], error: Exception) -> ConfigError:
        characters = sorted({*"".join(texts)})
        if half := next((char for char in characters if "\ud800" <= char <= "\udfff"), None):
            return ConfigError(
                f"the text holds {half!r} (U+{ord(half):04X}), half of a surrogate pair of UTF-16:"
                ' decode it with errors="replace".'
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
    if read := getattr(chunks, "read", None):
        chunks = itertools.takewhile(len, map(read, itertools.repeat(2 * PART_CHARACTERS)))
    for chunk in chunks:
        if not isinstance(chunk, str):
            raise ConfigError(
                f"a piece of the text is {type(chunk).__name__}, not str: open the file as text."
            )
        yield chunk


def _joined(rows: list[TokenIds]) -> TokenIds:
    if len(rows) == 1:
        return rows[0]
    if all(isinstance(row, list) for row in rows):
        return [*itertools.chain.from_iterable(rows)]
    return np.concatenate([np.asarray(row, np.uint32) for row in rows])


def as_list(row: TokenIds) -> list[int]:
    """The ids of a text as a list."""
    return row if isinstance(row, list) else row.tolist()
