"""The store: made once whatever interrupts it, reused while nothing changed, read without its size
being felt, and refused where it was altered."""

import gzip
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Corpus, TokenStore, corpus, open_or_build
from jaxformer.data import store as store_files
from jaxformer.data.documents import Piece
from jaxformer.data.rows import CausalRows, Rows
from jaxformer.data.store import Shard
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer, byte_tokenizer, train_bpe_tokenizer

BYTES = byte_tokenizer()


def pieces_of(texts: list[str]) -> list[Piece]:
    return [Piece(text, str(index), True) for index, text in enumerate(texts)]


def run_of(folder: Path, text: str = "", **changes: Any) -> RunConfig:
    path = folder / "corpus.txt"
    if text:
        path.write_text(text)
    data = DataConfig(train=str(path), cache_dir=str(folder / "cache"), sequence_length=16)
    return replace(RunConfig(data=data, tokenizer=TokenizerConfig(vocab_size=300)), **changes)


@pytest.mark.parametrize(("size", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_ids_take_two_bytes_as_long_as_they_fit(
    size: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "vocab_size", size)
    monkeypatch.setattr(type(tokenizer), "end_token", size - 1)
    made = open_or_build(tmp_path, lambda: pieces_of(["abc"]), tokenizer)
    assert made.read(3, 4).tolist() == [size - 1]
    assert (tmp_path / "00000.tokens").stat().st_size == 4 * width


def test_interrupted_work_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SHARD_CHARACTERS", 100)
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
    encode_arrays = BYTES.encode_arrays

    def recorded(batch: list[str]) -> list[np.ndarray]:
        encoded.extend(batch)
        return encode_arrays(batch)

    monkeypatch.setattr(BYTES, "encode_arrays", recorded)
    made = open_or_build(tmp_path, lambda: pieces_of(texts), BYTES)
    assert encoded == texts[10:]
    assert done.items() <= {path.name: path.stat().st_ino for path in tmp_path.iterdir()}.items()
    assert BYTES.decode(made.read(0, made.tokens)) == "".join(texts)


def test_what_is_missing_is_made_again_and_what_was_altered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SHARD_CHARACTERS", 10)
    texts = ["x" * 9, "y" * 9, "z" * 9]
    whole = open_or_build(tmp_path, lambda: pieces_of(texts), BYTES).read(0, 30)
    for name in ("00000.documents", "00002.tokens", "00001.json"):
        (tmp_path / name).unlink()
    assert name == "00001.json" and TokenStore.open(tmp_path) is None
    assert (open_or_build(tmp_path, lambda: pieces_of(texts), BYTES).read(0, 30) == whole).all()
    (tmp_path / "00001.tokens").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"00001\.tokens was altered .* 3 bytes of 20.* remove"):
        open_or_build(tmp_path, lambda: pieces_of(texts), BYTES)
    (tmp_path / "00001.tokens").unlink()
    assert (open_or_build(tmp_path, lambda: pieces_of(texts), BYTES).read(0, 30) == whole).all()


@settings(max_examples=25)
@given(
    st.lists(st.text(alphabet="abé", max_size=12), min_size=1, max_size=20),
    st.integers(1, 30),
    st.data(),
)
def test_the_sides_of_a_store_are_its_documents_each_on_one_side(
    texts: list[str], shard: int, draw: st.DataObject
) -> None:
    places = draw.draw(st.lists(st.floats(0, 0.999), min_size=len(texts), max_size=len(texts)))
    fraction = draw.draw(st.floats(0.01, 0.99))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_files, "SHARD_CHARACTERS", shard)
        patch.setattr(store_files, "BATCH_CHARACTERS", 16)
        patch.setattr(store_files, "hash_fraction", lambda name: places[int(name)])
        pieces = [
            Piece(part, str(n), end)
            for n, text in enumerate(texts)
            for part, end in ((text[:3], False), (text[3:], True))
        ]
        half = len(pieces) // 4 * 2
        units = [
            open_or_build(Path(folder, name), lambda part=part: part, BYTES)
            for name, part in (("a", pieces[:half]), ("b", pieces[half:]))
        ]
        whole = TokenStore.joined(units)
        for held_out in (True, False):
            side = whole.held_out(fraction, inverse=not held_out)
            kept = [
                text
                for text, place in zip(texts, places, strict=True)
                if (place < fraction) is held_out
            ]
            expected = [token for text in kept for token in (*text.encode(), BYTES.end_token)]
            assert side.read(0, side.tokens).tolist() == expected and side.tokens == len(expected)
            assert (side.documents, side.bytes) == (len(kept), len("".join(kept).encode()))
            ends = np.cumsum([len(text.encode()) + 1 for text in kept], dtype=np.int64).tolist()
            assert side.ends().tolist() == ends
            start = draw.draw(st.integers(0, len(expected)))
            stop = draw.draw(st.integers(start, len(expected)))
            assert side.read(start, stop).tolist() == expected[start:stop]
            assert side.boundaries(start, stop).tolist() == [
                place for place in ends if start < place < stop
            ]
        expected = [token for text in texts for token in (*text.encode(), BYTES.end_token)]
        assert whole.read(0, len(expected) + 5).tolist() == expected
        assert whole.read(0, 1).dtype == np.int32
        before, after = (whole.cut(fraction, after) for after in (False, True))
        both = [*before.read(0, before.tokens), *after.read(0, after.tokens)]
        assert both == whole.read(0, whole.tokens).tolist()
        assert before.fingerprint != after.fingerprint
        begins = [0, *whole.ends().tolist()]
        assert [*before.ends(), *(after.ends() + before.tokens)] == sorted(
            {*begins[1:], before.tokens} - {0}
        )


