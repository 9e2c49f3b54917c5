"""One side of a comparison of tokenizers: a worker. `python benchmarks/tokens_peer.py jaxformer|tokenizers`

Each line read is a command (`train FILE ENTRIES`, `quit`), each line written a JSON object.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
END = "<|endoftext|>"


def ours() -> Callable[[str, int], int]:
    sys.path.insert(0, str(HERE.parent))
    from jaxformer.tokenizer import train_bpe

    return lambda path, size: len(train_bpe(path, size, [END])[0])


def theirs() -> Callable[[str, int], int]:
    """The tokenizers library's trainer on the same documents, parted by the same pattern."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def train(path: str, size: int) -> int:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        documents = Path(path).read_bytes().decode().split(END)
        backend.train_from_iterator(documents, trainer, len(documents))
        return backend.get_vocab_size()

    return train


SIDES = {"jaxformer": ours, "tokenizers": theirs}


def answer(train: Callable[[str, int], int], words: Sequence[str]) -> dict[str, float]:
    begin = time.perf_counter()
    entries = train(words[1], int(words[2]))
    return {"seconds": time.perf_counter() - begin, "entries": entries}


def main() -> None:
    train = SIDES[sys.argv[1]]()
    versions = {} if sys.argv[1] == "jaxformer" else {sys.argv[1]: version(sys.argv[1])}
    print(json.dumps({"versions": versions}), flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        print(json.dumps(answer(train, line.split())), flush=True)


if __name__ == "__main__":
    main()
