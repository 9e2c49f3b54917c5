"""Training a byte-level BPE beside the tokenizers library's trainer: time, and the memory of it with all its processes.

The two sides are processes that are asked in turn, from a file to a vocabulary. The texts are made on the spot: English of
the running Python's own help, the standard library's source, and that with the sources of what is installed. Both sides part
text by GPT-2's pattern; merges differ where pairs are as frequent, and are not compared.
"""

import os
import statistics
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

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
from tokens_peer import END, WORDS

# Of each text the bytes, the entries, and what is asked: seconds, or a ratio of the time to the peer's.
CASES = {
    "English, 130 kB": (130_000, 500, "0.5 s"),
    "stdlib, 5 MB": (5_000_000, 8_000, "1.0x"),
    "stdlib and packages, 20 MB": (20_000_000, 32_000, "1.5x"),
}
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


def make_texts(folder: Path) -> dict[str, Path]:
    """A file of each case."""
    stdlib, installed = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    made = dict(zip(CASES, (english(), sources(stdlib), sources(stdlib, installed)), strict=True))
    paths = {}
    for number, (case, documents) in enumerate(made.items()):
        size, text = CASES[case][0], b""
        for document in documents:
            text += (END.encode() if text else b"") + document.encode()
            if len(text) >= size:
                break
        paths[case] = folder / f"{number}.txt"
        paths[case].write_bytes(text[:size].decode(errors="ignore").encode())
    return paths


def training() -> None:
    """Prints the time of each case, ours and theirs, and the ratio."""
    results, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="jaxformer-tokens-") as folder:
        paths = make_texts(Path(folder))
        sides = [python_worker(side, "tokens_peer.py", side) for side in ("jaxformer", "tokenizers")]
        with sides[0], sides[1]:
            neighbours = Neighbours(sides)
            for case, (_, entries, asked) in CASES.items():
                answers = alternate(sides, f"train {paths[case]} {entries}", SAMPLES, warmups=1)
                ours, theirs = (column(found, "seconds") for found in answers)
                ratio = paired_ratio(theirs, ours)
                results[case] = {
                    "seconds": [ours, theirs],
                    "entries": [found[0]["entries"] for found in answers],
                    "ratio": ratio,
                }
                medians = [f"{statistics.median(seconds):.2f} s" for seconds in (ours, theirs)]
                rows.append([case, f"{entries:,}", *medians, ratio_text(ratio), asked])
            share, versions = neighbours.share(), sides[1].about["versions"]
    print_table(["text", "entries", "jaxformer", "tokenizers", "our time over theirs", "at most"], rows)
    print(f"{os.cpu_count()} cores, {', '.join(f'{k} {v}' for k, v in versions.items())}. {verdict(share)}")
    save("tokens_training", {"versions": versions, "cases": results, "neighbours": share})


def memory() -> None:
    """Prints the largest resident memory of each case, ours with its counting processes and theirs, and our bound."""
    results, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="jaxformer-tokens-") as folder:
        for case, path in make_texts(Path(folder)).items():
            distinct = {word for part in path.read_text("utf-8").split(END) for word in regex.findall(WORDS, part)}
            words = sum(len(word.encode()) for word in distinct)
            peaks = [peak(side, f"train {path} {CASES[case][1]}") for side in ("jaxformer", "tokenizers")]
            bound = TIMES * words + ALLOWED
            results[case] = {"distinct_words_bytes": words, "peak_bytes": peaks, "bound": bound}
            sizes = [f"{size / 1e6:,.1f} MB" for size in (words, *peaks, bound)]
            rows.append([case, *sizes, "" if peaks[0] <= bound else "OVER"])
    print_table(["text", "distinct words", "jaxformer", "tokenizers", "bound", ""], rows)
    save("tokens_memory", {"cases": results})


def peak(side: str, command: str) -> int:
    """The largest sum of what a new worker and its children have in memory, while it answers."""
    with python_worker(side, "tokens_peer.py", side) as worker:
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
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


if __name__ == "__main__":
    training()
    memory()
