"""One side of a comparison of tokenizers: a worker. `python benchmarks/tokens_baseline.py SIDE`, a
name of `SIDES`

Its commands are `train FILE ENTRIES`, `encode TOKENIZER FILE` and `iterate TOKENIZER FILE`. A
TOKENIZER is a tokenizer.json of a byte-level BPE whose merges are in the order of their ids.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from serving import serve

HERE = Path(__file__).parent
END = "<|endoftext|>"
WORDS = (  # GPT-2's, which all sides part text by
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)

Encode = Callable[[Sequence[str]], Iterable[Sequence[int]]]


class Ours:
    """This package."""

    def __init__(self) -> None:
        sys.path.insert(0, str(HERE.parent))

    def train(self, path: str, size: int) -> int:
        from jaxformer.tokenizer import train_bpe

        return len(train_bpe(path, size, [END])[0])

    def load(self, path: str) -> Encode:
        from jaxformer.tokenizer import Tokenizer

        return Tokenizer.load(path).encode_batch


class Tokenizers:
    """The tokenizers library."""

    def train(self, path: str, size: int) -> int:
        """Its trainer on the same documents, parted by the same pattern."""
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        documents = Path(path).read_bytes().decode().split(END)
        backend.train_from_iterator(documents, trainer, len(documents))
        return backend.get_vocab_size()

    def load(self, path: str) -> Encode:
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(path)
        return lambda texts: [
            found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]


class Tiktoken:
    """tiktoken, on as many threads as there are cores."""

    def load(self, path: str) -> Encode:
        import tiktoken

        sys.path.insert(0, str(HERE.parent))
        from jaxformer.tokenizer.pieces import BYTES

        model = json.loads(Path(path).read_text(encoding="utf-8"))["model"]
        tokens = [*BYTES, *("".join(pair) for pair in model["merges"])]
        ranks = {
            bytes(BYTES[character] for character in token): model["vocab"][token]
            for token in tokens
        }
        core = tiktoken.Encoding(
            "baseline", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={"<unused>": 1 << 20}
        )
        return functools.partial(core.encode_ordinary_batch, num_threads=os.cpu_count() or 1)


SIDES: dict[str, Callable[[], Any]] = {
    "jaxformer": Ours,
    "tokenizers": Tokenizers,
    "tiktoken": Tiktoken,
}


def train(side: Any, path: str, size: str) -> dict[str, Any]:
    begin = time.perf_counter()
    entries = side.train(path, int(size))
    return {"seconds": time.perf_counter() - begin, "entries": entries}


def encode(side: Any, tokenizer: str, path: str) -> dict[str, Any]:
    """Seconds for the documents of a file, and a digest of their ids."""
    load = _loaded(side, tokenizer)
    texts = Path(path).read_bytes().decode().split(END)
    begin = time.perf_counter()
    rows = load(texts)
    seconds = time.perf_counter() - begin
    ids = np.fromiter(itertools.chain.from_iterable(rows), np.uint32)
    return {
        "seconds": seconds,
        "tokens": len(ids),
        "digest": hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest(),
    }


def iterate(side: Any, tokenizer: str, path: str) -> dict[str, Any]:
    """Seconds for a file's stream of ids, and the bytes of memory that it took above those before
    (Linux)."""
    from jaxformer.tokenizer import Tokenizer

    loaded = Tokenizer.load(tokenizer)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _memory("VmRSS")
    begin = time.perf_counter()
    with open(path, encoding="utf-8", newline="") as file:
        tokens = sum(1 for _ in loaded.encode_iterable(file))
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": tokens,
        "above": _memory("VmHWM") - before,
    }


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(found[1]) if found else 0


@functools.cache
def _loaded(side: Any, tokenizer: str) -> Encode:
    found: Encode = side.load(tokenizer)
    return found


COMMANDS = {"train": train, "encode": encode, "iterate": iterate}


def main() -> None:
    name = sys.argv[1]
    side = SIDES[name]()
    versions = {} if name.startswith("jaxformer") else {name: version(name)}
    commands = {name: functools.partial(command, side) for name, command in COMMANDS.items()}
    serve({"versions": versions}, commands)


if __name__ == "__main__":
    main()
