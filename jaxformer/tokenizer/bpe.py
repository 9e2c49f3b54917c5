"""Trains a byte-level BPE (arXiv:1508.07909) by a rule that leaves nothing open, so that any two
programs that follow it give the same result.

The text between special tokens is split into words, and the most frequent pair of adjacent tokens
within words is merged, again and again. Of pairs that are equally frequent the greater one is
merged, in the order of byte strings; within a word, occurrences are merged from the left. Ids are
those of the special tokens, of the 256 bytes, and of the merges in their order.
"""

import codecs
import heapq
import itertools
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from jaxformer.files import ConfigError
from jaxformer.tokenizer.pieces import check_pattern, check_special_tokens
from jaxformer.tokenizer.words import BLOCK_CHARACTERS, count_words, parts

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]
# For each pair, the numbers of the words that hold it, each as often as the pair occurs in it.
Occurrences = dict[str, "array[int]"]

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

    `pattern` names how text is split into words (gpt2, llama3). `processes` is how many processes
    count words, which does not change the result; None takes all cores where that is faster.
    Raises ConfigError.
    """
    texts, specials = [blocks_of(path)], special_tokens or ()
    return train_on(texts, vocab_size, specials, pattern=pattern, processes=processes)


def train_on(
    texts: Iterable[Iterable[str]],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    pattern: str = "gpt2",
    processes: int | None = None,
) -> tuple[Vocab, Merges]:
    """Does the same for texts that each come in blocks."""
    check_special_tokens(special_tokens)
    check_pattern(pattern)
    # A token is a character in `merge_words`, so there can be no more than there are code points.
    least, most = 256 + len(special_tokens), 0x110000 + len(special_tokens)
    if not isinstance(vocab_size, int) or not least <= vocab_size <= most:
        raise ConfigError(
            f"vocab_size={vocab_size!r} must be a whole number from {least} (256 bytes and"
            f" {len(special_tokens)} special tokens) to {most:,}."
        )
    if processes is not None and processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1; None takes all cores.")
    between = (part for blocks in texts for part in parts(blocks, special_tokens, pattern))
    words, times = spell(count_words(between, pattern, processes))
    merges = merge_words(words, times, vocab_size - least)
    entries = [token.encode() for token in special_tokens]
    entries += [bytes([byte]) for byte in range(256)]
    entries += [first + second for first, second in merges]
    return dict(enumerate(entries)), merges


def blocks_of(path: str | os.PathLike[str]) -> Iterator[str]:
    """The text of a UTF-8 file in blocks, its line ends as they are. Raises ConfigError."""
    name, decoder, end = os.fspath(path), codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_CHARACTERS):
                end += len(block)
                yield decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # `error.object` ends where the block does, and begins with bytes kept of the block before.
        place, byte = end - len(error.object) + error.start, error.object[error.start]
        raise ConfigError(
            f"{name}: byte {place:,} (0x{byte:02x}) is not UTF-8: give a UTF-8 text file, unpacked."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror or error}): give a UTF-8 text file."
        ) from None
    if not end:
        raise ConfigError(f"{name} is empty: give a text file to train on.")


def spell(words: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """The words of more than one byte, with a character for each byte, and how often they occur."""
    spelled: list[str] = []
    times: list[int] = []
    try:
        for word, count in words.items():
            if len(raw := word.encode()) > 1:
                spelled.append(raw.decode("latin-1"))
                times.append(count)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text holds {error.object[error.start]!a}, half a surrogate pair: remove it."
        ) from None
    return spelled, times


def merge_words(words: list[str], times: Sequence[int], most: int) -> Merges:
    """The first `most` merges, or all there are, of words as `spell` gives them. Changes `words`.

    A token is a character: chr(0) to chr(255) are the bytes, chr(256) and on the merges in order. A
    pair is a string of two, which str.split finds in a word and str.join replaces.
    """
    # At most one word becomes a single token with each merge. So before the k-th merge one of the k
    # most frequent words still holds a pair, which is at least as frequent as that word. A pair
    # rarer than the `most`-th most frequent word is therefore never the best, and is not tracked.
    least = sorted(times)[-most] if 0 < most <= len(times) else 1
    places = _occurrences(words)
    counts = {
        pair: count for pair, found in places.items() if (count := _total(found, times)) >= least
    }
    tokens = [bytes([byte]) for byte in range(256)]
    order = [_descending(token) for token in tokens]
    # Smallest first: the highest count, and among equal counts the greatest pair of byte strings.
    heap = [
        (-count, order[ord(pair[0])], order[ord(pair[1])], pair) for pair, count in counts.items()
    ]
    heapq.heapify(heap)
    merges: Merges = []
    while heap and len(merges) < most:
        known, first, second, pair = heapq.heappop(heap)
        # The count in the heap may be out of date. All occurrences of a pair come to be with the
        # newer of its two tokens, so its count only falls afterwards, and what is in the heap is
        # never too small: an entry that is too large goes back with the present count.
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


def _no_occurrences() -> Occurrences:
    return defaultdict(partial(array, "I"))


def _occurrences(words: Sequence[str]) -> Occurrences:
    places = _no_occurrences()
    for place, word in enumerate(words):
        for pair in map(str.__add__, word, word[1:]):
            places[pair].append(place)
    return places


def _total(places: Sequence[int], times: Sequence[int]) -> int:
    return sum(map(times.__getitem__, places))


def _descending(token: bytes) -> str:
    """A string by which tokens sort in descending order. Its end mark is above every byte, so that
    a longer token comes before one that it begins with."""
    return token.translate(COMPLEMENT).decode("latin-1") + "\u0100"


def _merge(
    pair: str, token: str, words: list[str], places: Sequence[int]
) -> Iterator[tuple[str, str, "array[int]"]]:
    """Replaces a pair by its token in the words at `places`. Gives each new pair, the pair that
    stood there before, and the words where."""
    first, second = pair[0], pair[1]
    before, after = _no_occurrences(), _no_occurrences()  # by the token to the left, to the right
    # A word that holds the pair many times is named as often, one after the other, and is read once
    # for all: else a word of millions of characters would take its square.
    for place, _ in itertools.groupby(places):
        pieces = words[place].split(pair)
        # The list of places is not updated as merges take occurrences away: a word without the pair
        # is passed over.
        if len(pieces) == 1:
            continue
        words[place] = token.join(pieces)
        # With t for the token, x a b y becomes x t y: (x, a) becomes (x, t), (b, y) becomes (t, y).
        # Between two occurrences, a b a b, (b, a) becomes (t, t), counted from the left one only.
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
