"""The store: made once whatever interrupts it, reused while nothing changed, and read without its size being felt."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxformer.config import ConfigError, DataConfig, ModelConfig, RunConfig, TokenizerConfig
from jaxformer.data import TokenStore, corpus, gzip_bits_per_byte, open_or_build, prepare, store
from jaxformer.data.sources import Piece
from jaxformer.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()


def pieces_of(texts: list[str]) -> list[Piece]:
    return [Piece(text, str(index), True) for index, text in enumerate(texts)]


def run_of(folder: Path, text: str = "", **changes: object) -> RunConfig:
    path = folder / "corpus.txt"
    if text:
        path.write_text(text)
    data = DataConfig(train=str(path), cache_dir=str(folder / "cache"), sequence_length=16)
    return replace(RunConfig(data=data, tokenizer=TokenizerConfig(vocab_size=300)), **changes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="abé", min_size=1, max_size=30), min_size=1, max_size=12), st.integers(1, 40), st.data())
def test_the_store_is_the_documents_one_after_the_other(texts: list[str], shard: int, data: st.DataObject) -> None:
    import tempfile

    expected = [token for text in texts for token in (*text.encode(), BYTES.end_token)]
    begins = np.cumsum([len(text.encode()) + 1 for text in texts])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SHARD_CHARACTERS", shard)
        patch.setattr(store, "BATCH_CHARACTERS", 16)
        open_or_build(Path(folder), lambda: pieces_of(texts), BYTES)
        made = TokenStore.open(Path(folder))
        assert made is not None
        assert (made.tokens, made.documents, made.bytes) == (len(expected), len(texts), len("".join(texts).encode()))
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(start, len(expected) + 5))
        assert made.read(start, stop).tolist() == expected[start:stop] and made.read(start, stop).dtype == np.int32
        assert made.boundaries(start, stop).tolist() == [place for place in begins if start < place < stop]


def test_a_document_in_pieces_ends_once(tmp_path: Path) -> None:
    parts = [Piece("ab", "0", False), Piece("cd", "0", True), Piece("e", "1", True)]
    made = open_or_build(tmp_path, lambda: parts, BYTES)
    assert made.read(0, 9).tolist() == [97, 98, 99, 100, 256, 101, 256] and made.documents == 2


@pytest.mark.parametrize(("size", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_ids_take_two_bytes_as_long_as_they_fit(
    size: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "vocab_size", size)
    monkeypatch.setattr(tokenizer, "end_token", size - 1)
    made = open_or_build(tmp_path, lambda: pieces_of(["abc"]), tokenizer)
    assert made.read(3, 4).tolist() == [size - 1]
    assert (tmp_path / "00000.tokens").stat().st_size == 4 * width


def test_interrupted_work_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_CHARACTERS", 100)
    texts = [f"{index:050d}" for index in range(20)]

    def torn() -> Iterator[Piece]:
        yield from pieces_of(texts)[:11]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_or_build(tmp_path, torn, BYTES)
    assert TokenStore.open(tmp_path) is None and not list(tmp_path.glob("*.tmp"))
    done = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert len(done) == 15
    encoded: list[str] = []
    encode_batch = BYTES.encode_batch
    monkeypatch.setattr(BYTES, "encode_batch", lambda batch: encoded.extend(batch) or encode_batch(batch))
    made = open_or_build(tmp_path, lambda: pieces_of(texts), BYTES)
    assert encoded == texts[10:]
    assert done.items() <= {path.name: path.stat().st_ino for path in tmp_path.iterdir()}.items()
    assert BYTES.decode(made.read(0, made.tokens)) == "".join(texts)


def test_a_damaged_store_is_made_whole_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_CHARACTERS", 10)
    texts = ["x" * 9, "y" * 9, "z" * 9]
    whole = open_or_build(tmp_path, lambda: pieces_of(texts), BYTES).read(0, 30)
    os.truncate(tmp_path / "00001.tokens", 6)
    (tmp_path / "00000.ends").unlink()
    assert TokenStore.open(tmp_path) is None
    assert (open_or_build(tmp_path, lambda: pieces_of(texts), BYTES).read(0, 30) == whole).all()


PROGRAM = """
import sys, time
from pathlib import Path
from jaxformer.data import store
from jaxformer.data.sources import Piece
from jaxformer.tokenizer import byte_tokenizer
store.SHARD_CHARACTERS = 100
write = store._write_shard
def slow(*args):
    shard = write(*args)
    time.sleep(0.03)
    print(args[1], flush=True)
    return shard
store._write_shard = slow
made = store.open_or_build(Path(sys.argv[1]), lambda: [Piece(f"{i:050d}", str(i), True) for i in range(40)], byte_tokenizer())
print("tokens", made.tokens, int(made.read(0, made.tokens).sum()))
"""


def _process(folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_make_one_store_together_even_if_one_is_killed(tmp_path: Path) -> None:
    processes = [_process(tmp_path / "pair") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] == f"tokens {40 * 51} {40 * (50 * 48 + 256) + 4 * 45 + 10 * (0 + 1 + 2 + 3)}"
    if sys.platform != "win32":
        assert sorted(map(len, outputs)) == [1, 21]  # one did all the work, the other waited

    victim = _process(tmp_path / "killed")
    heir = _process(tmp_path / "killed")
    assert victim.stdout and heir.stdout
    time.sleep(0.05)
    first = victim if tmp_path.joinpath("killed").exists() and _has_line(victim) else heir
    other = heir if first is victim else victim
    first.send_signal(signal.SIGKILL)
    first.wait()
    lines = other.communicate(timeout=60)[0].splitlines()
    assert lines[-1] == outputs[0][-1]


def _has_line(process: "subprocess.Popen[str]") -> bool:
    import select

    return bool(select.select([process.stdout], [], [], 5)[0])
