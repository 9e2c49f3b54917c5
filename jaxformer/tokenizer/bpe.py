"""Trains a byte-level BPE (arXiv:1508.07909) by a fully specified rule: any two programs that
follow it give the same result.

The text between special tokens is split into words, and the most frequent pair of adjacent tokens
within words is merged, again and again. Of equally frequent pairs the greater one in the order of
byte strings is merged; within a word, occurrences are merged from the left. Ids are those of the
special tokens, then of the 256 bytes, then of the merges in their order.
"""

import codecs
import heapq
import itertools
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from jaxformer.files import ConfigError, located, store_of
from jaxformer.tokenizer.pieces import check_pattern, check_special_tokens
from jaxformer.tokenizer.words import BLOCK_CHARACTERS, count_words, segments

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]
# For each pair, the indices of the words that hold it, each as often as the pair occurs in it.
Occurrences = dict[str, "array[int]"]

COMPLEMENT = bytes(range(255, -1, -1))


def train_bpe(
    path: str | Path,
    vocab_size: int,
    special_tokens: Sequence[str] | None = (),
    *,
    pattern: str = "gpt2",
    processes: int | None = None,
) -> tuple[Vocab, Merges]:
    """Return the vocabulary and the merges of a UTF-8 text file; fewer than `vocab_size` entries
    where no pair is left to merge.

    `pattern` names how text is split into words (gpt2, llama3). `processes` is the number of
    processes that count words, which does not change the result; None takes all cores where that is
    faster. Raises ConfigError for arguments out of range, and for a file that is empty, not UTF-8
    or cannot be read.
    """
    blocks = blocks_of(path)
    return train_on(
        [blocks], vocab_size, special_tokens or (), pattern=pattern, processes=processes
    )


def train_on(
    texts: Iterable[Iterable[str]],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    pattern: str = "gpt2",
    processes: int | None = None,
) -> tuple[Vocab, Merges]:
    """Return what `train_bpe` does, of texts that each come in blocks."""
    check_special_tokens(special_tokens)
    check_pattern(pattern)
    # A token is a character in `merge_words`, so there can be no more than there are code points.
    lowest = 256 + len(special_tokens)
    highest = 0x110000 + len(special_tokens)
    if not isinstance(vocab_size, int) or not lowest <= vocab_size <= highest:
        raise ConfigError(
            f"vocab_size={vocab_size!r} must be a whole number from {lowest} (256 bytes and"
            f" {len(special_tokens)} special tokens) to {highest:,}."
        )
    if processes is not None and processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1; None takes all cores.")
    between = (text for blocks in texts for text in segments(blocks, special_tokens, pattern))
    words, times = spell(count_words(between, pattern, processes))
    merges = merge_words(words, times, vocab_size - lowest)
    entries = [token.encode() for token in special_tokens]
    entries += [bytes([byte]) for byte in range(256)]
    entries += [first + second for first, second in merges]
    return dict(enumerate(entries)), merges


def blocks_of(path: str | Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file, or of one at a URL, in blocks, its line ends as they are.
    Raises ConfigError."""
    file = located(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        for block in store_of(file).blocks(BLOCK_CHARACTERS):
            size += len(block)
            yield decoder.decode(block)
        # Raises where the file ends within a character.
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # `error.object` is the block, after the bytes that were left of the block before.
        position = size - len(error.object) + error.start
        byte = error.object[error.start]
        raise ConfigError(
            f"{file}: byte {position:,} (0x{byte:02x}) is not UTF-8: give a UTF-8 text file,"
            " unpacked."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror or error}): give a UTF-8 text file."
        ) from None
    if not size:
        raise ConfigError(f"{file} is empty: give a text file to train on.")


def spell(words: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Return the words of more than one byte, with a character for each byte, and how often each
    occurs. Raises ConfigError for half a surrogate pair, which UTF-8 cannot encode."""
    spelled: list[str] = []
    times: list[int] = []
    try:
        for word, count in words.items():
            raw = word.encode()
            if len(raw) > 1:
                spelled.append(raw.decode("latin-1"))
                times.append(count)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text holds {error.object[error.start]!a}, half a surrogate pair: remove it."
        ) from None
    return spelled, times


