"""Texts to ids on all cores: in parts where they are long, by tiktoken's core where it gives the
same ids."""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.tokenizer.cuts import PART_CHARACTERS, Cuts
from jaxformer.tokenizer.fast import MOST_CHARACTERS, Fast

if TYPE_CHECKING:
    import tokenizers

TokenIds = list[int] | np.ndarray

MUCH = 1 << 14  # characters that are worth to look whether tiktoken can be had
BLOCKS_IN_FLIGHT = 16  # blocks of a stream that are encoded together
SHARE = 1 << 15  # characters that a thread encodes before it takes the next


class Encoder:
    """Ids of texts without what a template puts around them; `named` says whether names of special
    tokens are these."""

    def __init__(self, backend: "tokenizers.Tokenizer", split_names: bool) -> None:
        backend.encode_special_tokens = True
        self._backend, self._split_names = backend, split_names

    def spec(self) -> dict[str, Any]:
        """What the tokenizer.json holds."""
        return json.loads(self._backend.to_str())  # type: ignore[no-any-return]

    @functools.cached_property
    def marking(self) -> "tokenizers.Tokenizer":
        """A second backend, to which names of special tokens are these: a switch of the first would
        meet other threads."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = self._split_names
        return backend

    def rows(self, texts: Sequence[str], named: bool) -> list[TokenIds]:
        """The ids of each text. Raises ConfigError for what the tokenizer cannot encode."""
        cores = (
            len(texts) > 1
        )  # one text alone starts no threads: its caller may have little memory to give, or none
        if max(map(len, texts), default=0) <= 2 * PART_CHARACTERS:
            return self._rows(texts, named, cores)
        parts = [[*self._cuts[named].parts(text)] for text in texts]
        rows = iter(self._rows([*itertools.chain.from_iterable(parts)], named, cores))
        return [_joined([*itertools.islice(rows, len(of_text))]) for of_text in parts]

    def stream(self, chunks: Iterable[str], named: bool) -> Iterator[TokenIds]:
        """The ids of a text that comes in chunks of any size, a part after the other, in the memory
        of a few."""
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
        try:
            if fast and (fast.marks or not names):
                encode = functools.partial(self._row, fast, names)
                return _on_all_cores(encode, texts) if cores else [*map(encode, texts)]
            return self._slow(texts, named)
        except Exception as error:  # the libraries raise nothing narrower
            raise self._unencodable(texts, error) from None

    def _row(self, fast: Fast, names: bool, text: str) -> TokenIds:
        return (
            fast.encode(text, names)
            if len(text) <= MOST_CHARACTERS
            else self._slow([text], names)[0]
        )

    def _slow(self, texts: Sequence[str], named: bool) -> list[TokenIds]:
        backend = self.marking if named else self._backend
        return [
            encoding.ids
            for encoding in backend.encode_batch_fast([*texts], add_special_tokens=False)
        ]

    def _unencodable(self, texts: Sequence[str], error: Exception) -> ConfigError:
        text = "".join(texts)
        if half := next((char for char in text if "\ud800" <= char <= "\udfff"), None):
            return ConfigError(
                f"the text holds {half!r} (U+{ord(half):04X}), half of a character of UTF-16, which"
                ' stands for nothing: decode it with errors="replace".'
            )
        unseen = [char for char in sorted({*text}) if self._backend.token_to_id(char) is None]
        if "UNK" not in str(error) or not unseen:
            return ConfigError(f"the tokenizer cannot encode this text: {error}.")
        shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in unseen[:5]) + (
            ", ..." if len(unseen) > 5 else ""
        )
        return ConfigError(
            f"the character tokenizer has never seen {shown}: leave"
            f" {'it' if len(unseen) == 1 else 'them'} out, or train with tokenizer.kind=bytes or"
            " bpe, which encode any text."
        )


def _checked(chunks: Iterable[str]) -> Iterator[str]:
    """The strings of an iterable; those of a file handle not by lines, which may be long."""
    read: Callable[[int], str] | None = getattr(chunks, "read", None)
    for chunk in iter(lambda: read(2 * PART_CHARACTERS) or None, None) if read else chunks:
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


def _on_all_cores(encode: Callable[[str], TokenIds], texts: Sequence[str]) -> list[TokenIds]:
    """Each text's row, by threads that take some texts at a time."""
    ends = itertools.accumulate(map(len, texts))
    groups = [
        [text for _, text in group]
        for _, group in itertools.groupby(zip(ends, texts, strict=True), _share)
    ]
    with ThreadPoolExecutor() as pool:
        shares = pool.map(lambda group: [encode(text) for text in group], groups)
        return [*itertools.chain.from_iterable(shares)]


def _share(sized: tuple[int, str]) -> int:
    return sized[0] // SHARE
