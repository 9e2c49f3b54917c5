"""Training a byte-level BPE beside the tokenizers library's trainer: time, and the memory of it
with all its processes.

The two sides are processes that are asked in turn, from a file to a vocabulary. The texts are made
on the spot: English of the running Python's own help, the standard library's source, and that with
the sources of what is installed. Both sides part text by GPT-2's pattern; merges differ where pairs
are as frequent, and are not compared.
"""

import os
import statistics
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import regex
from pairing import (
    Neighbours,
    alternate,
    column,
    paired_ratio,
    print_table,
    python_worker,
    ratio_text,
    save,
    verdict,
)
from tokens_baseline import END, WORDS

ALLOWED, TIMES = 200e6, 10  # bytes, and times the bytes of the distinct words
SAMPLE_SECONDS = 0.003
SAMPLES = 7


def english() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield "".join(topics.values())


def sources(*folders: str) -> Iterator[str]:
    """The Python files of each folder, in order, without what is installed inside it."""
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.py")):
            if "site-packages" not in path.relative_to(folder).parts:
                yield path.read_bytes().decode(errors="ignore")


class Case(NamedTuple):
    """A text and its size in bytes, the entries learned of it, and what is asked: seconds, or a
    ratio of the baseline's time."""

    documents: Iterator[str]
    size: int
    entries: int
    asked: str


def cases(smoke: bool) -> dict[str, Case]:
    stdlib, installed = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    if smoke:
        return {
            "English, 10 kB": Case(english(), 10_000, 300, ""),
            "stdlib, 20 kB": Case(sources(stdlib), 20_000, 300, ""),
        }
    return {
        "English, 130 kB": Case(english(), 130_000, 500, "0.5 s"),
        "stdlib, 5 MB": Case(sources(stdlib), 5_000_000, 8_000, "1.0x"),
        "stdlib and packages, 20 MB": Case(sources(stdlib, installed), 20_000_000, 32_000, "1.5x"),
    }


def make_texts(folder: Path, chosen: dict[str, Case]) -> dict[str, Path]:
    """A file of each case."""
    paths = {}
    for number, (name, case) in enumerate(chosen.items()):
        text = b""
        for document in case.documents:
            text += (END.encode() if text else b"") + document.encode()
            if len(text) >= case.size:
                break
        paths[name] = folder / f"{number}.txt"
        paths[name].write_bytes(text[: case.size].decode(errors="ignore").encode())
    return paths


def training(smoke: bool = False) -> None:
    """Prints the time of each case, ours and theirs, and the ratio."""
    results, rows = {}, []
    chosen, samples = cases(smoke), 2 if smoke else SAMPLES
    with tempfile.TemporaryDirectory(prefix="jaxformer-tokens-") as folder:
        paths = make_texts(Path(folder), chosen)
        sides = [
            python_worker(side, "tokens_baseline.py", side) for side in ("jaxformer", "tokenizers")
        ]
        with sides[0], sides[1]:
            neighbours = Neighbours(sides)
            for case, (_, _, entries, asked) in chosen.items():
                answers = alternate(sides, f"train {paths[case]} {entries}", samples, warmups=1)
                ours, baseline = (column(found, "seconds") for found in answers)
                ratio = paired_ratio(baseline, ours)
                results[case] = {
                    "seconds": [ours, baseline],
                    "entries": [found[0]["entries"] for found in answers],
                    "ratio": ratio,
                }
                medians = [f"{statistics.median(seconds):.2f} s" for seconds in (ours, baseline)]
                rows.append([case, f"{entries:,}", *medians, ratio_text(ratio), asked])
            share, versions = neighbours.share(), sides[1].about["versions"]
    print_table(
        ["text", "entries", "jaxformer", "tokenizers", "our time over theirs", "at most"], rows
    )
    print(
        f"{os.cpu_count()} cores, {', '.join(f'{k} {v}' for k, v in versions.items())}."
        f" {verdict(share)}"
    )
    save("tokens_training", {"versions": versions, "cases": results, "neighbours": share}, smoke)


def memory(smoke: bool = False) -> None:
    """Prints the largest resident memory of each case, ours with its counting processes and theirs,
    and our bound."""
    results, rows = {}, []
    chosen = cases(smoke)
    with tempfile.TemporaryDirectory(prefix="jaxformer-tokens-") as folder:
        for case, path in make_texts(Path(folder), chosen).items():
            distinct = {
                word
                for part in path.read_text("utf-8").split(END)
                for word in regex.findall(WORDS, part)
            }
            words = sum(len(word.encode()) for word in distinct)
            peaks = [
                peak(side, f"train {path} {chosen[case].entries}")
                for side in ("jaxformer", "tokenizers")
            ]
            bound = TIMES * words + ALLOWED
            results[case] = {"distinct_words_bytes": words, "peak_bytes": peaks, "bound": bound}
            sizes = [f"{size / 1e6:,.1f} MB" for size in (words, *peaks, bound)]
            rows.append([case, *sizes, "" if peaks[0] <= bound else "OVER"])
    print_table(["text", "distinct words", "jaxformer", "tokenizers", "bound", ""], rows)
    save("tokens_memory", {"cases": results}, smoke)


def peak(side: str, command: str) -> int:
    """The largest sum of what a new worker and its children have in memory, while it answers."""
    with python_worker(side, "tokens_baseline.py", side) as worker:
        done, most = threading.Event(), [0]

        def watch() -> None:
            while not done.wait(SAMPLE_SECONDS):
                most[0] = max(most[0], resident(worker.process.pid))

        thread = threading.Thread(target=watch)
        thread.start()
        worker.ask(command)
        done.set()
        thread.join()
    return most[0]


def resident(process: int) -> int:
    """Bytes of a process and its children; none of one that has ended meanwhile (Linux)."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
        tasks = [*Path(f"/proc/{process}/task").iterdir()]  # each thread has children of its own
        texts = [(task / "children").read_text(encoding="ascii") for task in tasks]
    except (OSError, IndexError):
        return 0
    children = " ".join(texts).split()
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)