def merge_words(words: list[str], times: Sequence[int], limit: int) -> Merges:
    """Return the first `limit` merges, or all that there are, of words as `spell` gives them.
    Changes `words`.

    A token is a character: chr(0) to chr(255) are the bytes, chr(256) and on the merges in order. A
    pair is a string of two, which str.split finds in a word and str.join replaces.
    """
    # At most one word becomes a single token with each merge. So before the k-th merge one of the k
    # most frequent words still holds a pair, which is at least as frequent as that word. A pair
    # rarer than the `limit`-th most frequent word is therefore never the best, and is not tracked.
    threshold = sorted(times)[-limit] if 0 < limit <= len(times) else 1
    occurrences = _occurrences(words)
    counts: dict[str, int] = {}
    for pair, indices in occurrences.items():
        count = _total(indices, times)
        if count >= threshold:
            counts[pair] = count
    tokens = [bytes([byte]) for byte in range(256)]
    order = [_descending(token) for token in tokens]
    # Smallest first: the highest count, and among equal counts the greatest pair of byte strings.
    heap = [
        (-count, order[ord(pair[0])], order[ord(pair[1])], pair) for pair, count in counts.items()
    ]
    heapq.heapify(heap)
    merges: Merges = []
    while heap and len(merges) < limit:
        negative_count, first, second, pair = heapq.heappop(heap)
        count = counts[pair]
        # The count in the heap may be out of date. All occurrences of a pair are made with the
        # newer of its two tokens, so its count only falls afterwards, and the one in the heap is
        # never too small: an entry that is too large goes back with the present count.
        if count < -negative_count:
            if count >= threshold:
                heapq.heappush(heap, (-count, first, second, pair))
            else:
                del counts[pair], occurrences[pair]
            continue
        merges.append((tokens[ord(pair[0])], tokens[ord(pair[1])]))
        tokens.append(b"".join(merges[-1]))
        order.append(_descending(tokens[-1]))
        for new, old, indices in _merge(pair, chr(len(tokens) - 1), words, occurrences.pop(pair)):
            count = _total(indices, times)
            if old in counts:
                counts[old] -= count
            if count >= threshold:
                counts[new] = count
                occurrences[new] = indices
                heapq.heappush(heap, (-count, order[ord(new[0])], order[ord(new[1])], new))
    return merges


def _no_occurrences() -> Occurrences:
    return defaultdict(partial(array, "I"))


def _occurrences(words: Sequence[str]) -> Occurrences:
    occurrences = _no_occurrences()
    for index, word in enumerate(words):
        for pair in map(str.__add__, word, word[1:]):
            occurrences[pair].append(index)
    return occurrences


def _total(indices: Sequence[int], times: Sequence[int]) -> int:
    return sum(map(times.__getitem__, indices))


def _descending(token: bytes) -> str:
    """Return a string by which tokens sort in descending order. Its end mark is above every byte,
    so that a longer token comes before one that it begins with."""
    return token.translate(COMPLEMENT).decode("latin-1") + "\u0100"


def _merge(
    pair: str, token: str, words: list[str], indices: Sequence[int]
) -> Iterator[tuple[str, str, "array[int]"]]:
    """Replace a pair by its token in the words at `indices`. Yield each new pair, the pair that it
    replaces, and the indices of the words, each as often as that happens in it."""
    first = pair[0]
    second = pair[1]
    # The words of new pairs, by the token to the left and by the token to the right.
    by_previous = _no_occurrences()
    by_following = _no_occurrences()
    # A word that holds the pair many times has its index as often, in a row, and is processed once:
    # otherwise the time would grow with the square of its length.
    for index, _ in itertools.groupby(indices):
        pieces = words[index].split(pair)
        # `indices` is not updated when merges remove occurrences, so the pair may be gone.
        if len(pieces) == 1:
            continue
        words[index] = token.join(pieces)
        # With t for the token, x a b y becomes x t y: (x, a) becomes (x, t), (b, y) becomes (t, y).
        # Between two occurrences, a b a b, (b, a) becomes (t, t), counted from the left one only.
        previous = pieces[0][-1:]
        for piece in pieces[1:]:
            if previous:
                by_previous[previous].append(index)
            if piece:
                by_following[piece[0]].append(index)
                previous = piece[-1]
            else:
                previous = token
    for previous, occurrences in by_previous.items():
        yield previous + token, (second if previous == token else previous) + first, occurrences
    for following, occurrences in by_following.items():
        yield token + following, second + following, occurrences
