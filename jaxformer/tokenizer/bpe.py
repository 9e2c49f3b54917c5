"""Trains a byte-level BPE (arXiv:1508.07909) by an exact rule, so that any two programs that hold
to it agree.

Special tokens are split out, the rest is parted into words, and the most frequent pair of
neighbours within words is merged, again and again; of pairs that are as frequent the greater one in
the order of byte strings; in a word from the left. Ids are those of the special tokens, of the 256
bytes, and of the merges in their order.
"""

import codecs
import heapq
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from jaxformer.config import ConfigError
from jaxformer.tokenizer.pieces import check_special_tokens
from jaxformer.tokenizer.words import BLOCK_CHARACTERS, WORD_PATTERNS, count_words, parts

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]
Occurrences = dict[
    str, "array[int]"
]  # of each pair the numbers of the words that hold it, as often as they do

COMPLEMENT = bytes(range(255, -1, -1))


def train_bpe(
    path: str | os.PathLike[str],
    vocab_size: int,
    special_tokens: Sequence[str] | None = (),
    *,
    pattern: str = "gpt2",
    processes: int | None = None,
) -> tuple[Vocab, Merges]:
    """The vocabulary and the merges of a UTF-8 text file; fewer than `vocab_size` entries where no
    pair is left to merge.

    `pattern` names how text is parted into words (gpt2, llama3). `processes` count words and do not
    change the result; None takes all cores where that is sooner. Raises ConfigError.
    """
    return train_on(
        [_read(path)], vocab_size, special_tokens or (), pattern=pattern, processes=processes
    )


def train_on(
    texts: Iterable[Iterable[str]],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    pattern: str = "gpt2",
    processes: int | None = None,
) -> tuple[Vocab, Merges]:
    """Likewise, of texts that each come in blocks."""
    _check(vocab_size, special_tokens, pattern, processes)
    between = (part for blocks in texts for part in parts(blocks, special_tokens, pattern))
    base = [*(token.encode() for token in special_tokens), *(bytes([byte]) for byte in range(256))]
    merges = merge_words(*spell(count_words(between, pattern, processes)), vocab_size - len(base))
    return dict(enumerate([*base, *(first + second for first, second in merges)])), merges


def _check(
    vocab_size: int, special_tokens: Sequence[str], pattern: str, processes: int | None
) -> None:
    check_special_tokens(special_tokens)
    least, most = (
        256 + len(special_tokens),
        0x110000 + len(special_tokens),
    )  # a token is a character in `merge_words`
    if not isinstance(vocab_size, int) or not least <= vocab_size <= most:
        names = (
            f" and {len(special_tokens)} special token{'s' * (len(special_tokens) > 1)}"
            if special_tokens
            else ""
        )
        count = f"the 256 bytes{names} take {least}"
        raise ConfigError(
            f"vocab_size={vocab_size!r} must be a whole number from {least} to {most:,}: {count}."
        )
    if pattern not in WORD_PATTERNS:
        raise ConfigError(
            f"pattern={pattern!r} is not known: take one of {', '.join(WORD_PATTERNS)}."
        )
    if processes is not None and processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1; None takes all cores.")


def _read(path: str | os.PathLike[str]) -> Iterator[str]:
    """The text of a file in blocks, its line ends as they are."""
    decoder, end = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_CHARACTERS):
                end += len(block)
                yield decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = end - len(error.object) + error.start
        found = f"byte {place:,} (0x{error.object[error.start]:02x}) is not UTF-8"
        raise ConfigError(
            f"{os.fspath(path)}: {found}: give a UTF-8 text file, unpacked."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{os.fspath(path)} cannot be read ({error.strerror or error}): give a UTF-8 text file."
        ) from None
    if not end:
        raise ConfigError(f"{os.fspath(path)} is empty: give a text file to train on.")


def spell(words: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Words of more than one byte with a character for each, and how often they occur."""
    spelled: list[str] = []
    times: list[int] = []
    try:
        for word, count in words.items():
            if len(raw := word.encode()) > 1:
                spelled.append(raw.decode("latin-1"))
                times.append(count)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text holds {error.object[error.start]!a}, half a character: mend it."
        ) from None
    return spelled, times


def merge_words(words: list[str], times: Sequence[int], most: int) -> Merges:
    """At most so many merges, in order, of words as `spell` gives them, which it writes them into.

    A token is a character, chr(256) and on for merges, so that str.split finds a pair and str.join
    merges it; a pair is a string of two. A merge makes pairs that are new and takes from others, so
    counts only fall: that of a pair in the heap is looked up when its turn comes. Before the k-th
    merge fewer than k words are one token, thus one of the k most frequent words holds a pair, and
    pairs that are rarer than the last of `most` such words need not be followed.
    """
    least = sorted(times)[-most] if 0 < most <= len(times) else 1
    places = _occurrences(words)
    counts = {
        pair: count for pair, found in places.items() if (count := _total(found, times)) >= least
    }
    tokens = [bytes([byte]) for byte in range(256)]
    order = [_descending(token) for token in tokens]
    heap = [
        (-count, order[ord(pair[0])], order[ord(pair[1])], pair) for pair, count in counts.items()
    ]
    heapq.heapify(heap)
    merges: Merges = []
    while heap and len(merges) < most:
        known, first, second, pair = heapq.heappop(heap)
        if (count := counts[pair]) < -known:
            if count >= least:
                heapq.heappush(heap, (-count, first, second, pair))
            else:
                del counts[pair], places[pair]
            continue
        merges.append((tokens[ord(pair[0])], tokens[ord(pair[1])]))
        tokens.append(b"".join(merges[-1]))
        order.append(_descending(tokens[-1]))
        for new, gone, found in _merge(pair, chr(len(tokens) - 1), words, places.pop(pair)):
            count = _total(found, times)
            if gone in counts:
                counts[gone] -= count
            if count >= least:
                counts[new], places[new] = count, found
                heapq.heappush(heap, (-count, order[ord(new[0])], order[ord(new[1])], new))
    return merges


def _occurrences(words: Sequence[str]) -> Occurrences:
    places: Occurrences = defaultdict(partial(array, "I"))
    for place, word in enumerate(words):
        for pair in map(str.__add__, word, word[1:]):
            places[pair].append(place)
    return places


def _total(places: Sequence[int], times: Sequence[int]) -> int:
    return sum(map(times.__getitem__, places))


def _descending(token: bytes) -> str:
    """A string that sorts the other way round: a longer token comes before the one that it begins
    with."""
    return token.translate(COMPLEMENT).decode("latin-1") + "\u0100"


def _merge(
    pair: str, token: str, words: list[str], places: Sequence[int]
) -> Iterator[tuple[str, str, "array[int]"]]:
    """Writes the token for a pair; each pair that so comes to be, the one that it was, and the
    places where."""
    first, second = pair[0], pair[1]
    before: Occurrences = defaultdict(partial(array, "I"))
    after: Occurrences = defaultdict(partial(array, "I"))
    for place in places:
        pieces = words[place].split(pair)
        if len(pieces) == 1:  # it held the pair until another merge
            continue
        words[place] = token.join(pieces)
        left = pieces[0][-1:]
        for piece in pieces[1:]:
            if left:
                before[left].append(place)
            if piece:
                after[piece[0]].append(place)
                left = piece[-1]
            else:
                left = token
    for left, found in before.items():
        yield left + token, (second if left == token else left) + first, found
    for right, found in after.items():
        yield token + right, second + right, found
