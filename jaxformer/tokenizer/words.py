"""Splits text into the words within which BPE merges, and counts them, on all cores where there is
much text.

Counting holds the GIL, so it needs processes, and those of `ProcessPoolExecutor` either fork, which
is unsafe beside the threads of JAX, or import the caller's script again, which runs a script
without a main guard twice. Therefore each thread of a pool runs this file as a program, which for a
fast start imports neither NumPy nor the rest of the package.
"""

import functools
import itertools
import os
import pickle
import re
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

BLOCK_CHARACTERS = 1 << 19  # characters that are read and split at a time
PROCESS_CHARACTERS = 1 << 20  # characters that a process counts: long beside the time it starts in
FEW_BATCHES = 12  # for fewer batches than these, other processes would not save time


class WordPattern(NamedTuple):
    """Two regular expressions of the `regex` module: what a word is, and the places where a text
    can be cut without changing a word."""

    words: str
    cuts: str


# A run of letters, or of digits, ends without regard to what follows it.
RUNS = r"|(?<=\p{L})(?=\P{L})|(?<=\p{N})(?=\P{N})"

WORD_PATTERNS = {
    "gpt2": WordPattern(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?<=\S)(?=\s)" + RUNS,
    ),
    "llama3": WordPattern(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?<=\S)(?=[^\S\r\n])|(?<=[\r\n])(?=\S)" + RUNS,
    ),
}

# What the classes of a pattern are in ASCII text, for which the standard library's `re` is used: it
# is twice as fast as `regex`.
ASCII = {r"\p{L}\p{N}]": "A-Za-z0-9]", r"\p{L}": "[A-Za-z]", r"\p{N}": "[0-9]"}


def split_words(text: str, pattern: str) -> list[str]:
    """The words of a text, which joined are the text again."""
    return _finder(pattern, text.isascii())(text)


@functools.cache
def _finder(pattern: str, ascii_only: bool) -> Callable[[str], list[str]]:
    words = WORD_PATTERNS[pattern].words
    if not ascii_only:
        import regex

        return regex.compile(words).findall  # type: ignore[no-any-return]
    for classes, ascii_classes in ASCII.items():
        words = words.replace(classes, ascii_classes)
    return re.compile(words, re.ASCII).findall


def parts(blocks: Iterable[str], special_tokens: Sequence[str], pattern: str) -> Iterator[str]:
    """The text between special tokens, from a text that comes in blocks.

    Of special tokens that begin at the same character the longest is taken. Long parts are cut
    where no word changes, so that little text is held at a time.
    """
    longest_first = sorted(special_tokens, key=len, reverse=True)
    specials = re.compile("|".join(map(re.escape, longest_first)))
    longest = max(map(len, special_tokens), default=0)
    held = ""
    for block in itertools.chain(filter(None, blocks), ("",)):
        held += block
        # A special token that begins later may be incomplete until the next block is read.
        known = len(held) - longest if block else len(held)
        start = 0
        for match in specials.finditer(held) if special_tokens else ():
            if match.start() > known:
                break
            yield held[start : match.start()]
            start = match.end()
        stop = _last_cut(held, pattern, start, known) if block else len(held)
        yield held[start:stop]
        held = held[stop:]


def _last_cut(text: str, pattern: str, start: int, stop: int) -> int:
    """The last place before `stop` where the text can be cut; `start` where there is none, or where
    too little text would be cut off."""
    if stop - start < BLOCK_CHARACTERS // 2:
        return start
    import regex

    found = regex.search(f"(?r){WORD_PATTERNS[pattern].cuts}", text, pos=start, endpos=stop)
    return found.start() if found else start


def count_words(texts: Iterable[str], pattern: str, processes: int | None = None) -> Counter[str]:
    """How often each word occurs in the texts. None for `processes` takes one per core where that
    is faster."""
    batches = _batches(texts)
    first = list(itertools.islice(batches, FEW_BATCHES))
    if processes is None and len(first) < FEW_BATCHES:
        processes = 1
    elif processes is None:
        affinity = getattr(os, "sched_getaffinity", None)
        processes = len(affinity(0)) if affinity else os.cpu_count() or 1
    batches = itertools.chain(first, batches)
    del first  # the texts are kept no longer than until they are counted
    total: Counter[str] = Counter()
    if processes == 1:
        for text in itertools.chain.from_iterable(batches):
            total.update(split_words(text, pattern))
    else:
        for counts in _counts_of_batches(batches, pattern, processes):
            total.update(counts)
    return total


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= PROCESS_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _counts_of_batches(
    batches: Iterable[list[str]], pattern: str, processes: int
) -> Iterator[dict[str, int]]:
    """The counts of each batch, in order. A batch is read when one before it is done, so that
    memory does not grow with the text."""
    with ThreadPoolExecutor(processes) as pool:
        pending: deque[Future[dict[str, int]]] = deque()
        for batch in batches:
            pending.append(pool.submit(_count_in_a_process, batch, pattern))
            if len(pending) > processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _count_in_a_process(batch: list[str], pattern: str) -> dict[str, int]:
    ended = subprocess.run(
        [sys.executable, "-P", __file__, pattern],
        input=pickle.dumps(batch),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # an interrupt from the terminal is for the caller alone
    )
    if ended.returncode:
        raise RuntimeError(
            f"a process that counts words ended with status {ended.returncode}: try processes=1."
        )
    return pickle.loads(ended.stdout)  # type: ignore[no-any-return]


if __name__ == "__main__":
    counted: Counter[str] = Counter()
    for text in pickle.load(sys.stdin.buffer):
        counted.update(split_words(text, sys.argv[1]))
    pickle.dump(dict(counted), sys.stdout.buffer)
