"""What a store refuses, makes again or can do without, and how its work is shared."""

import os
import resource
from pathlib import Path

import pytest
from corpora import prepare
from test_prepare import run_of, written

from jaxformer.data import TokenStore, corpus, open_or_build
from jaxformer.data import store as store_files
from jaxformer.data.documents import Piece
from jaxformer.files import ConfigError
from jaxformer.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def built(folder: Path, documents: int = 20) -> TokenStore:
    """A store of documents of 9 bytes and an end token, the first half of them first in the order
    of holding out."""
    pieces = [Piece(f"{index:09d}", str(index), True) for index in range(documents)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_files, "hash_fraction", lambda name: int(name) / documents)
        return open_or_build(folder, lambda: pieces, TOKENIZER)


def altered(path: Path, raw: bytes) -> None:
    """Writes a file so that its time does not tell."""
    time = path.stat().st_mtime_ns
    path.write_bytes(raw)
    os.utime(path, ns=(time, time))


def test_a_file_of_another_size_is_found_without_reading_it(tmp_path: Path) -> None:
    built(tmp_path)
    path = tmp_path / "00000.documents"
    altered(path, path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"00000\.documents was altered .*472 bytes of 480"):
        TokenStore.open(tmp_path)


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
    run = run_of(tmp_path, str(written(tmp_path)))
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


def test_a_run_compares_a_checksum_when_it_first_reads_the_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of some words\n" * 40)
    run = run_of(tmp_path, str(text))
    prepare(run)
    (path,) = tmp_path.glob("cache/stores/*/00000.tokens")
    raw = path.read_bytes()
    altered(path, raw[:-2] + bytes(2))
    train = prepare(run).train
    with pytest.raises(ConfigError, match=r"00000\.tokens was altered"):
        train[0]
