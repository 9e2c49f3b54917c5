"""Sources: which files, which documents, which side of the split, and one clear message for each
thing that is wrong."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config.run import Malformed
from jaxformer.data import documents as document_reader
from jaxformer.data.documents import ErrorHandler, Piece, Skipped, SourceFile, text_documents
from jaxformer.data.source import Source, find_source
from jaxformer.data.splits import Scan, Split, scan
from jaxformer.files import ConfigError


def documents(pieces: Iterator[Piece] | list[Piece]) -> list[str]:
    """Whole documents; the last may lack its end."""
    found, held = [], ""
    for piece in pieces:
        held += piece.text
        if piece.ends:
            found.append(held)
            held = ""
    return found + [held] * bool(held)


def write(path: Path, text: str) -> Source:
    path.write_bytes(text.encode())
    return find_source(str(path), "data.train")


def compress(raw: bytes, suffix: str) -> bytes:
    return {
        "": lambda: raw,
        ".gz": lambda: gzip.compress(raw),
        ".zst": lambda: zstandard.compress(raw),
    }[suffix]()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_every_format_gives_the_same_documents(kind: str, suffix: str, tmp_path: Path) -> None:
    expected = ["one\r\ntwo", "drei ü", "  four\n"]
    if kind == ".txt":
        text = "<|endoftext|>\n".join(part + "\n" for part in expected) + "<|endoftext|>\n"
    else:
        text = "".join(json.dumps({"id": 1, "text": part}) + "\n" for part in expected) + "\n"
    path = tmp_path / f"corpus{kind}{suffix}"
    half = len(text) // 2  # compressed files may have several members or frames
    path.write_bytes(
        compress(text[:half].encode(), suffix) + compress(text[half:].encode(), suffix)
    )
    source = find_source(str(path), "data.train")
    assert documents(source.pieces()) == expected
    assert [piece.document for piece in source.pieces()] == ["0", "1", "2"]


@settings(max_examples=80)
@given(
    st.lists(st.text(alphabet="ab \n\r<|é", max_size=120), min_size=1, max_size=5),
    st.sampled_from(["", "\n", "\r\n"]),
    st.integers(1, 40),
)
def test_documents_and_pieces_do_not_depend_on_how_the_file_is_read(
    parts: list[str], line: str, block: int
) -> None:
    text = f"{line}<|endoftext|>{line}".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_reader, "PIECE_CHARACTERS", 8)
        raw = text.encode()
        patch.setattr(document_reader, "read_blocks", lambda path: iter([raw]))
        whole = list(text_documents(SourceFile(Path("whole"), "text"), ErrorHandler()))
        patch.setattr(
            document_reader,
            "read_blocks",
            lambda path: (raw[i : i + block] for i in range(0, len(raw), block)),
        )
        assert list(text_documents(SourceFile(Path("blocks"), "text"), ErrorHandler())) == whole
    assert all(len(piece) <= 16 for piece, _ in whole)
    if line == "\n" and not any(
        "<|endoftext|>" in part or part[:1] in "\r\n" or part[-1:] in "\r\n" for part in parts
    ):
        assert documents([Piece(piece, "", ends) for piece, ends in whole]) == [
            part for part in parts if part.strip()
        ]


PARTS = [b"a", b"b b", b"\n", "é".encode(), "\ufffd".encode(), b"\xff", b"\xc3", b"\xf0\x9f"]


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.sampled_from(PARTS)), min_size=1),
    st.sampled_from([b"", b"\n", b"\r\n"]),
    st.integers(1, 40),
)
def test_bytes_that_are_no_text_are_replaced_or_their_documents_left_out(
    parts: list[list[bytes]], line: bytes, block: int
) -> None:
    separator = line + b"<|endoftext|>" + line
    raw = separator.join(b"x" + b"".join(part) + b"y" for part in parts)
    told: dict[Malformed, Skipped] = {"replace": Skipped(), "skip": Skipped()}
    found: dict[Malformed, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_reader, "PIECE_CHARACTERS", 8)
        patch.setattr(
            document_reader,
            "read_blocks",
            lambda path: (raw[i : i + block] for i in range(0, len(raw), block)),
        )
        for rule, skipped in told.items():
            pieces = text_documents(SourceFile(Path("a.txt"), "text"), ErrorHandler(rule, skipped))
            found[rule] = documents([Piece(text, "", ends) for text, ends in pieces])
    whole = [part.decode(errors="replace") for part in raw.split(separator) if part]
    kept = [part.decode() for part in raw.split(separator) if part and not broken(part)]
    assert found == {"replace": whole, "skip": kept}
    if not broken(raw):
        assert told == {"replace": {}, "skip": {}}
        return
    place = f"a.txt, byte {broken(raw)[0]}"
    replaced = "".join(whole).count("\ufffd") - raw.count("\ufffd".encode())
    assert told["replace"] == {"bytes that are not UTF-8, replaced by U+FFFD": (replaced, place)}
    assert told["skip"] == {
        "documents with bytes that are not UTF-8": (len(whole) - len(kept), "a.txt")
    }


def broken(raw: bytes) -> list[int]:
    """The offset of the first byte that is not UTF-8, if any is."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return [error.start]
    return []


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.txt", "\ufeffabc").pieces()) == ["abc"]
    assert documents(write(tmp_path / "a.jsonl", '\ufeff{"text": "abc"}').pieces()) == ["abc"]