PROGRAM = """
import sys, time
from pathlib import Path
from jaxformer.data import store
from jaxformer.data.rows import CausalRows, Rows
from jaxformer.data.documents import Piece
from jaxformer.tokenizer import byte_tokenizer
store.SHARD_CHARACTERS = 100
write = store.write_index
def slow(*args):
    shard = write(*args)
    time.sleep(0.03)
    print(int(args[0].name), flush=True)
    return shard
store.write_index = slow
pieces = [Piece(f"{i:050d}", str(i), True) for i in range(40)]
made = store.open_or_build(Path(sys.argv[1]), lambda: pieces, byte_tokenizer())
print("tokens", made.tokens, int(made.read(0, made.tokens).sum()))
"""


def _process(folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


EXPECTED = f"tokens {40 * 51} {40 * (50 * 48 + 256) + 4 * 45 + 10 * (0 + 1 + 2 + 3)}"


@pytest.mark.slow
def test_two_processes_at_once_make_one_store(tmp_path: Path) -> None:
    processes = [_process(tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] == EXPECTED
    assert sorted(map(len, outputs)) == [1, 21]  # one did the work, the other waited


def test_a_killed_process_leaves_its_finished_shards_to_the_next(tmp_path: Path) -> None:
    victim = _process(tmp_path)
    assert victim.stdout
    shown = [victim.stdout.readline() for _ in range(3)]
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert shown == ["0\n", "1\n", "2\n"] and TokenStore.open(tmp_path) is None
    lines = _process(tmp_path).communicate(timeout=60)[0].splitlines()
    assert int(lines[0]) >= 3 and lines[-1] == EXPECTED and not list(tmp_path.glob("*.tmp"))


def _sparse_store(folder: Path, size: int) -> TokenStore:
    """A store whose file says that it holds so many tokens, with a document every thousand, and
    takes no room."""
    folder.mkdir()
    with open(folder / "ids.bin", "wb") as file:
        file.truncate(2 * size)
    ends = np.arange(1000, size, 1000).astype(np.int64)
    (folder / "00000.documents").write_bytes(np.stack([ends, ends, ends]).tobytes())
    written = store_files.digest(folder / "00000.documents")
    files = {"documents": store_files.Written(24 * len(ends), written)}
    ids = np.memmap(folder / "ids.bin", np.uint16, "r").view(np.ndarray)
    shard = Shard(folder / "00000", size, len(ends), 0, files, {"tokens": lambda: ids})
    return TokenStore([shard], np.dtype(np.uint16), "sparse")


def test_reading_a_large_store_takes_no_memory(tmp_path: Path) -> None:
    large = _sparse_store(tmp_path / "large", 1 << 28)
    tracemalloc.start()
    for start in range(0, large.tokens, large.tokens // 100):
        large.read(start, start + 1025)
        large.boundaries(start, start + 1025)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def _text(rows: Rows) -> CausalRows:
    assert isinstance(rows, CausalRows)
    return rows


def _texts(made: Corpus) -> list[str]:
    """The documents that are held out."""
    store = made.validation.store
    ends = store.ends().tolist()
    return [
        made.tokenizer.decode(store.read(start, stop))
        for start, stop in itertools.pairwise([0, *ends])
    ]


TALES = [
    f"the {index}th tale: once upon a time there was a {'very ' * (index % 7)}old king"
    for index in range(300)
]
TEXT = "<|endoftext|>".join(TALES)


def test_prepare_makes_everything_once_and_then_finds_it(tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare(run_of(tmp_path, TEXT), said.append)
    assert any("training" in line for line in said)
    assert sum("tokenizing" in line for line in said) == 1
    assert first.validation is not None
    assert first.train.documents + first.validation.documents == 300
    assert all(tale in TALES for tale in _texts(first))
    held_out = first.tokenizer.decode(_text(first.validation).store.read(0, 9_999))
    assert first.validation.bytes == len(held_out)
    said.clear()
    again = prepare(run_of(tmp_path), said.append)
    assert sum("reusing" in line for line in said) == 2
    assert not any("ing 1" in line or "training" in line for line in said)
    assert again.train.fingerprint == first.train.fingerprint
    assert again.tokenizer.fingerprint() == first.tokenizer.fingerprint()


def test_changed_text_makes_a_new_store_and_compressing_it_does_not(tmp_path: Path) -> None:
    first = prepare(run_of(tmp_path, TEXT))
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    packed = run_of(tmp_path)
    packed = replace(packed, data=replace(packed.data, train=str(tmp_path / "corpus.txt.gz")))
    assert prepare(packed).train.fingerprint == first.train.fingerprint
    longer = prepare(run_of(tmp_path, TEXT + " and a queen"))
    assert longer.train.fingerprint != first.train.fingerprint
    other = run_of(tmp_path, TEXT, tokenizer=TokenizerConfig(vocab_size=290))
    assert prepare(other).train.fingerprint != first.train.fingerprint


def _trained_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What tokenizers are trained on from here on."""
    seen: list[str] = []

    def recorded(texts: Iterable[str], *rest: Any) -> Tokenizer:
        seen.extend(texts)
        return train_bpe_tokenizer(seen, *rest)

    monkeypatch.setattr(corpus, "train_bpe_tokenizer", recorded)
    return seen


def test_the_tokenizer_never_sees_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _trained_on(monkeypatch)
    made = prepare(run_of(tmp_path, TEXT))
    assert set(seen) == set(TALES) - set(_texts(made)) and len(seen) < len(TALES)


def test_a_tokenizer_is_trained_on_a_sample_spread_over_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _trained_on(monkeypatch)
    prepare(run_of(tmp_path, TEXT, tokenizer=TokenizerConfig(vocab_size=300, training_bytes=4000)))
    places = [TEXT.index(text) / len(TEXT) for text in seen]
    assert 3500 < sum(map(len, seen)) <= 4000
    assert max(np.diff([0, *places, 1])) < 0.1
    seen.clear()
    settings = TokenizerConfig(vocab_size=300, training_bytes=20_000)
    prepare(run_of(tmp_path, "a word " * 20_000, tokenizer=settings))
    assert 15_000 < sum(map(len, seen)) <= 20_000


def test_validation_can_be_a_source_of_its_own_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "another text"}) + "\n")
    run = run_of(tmp_path, TEXT)
    made = prepare(replace(run, data=replace(run.data, validation=str(tmp_path / "other.jsonl"))))
    assert made.train.documents == 300 and _texts(made) == ["another text"]
    assert made.validation is not None and made.validation.documents == 1
    made = prepare(replace(run, data=replace(run.data, validation_fraction=0.0)))
    assert made.train.documents == 300
    assert made.validation is None


def test_characters_of_held_out_text_are_known_too(tmp_path: Path) -> None:
    made = prepare(run_of(tmp_path, "a" * 100 + "b", tokenizer=TokenizerConfig(kind="characters")))
    assert made.tokenizer.vocab_size == 3 and made.validation is not None
    assert _text(made.validation).store.read(0, 99).tolist() == [0] * 10 + [1, 2]


def test_a_cache_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*cache.* cannot be made"):
        prepare(run_of(tmp_path, TEXT))


def built(folder: Path, documents: int = 20) -> TokenStore:
    """A store of documents of 9 bytes and an end token, the first half of them first in the order
    of holding out."""
    pieces = [Piece(f"{index:09d}", str(index), True) for index in range(documents)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_files, "hash_fraction", lambda name: int(name) / documents)
        return open_or_build(folder, lambda: pieces, BYTES)


def altered(path: Path, raw: bytes) -> None:
    """Writes a file so that its time does not tell."""
    time = path.stat().st_mtime_ns
    path.write_bytes(raw)
    os.utime(path, ns=(time, time))


@pytest.mark.parametrize("dtype", ["int8", "bool", "uint32", "object"])
def test_a_manifest_of_another_type_of_ids_is_no_store(dtype: str, tmp_path: Path) -> None:
    store = built(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"uint16"', f'"{dtype}"'))
    assert TokenStore.open(tmp_path) is None
    again = built(tmp_path)
    assert again.read(0, 40).tolist() == store.read(0, 40).tolist()


def test_each_side_of_each_fraction_has_its_own_fingerprint(tmp_path: Path) -> None:
    whole = built(tmp_path)
    sides = [
        whole.held_out(fraction, inverse) for fraction in (0.25, 0.5) for inverse in (False, True)
    ]
    sides += [whole.cut(fraction, after) for fraction in (0.25, 0.5) for after in (False, True)]
    assert len({side.fingerprint for side in [whole, *sides]}) == 9


def test_a_cut_counts_the_documents_that_it_parts_and_the_bytes_by_tokens(tmp_path: Path) -> None:
    whole = built(tmp_path)
    before, after = whole.cut(0.5, after=False), whole.cut(0.5, after=True)
    assert (before.tokens, after.tokens) == (99, 101)
    assert (before.documents, after.documents) == (10, 11)
    assert (before.bytes, after.bytes) == (round(180 * 99 / 200), round(180 * 101 / 200))


def test_a_new_format_makes_every_store_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, TEXT)
    prepare(run)
    monkeypatch.setattr(corpus, "FORMAT", corpus.FORMAT + 1)
    prepare(run)
    assert len(list((tmp_path / "cache" / "stores").glob("*/manifest.json"))) == 2


def test_drafts_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "00000.tokens.0123.tmp").write_text("a draft")
    built(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".tokens", ".documents"}


def test_a_store_of_more_shards_than_files_may_be_open_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SHARD_CHARACTERS", 9)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        whole = built(tmp_path, 150)
        side = whole.held_out(0.9)
        assert [*side.ends()] == [10 * number for number in range(1, 136)]
        assert side.read(0, 1350).tolist() == whole.read(0, 1350).tolist()
        assert len(side.boundaries(0, 1350)) == 134
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_was_altered_without_a_trace_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    built(tmp_path)
    path = tmp_path / "00000.tokens"
    raw = bytearray(path.read_bytes())
    raw[7] ^= 4
    altered(path, bytes(raw))
    store = TokenStore.open(tmp_path)
    assert store is not None  # nothing is read yet
    with pytest.raises(ConfigError, match=r"00000\.tokens was altered .*its checksum is anoth"):
        store.read(0, 3)


def test_a_file_is_compared_once_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path)
    reads, digest = [], store_files.digest
    monkeypatch.setattr(store_files, "digest", lambda path: reads.append(path.name) or digest(path))
    for _ in range(3):
        store = TokenStore.open(tmp_path)
        assert store is not None and len(store.read(0, 20)) == 20
        store.boundaries(0, 50)
    assert sorted(reads) == ["00000.documents", "00000.tokens"]
