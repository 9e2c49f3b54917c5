"""Splits text into the words within which BPE merges, and counts them, on all cores for large
texts.

Counting holds the GIL, and the workers of `concurrent.futures.ProcessPoolExecutor` either fork,
which is unsafe with the threads of JAX, or import the caller's script again, which runs a script
without a main guard twice. Therefore this file is also the program of a worker. The worker imports
neither NumPy nor the rest of the package, and takes 10 MB and 50 ms to start.
"""

import contextlib
import functools
import itertools
import os
import pickle
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, TypeVar

Sized = TypeVar("Sized")

BLOCK_CHARACTERS = 1 << 19  # characters that are read and counted at a time
PART_CHARACTERS = 1 << 16  # characters of a part, where the text can be cut
FEW_BLOCKS = 24  # for fewer blocks, workers would not save time


class WordPattern(NamedTuple):
    """Two regular expressions of the `regex` module: one matches a word, the other the positions
    where a text can be cut without changing a word."""

    words: str
    cuts: str


# A run of letters, or of digits, ends whatever follows it.
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

# The classes of a pattern in ASCII text, for which `re` of the standard library is used: it is
# twice as fast as `regex`.
ASCII = {r"\p{L}\p{N}]": "A-Za-z0-9]", r"\p{L}": "[A-Za-z]", r"\p{N}": "[0-9]"}


def split_words(text: str, pattern: str) -> list[str]:
    """Return the words of a text; joined, they are the text."""
    return _finder(pattern, text.isascii())(text)


@functools.cache
def _finder(pattern: str, ascii_only: bool) -> Callable[[str], list[str]]:
    words = WORD_PATTERNS[pattern].words
    if not ascii_only:
        import regex  # its start takes 25 ms, and ASCII text does without

        return regex.compile(words).findall  # type: ignore[no-any-return]
    for classes, ascii_classes in ASCII.items():
        words = words.replace(classes, ascii_classes)
    return re.compile(words, re.ASCII).findall


class Cuts(NamedTuple):
    """The positions where a text may be cut, as a regular expression; empty where the text must not
    be cut. `names` are names of tokens, which are neither cut nor separated from the text next to
    them."""

    pattern: str
    names: tuple[str, ...] = ()

    def blocks(self, chunks: Iterable[str]) -> Iterator[str]:
        """Yield the parts of a text that comes in chunks of any size, in the memory of a few
        parts."""
        pending = ""
        enough = 2 * PART_CHARACTERS
        for chunk in chunks:
            pending += chunk
            if len(pending) >= enough:
                *complete, pending = self.parts(pending)
                yield from complete
                # Text that cannot be cut is searched again only when it has doubled, so that the
                # time stays linear in its length.
                enough = max(2 * PART_CHARACTERS, 2 * len(pending))
        yield from self.parts(pending)

    def parts(self, text: str) -> Iterator[str]:
        """Yield the parts of a text, of about PART_CHARACTERS characters, and more only where it
        cannot be cut."""
        start = 0
        reach = PART_CHARACTERS
        while self.pattern and start + 2 * reach < len(text):
            if cut := self._last(text, start + 1, start + reach):
                yield text[start:cut]
                start = cut
                reach = PART_CHARACTERS
            else:
                reach *= 2
        yield text[start:]

    def _last(self, text: str, start: int, stop: int) -> int | None:
        """Return the last position to cut between `start` and `stop`; None where there is none."""
        import regex  # its start takes 25 ms, and short texts are not cut

        # (?r) searches from the end. A look-behind sees what is before `pos`; a look-ahead does not
        # see what is after `endpos`.
        while match := regex.search(f"(?r){self.pattern}", text, pos=start, endpos=stop):
            stop = match.start()
            if not self._is_at_name(text, stop):
                return stop
        return None

    def _is_at_name(self, text: str, cut: int) -> bool:
        """Return whether a position is in or next to a name, or may be once more text follows."""
        for name in self.names:
            for begin in range(max(0, cut - len(name)), cut + 1):
                if name.startswith(text[begin : begin + len(name)]):
                    return True
        return False


def segments(blocks: Iterable[str], special_tokens: Sequence[str], pattern: str) -> Iterator[str]:
    """Yield the text between special tokens, from a text that comes in blocks, in parts that change
    no word. Of special tokens that begin at the same character the longest is taken."""
    parts = Cuts(WORD_PATTERNS[pattern].cuts, tuple(special_tokens)).blocks(blocks)
    if not special_tokens:
        yield from parts
        return
    longest_first = sorted(special_tokens, key=len, reverse=True)
    specials = re.compile("|".join(map(re.escape, longest_first)))
    for part in parts:
        yield from specials.split(part)


def count_words(texts: Iterable[str], pattern: str, processes: int | None = None) -> Counter[str]:
    """Return how often each word occurs in the texts. None for `processes` takes one per core where
    that is faster."""
    blocks = in_batches(texts, len, BLOCK_CHARACTERS)
    first = list(itertools.islice(blocks, FEW_BLOCKS))
    if processes is None and len(first) < FEW_BLOCKS:
        processes = 1
    elif processes is None:
        affinity = getattr(os, "sched_getaffinity", None)
        processes = len(affinity(0)) if affinity else os.cpu_count() or 1
    blocks = itertools.chain(first, blocks)
    del first  # so that the texts are freed once they are counted
    counts = map(functools.partial(_count, pattern=pattern), blocks)
    total: Counter[str] = Counter()
    for counted in counts if processes == 1 else _counts_of_workers(blocks, pattern, processes):
        total.update(counted)
    return total


def in_batches(
    items: Iterable[Sized], size: Callable[[Sized], int], enough: int
) -> Iterator[list[Sized]]:
    """Yield the items in lists, each of at least `enough` in size, but for the last one."""
    batch = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= enough:
            yield batch
            batch = []
            total = 0
    if batch:
        yield batch


def _count(block: list[str], pattern: str) -> Counter[str]:
    counted: Counter[str] = Counter()
    for text in block:
        counted.update(split_words(text, pattern))
    return counted


def _counts_of_workers(
    blocks: Iterable[list[str]], pattern: str, processes: int
) -> Iterator[dict[str, int]]:
    """Yield the counts of each block, in order. A worker gets a block when it has finished the last
    one, so that memory does not grow with the text."""
    # With -P the folder of this file is not on the path of the worker, where its modules would hide
    # others of the same names.
    command = [sys.executable, "-P", __file__, pattern]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In a session of their own, the workers get no interrupt from the terminal.
    start = functools.partial(
        Popen, command, stdin=PIPE, stdout=PIPE, env=env, start_new_session=True
    )
    workers: deque[Any] = deque()  # the one that has worked longest first
    try:
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if len(workers) < processes:
                    workers.append(stack.enter_context(start()))
                else:
                    workers.rotate(-1)
                    yield pickle.load(workers[-1].stdout)
                pickle.dump(block, workers[-1].stdin)
                workers[-1].stdin.flush()
            for worker in workers:
                yield pickle.load(worker.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        statuses = [worker.returncode for worker in workers if worker.returncode]
        if not statuses:  # the error is one of reading the texts
            raise
        raise RuntimeError(
            f"a process that counts words ended with status {statuses[0]}: try processes=1."
        ) from None


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            counts = _count(pickle.load(sys.stdin.buffer), sys.argv[1])
            pickle.dump(dict(counts), sys.stdout.buffer)
            sys.stdout.buffer.flush()
