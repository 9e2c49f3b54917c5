"""Encoding beside the tokenizers library and tiktoken, all cores each; and the memory of a stream
of ids of a large file.

All sides have the same byte-level BPE, trained here on Python source, and must give the same ids of
each text.
"""

import os
import statistics
import tempfile
from pathlib import Path

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
from tokens_baseline import END
from tokens_training import cases, make_texts

SIDES = ("jaxformer", "tokenizers", "tiktoken")
ENTRIES, SMOKE_ENTRIES = 32_000, 300
SAMPLES = 7
STREAM_BYTES, SMOKE_BYTES, ALLOWED = 1_000_000_000, 100_000, 100e6


def make_tokenizer(folder: Path, text: Path, entries: int) -> Path:
    from jaxformer.tokenizer import Tokenizer, train_bpe

    path = folder / "tokenizer.json"
    Tokenizer.from_bpe(*train_bpe(text, entries, [END]), [END]).save(path)
    return path


def encoding(smoke: bool = False) -> None:
    """Prints megabytes a second of each side, and ours over theirs. Raises where ids differ."""
    entries, samples = (SMOKE_ENTRIES, 2) if smoke else (ENTRIES, SAMPLES)
    with tempfile.TemporaryDirectory(prefix="jaxformer-tokens-") as name:
        texts = make_texts(Path(name), cases(smoke))
        tokenizer = make_tokenizer(Path(name), [*texts.values()][-1], entries)
        results, rows = {}, []
        sides = [python_worker(side, "tokens_baseline.py", side) for side in SIDES]
        try:
            neighbours = Neighbours(sides)
            for case, path in texts.items():
                answers = alternate(sides, f"encode {tokenizer} {path}", samples, warmups=1)
                if len({answer["digest"] for found in answers for answer in found}) > 1:
                    raise SystemExit(f"{case}: the ids differ")
                seconds = [column(found, "seconds") for found in answers]
                ratio = paired_ratio(seconds[0], seconds[1])
                results[case] = {
                    "bytes": path.stat().st_size,
                    "seconds": dict(zip(SIDES, seconds, strict=True)),
                    "ratio": ratio,
                }
                rates = [
                    f"{path.stat().st_size / 1e6 / statistics.median(found):.1f} MB/s"
                    for found in seconds
                ]
                rows.append([case, *rates, ratio_text(ratio)])
            share = neighbours.share()
        finally:
            for side in sides:
                side.close()
    versions = {key: value for side in sides for key, value in side.about["versions"].items()}
    print_table(["text", *SIDES, "ours over tokenizers"], rows)
    print(
        f"{os.cpu_count()} cores, {', '.join(f'{k} {v}' for k, v in versions.items())}; equal ids."
        f" {verdict(share)}"
    )
    result = {"versions": versions, "entries": entries, "cases": results, "neighbours": share}
    save("tokens_encoding", result, smoke)


def iterable(smoke: bool = False) -> None:
    """Prints the memory that `encode_iterable` takes above what was there, over a file of 1 GB, of
    lines and of one line."""
    results, rows = {}, []
    entries, total = (SMOKE_ENTRIES, SMOKE_BYTES) if smoke else (ENTRIES, STREAM_BYTES)
    with tempfile.TemporaryDirectory(prefix="jaxformer-tokens-") as name:
        text = [*make_texts(Path(name), cases(smoke)).values()][1]
        tokenizer = make_tokenizer(Path(name), text, entries)
        raw = text.read_bytes().replace(END.encode(), b"\n")
        for case, block in (("lines", raw), ("one line", b" ".join(raw.split()) + b" ")):
            path = Path(name, "large.txt")
            with open(path, "wb") as file:
                for _ in range(-(-total // len(block))):
                    file.write(block)
            with python_worker("jaxformer", "tokens_baseline.py", "jaxformer") as worker:
                found = worker.ask(f"iterate {tokenizer} {path}")
            size = path.stat().st_size
            results[case] = {"bytes": size, **found}
            above = f"{found['above'] / 1e6:.1f} MB"
            rate = f"{size / 1e6 / found['seconds']:.1f} MB/s"
            rows.append([case, f"{size / 1e9:.2f} GB", above, f"{ALLOWED / 1e6:.0f} MB", rate])
    print_table(["file", "size", "memory above the base", "must stay under", "rate"], rows)
    save("tokens_iterable", {"cases": results}, smoke)
