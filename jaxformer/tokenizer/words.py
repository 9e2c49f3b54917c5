"""Parts text into the words within which BPE merges, and counts them, on all cores where there is
much text.

This file is also the program of a counting process, which so imports neither NumPy nor the rest of
the package.
"""

import contextlib
import functools
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

BLOCK_CHARACTERS = 1 << 19  # characters that are parted at a time
FEW = 24  # blocks that one process has counted before others have started


class WordPattern(NamedTuple):
    """How text becomes words, as the `regex` module reads it, and where text can be cut without
    changing a word."""

    words: str
    cuts: str


# A run of letters or of digits ends with no look at what follows it.
RUNS = r"|(?<=\p{L})(?=\P{L})|(?<=\p{N})(?=\P{N})"

WORD_PATTERNS = {
    "gpt2": WordPattern(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?<=\S)(?=\s)" + RUNS,
    ),
    "llama3": WordPattern(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?<=\S)(?=[^\S\r\n])|(?<=[\r\n])(?=\S)" + RUNS,
    ),
}

# What the classes of a pattern are in ASCII, where the standard library's `re`, twice as fast, can
# stand for `regex`.
ASCII = {r"\p{L}\p{N}]": "A-Za-z0-9]", r"\p{L}": "[A-Za-z]", r"\p{N}": "[0-9]"}

Block = list[str]  # texts that are counted together


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
    """What stands between special tokens in a text that comes in blocks, itself cut where it is
    long and no word changes.

    Of special tokens that begin at the same character the longest is taken.
    """
    specials = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    longest = max(map(len, special_tokens), default=0)
    held = ""
    for block in itertools.chain(filter(None, blocks), ("",)):
        held += block
        known = (
            len(held) - longest if block else len(held)
        )  # a special token that begins by here is here as a whole
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
    """The last place before `stop` where text can be cut; `start` where there is none, or not much
    to cut."""
    if stop - start < BLOCK_CHARACTERS // 2:
        return start
    import regex

    found = regex.search(f"(?r){WORD_PATTERNS[pattern].cuts}", text, pos=start, endpos=stop)
    return found.start() if found else start


def count_words(texts: Iterable[str], pattern: str, processes: int | None = None) -> Counter[str]:
    """How often each word is in the texts, counted by so many processes; None takes all cores where
    that is sooner."""
    blocks = _blocks(texts)
    first = list(itertools.islice(blocks, FEW))
    if processes is None:
        processes = _cores() if len(first) == FEW else 1
    blocks = itertools.chain(first, blocks)
    del first
    total: Counter[str] = Counter()
    if processes == 1:
        for words in (split_words(text, pattern) for block in blocks for text in block):
            total.update(words)
    else:
        for counted in _counted_beside(blocks, pattern, processes):
            total.update(counted)
    return total


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _blocks(texts: Iterable[str]) -> Iterator[Block]:
    block, size = [], 0
    for text in filter(None, texts):
        block.append(text)
        size += len(text)
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _counted_beside(
    blocks: Iterable[Block], pattern: str, processes: int
) -> Iterator[dict[str, int]]:
    """The counts of each block, in order; blocks are dealt to `processes` processes in turn."""
    with contextlib.ExitStack() as stack:
        busy: deque[_Process] = deque()
        for block in blocks:
            if len(busy) < processes:
                process, counted = stack.enter_context(_Process(pattern)), {}
            else:
                process = busy.popleft()
                counted = process.answer()
            process.ask(block)
            busy.append(process)
            yield counted
        while busy:
            yield busy.popleft().answer()


class _Process(subprocess.Popen[bytes]):
    """A counting process: this file as a program. With multiprocessing each would run the caller's
    script again."""

    def __init__(self, pattern: str) -> None:
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-P", __file__, pattern]
        super().__init__(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | paths
        )

    def ask(self, block: Block) -> None:
        assert self.stdin is not None
        with self._alive():
            pickle.dump(block, self.stdin)
            self.stdin.flush()

    def answer(self) -> dict[str, int]:
        assert self.stdout is not None
        with self._alive():
            return pickle.load(self.stdout)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.communicate()
            raise RuntimeError(
                f"a process that counts words ended (status {self.wait()}): try processes=1."
            ) from None


def _serve(pattern: str) -> None:
    """Answers each block with its counts, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's business, who then closes the pipes
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            counted: Counter[str] = Counter()
            for text in pickle.load(sys.stdin.buffer):
                counted.update(split_words(text, pattern))
            pickle.dump(dict(counted), sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