def test_stdlib_is_the_running_pythons_own_code_without_its_tests() -> None:
    source = find_source("stdlib", "data.train")
    names = [file.name for file in source.files]
    assert names == sorted(names) and {"os.py", "json/decoder.py"} <= set(names)
    assert not [
        name
        for name in names
        if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/")[:-1])
    ]
    held_out = {
        piece.document
        for piece in Split(source, Scan("", len(names), 1), "validation", 0.1).pieces()
    }
    assert 0.05 < len(held_out) / len(names) < 0.15


def test_bad_bytes_in_the_standard_library_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"caf\xe9 = 1")
    (tmp_path / "b.py").write_bytes(b"x = 1\r\n")
    files = tuple(SourceFile(tmp_path / name, "python", name) for name in ("a.py", "b.py"))
    assert list(Source("data.train", "stdlib", files).pieces()) == [
        Piece("x = 1\r\n", "b.py", True)
    ]


BAD_FILES = {
    "a.txt": (b"abc\xff", r"a\.txt is not UTF-8 text: byte 0xff at offset 3"),
    "late.txt": (b"a" * 2_000_000 + b"\xc3(", r"byte 0xc3 at offset 2000000"),
    "cut.txt": ("aü".encode()[:-1], r"byte 0xc3 at offset 1 \(unexpected end of data"),
    "a.txt.gz": (gzip.compress(b"abc\xffd"), r"byte 0xff at offset 3"),
    "truncated.txt.gz": (
        gzip.compress(os.urandom(1000).hex().encode())[:-9],
        r"truncated\.txt\.gz is truncated",
    ),
    "truncated.txt.zst": (
        zstandard.compress(os.urandom(1000).hex().encode())[:-9],
        r"truncated\.txt\.zst is truncated",
    ),
    "no.txt.gz": (b"plain text", r"no\.txt\.gz is damaged, or not a \.gz file"),
    "no.txt.zst": (b"plain text", r"no\.txt\.zst is damaged, or not a \.zst file"),
    "empty.txt": (b"", r"empty\.txt is empty"),
    "blank.txt": (b" \n\n", r"blank\.txt is empty"),
    "empty.txt.gz": (gzip.compress(b""), r"empty\.txt\.gz is empty"),
    "empty.jsonl": (b"\n\n", r"empty\.jsonl is empty"),
    "json.jsonl": (b'{"text": "a"}\n\n{"text": \n', r"json\.jsonl, line 3: not JSON"),
    "field.jsonl": (
        b'{"text": "a"}\n{"body": "a"}\n',
        r"line 2: no field 'text': the fields are 'body'; set data.text_field",
    ),
    "list.jsonl": (b'["text"]\n', r"line 1: no field 'text': the record is no object"),
    "number.jsonl": (b'{"text": 1}\n', r"line 1: the field 'text' is int: it has to be a string"),
    "bytes.jsonl": (
        b'{"text": "a"}\n{"text": "\xff"}\n',
        r"line 2 is not UTF-8 text: byte 0xff at offset 24",
    ),
    "half.jsonl": (
        b'{"text": "\\ud83d"}\n',
        r"line 1: the field 'text' holds half a surrogate pair",
    ),
    "table.csv": (b"a,b\n", r"table\.csv is not a \.txt, \.jsonl, \.tsv or \.parquet file"),
    "table.arrow": (b"ARROW1", r"table\.arrow is not .*: convert or unpack it"),
    "table.parquet": (b"PAR1", r"table\.parquet is truncated, damaged, or not .*make or fetch it"),
    "utf16.txt": ("a text".encode("utf-16-be"), r"utf16\.txt .* begins with zero bytes.*UTF-16"),
    "zero.jsonl": (bytes(99), r"zero\.jsonl is not UTF-8 text: it begins with zero bytes"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_message_with_the_file_and_the_place(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        scan(find_source(str(tmp_path / name), "data.train"), tmp_path / "cache")
    assert "empty" in message or not list(tmp_path.glob("cache/*"))


def test_a_scan_is_read_again_only_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.txt", "abc<|endoftext|>dé")
    first = scan(source, tmp_path / "cache")
    assert (first.documents, first.bytes) == (2, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Source, "pieces", lambda self: pytest.fail("read again"))
        assert scan(source, tmp_path / "cache") == first
    (tmp_path / "a.txt").write_text("xyz<|endoftext|>dé")
    os.utime(tmp_path / "a.txt", ns=(0, 1))
    changed = find_source(str(tmp_path / "a.txt"), "data.train")
    assert scan(changed, tmp_path / "cache").content != first.content
    (tmp_path / "copy.txt.gz").write_bytes(gzip.compress("abc<|endoftext|>dé".encode()))
    assert (
        scan(find_source(str(tmp_path / "copy.txt.gz"), "data.train"), tmp_path / "cache") == first
    )


@settings(max_examples=60)
@given(
    st.lists(st.text(alphabet="aé🙂 ", min_size=1).filter(str.strip), min_size=1, max_size=8),
    st.floats(0.01, 0.99),
)
def test_the_end_held_out_and_the_rest_are_the_whole_text(
    parts: list[str], fraction: float
) -> None:
    pieces = [
        Piece(text, str(index), index % 2 == 0 or index == len(parts) - 1)
        for index, text in enumerate(parts)
    ]

    class Fixed(Source):
        def pieces(self, skipped: Skipped | None = None) -> Iterator[Piece]:
            return iter(pieces)

    size = sum(len(text.encode()) for text in parts)
    source = Fixed("data.train", "fixed", ())
    sides = [
        Split(source, Scan("", len(parts), size), side, fraction)
        for side in ("train", "validation")
    ]
    train, held_out = (list(side.pieces()) for side in sides)
    before, after = ("".join(piece.text for piece in side) for side in (train, held_out))
    text = "".join(parts)
    assert text.startswith(before)
    assert text.endswith(after)
    assert len(before) + len(after) >= len(text) - 1
    assert abs(len(before.encode()) - size * (1 - fraction)) < 4


def test_many_documents_are_chosen_by_hash_and_stay_where_they_are(tmp_path: Path) -> None:
    texts = [f"document {index}" for index in range(400)]
    chosen = []
    for count in (300, 400):
        source = write(tmp_path / "a.txt", "<|endoftext|>".join(texts[:count]))
        found = scan(source, tmp_path / f"cache{count}")
        sides = [Split(source, found, side, 0.1) for side in ("train", "validation")]
        train, held_out = (set(documents(side.pieces())) for side in sides)
        assert sides[0].by_document
        assert not train & held_out
        assert train | held_out == set(texts[:count])
        assert sides[0].identity() != sides[1].identity()
        chosen.append(held_out)
    assert chosen[0] == chosen[1] & set(texts[:300]) and 10 < len(chosen[0]) < 60


def test_a_single_text_is_split_as_nanogpt_splits_it(tmp_path: Path) -> None:
    text = "To be, or not to be.\n" * 5_003
    source = write(tmp_path / "play.txt", text)
    found = scan(source, tmp_path / "cache")
    train, held_out = (
        documents(Split(source, found, side, 0.1).pieces()) for side in ("train", "validation")
    )
    assert train == [text[: int(len(text) * 0.9)]] and held_out == [text[int(len(text) * 0.9) :]]


def test_reading_takes_flat_memory(tmp_path: Path) -> None:
    line = "the quick brown fox jumps over the lazy dog " * 20 + "\n"
    (tmp_path / "large.txt").write_text(line * 40_000)
    source = find_source(str(tmp_path / "large.txt"), "data.train")
    tracemalloc.start()
    size = sum(len(piece.text) for piece in source.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == len(line) * 40_000 > 35_000_000
    assert peak < 12_000_000
