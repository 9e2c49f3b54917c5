"""Sources: which files, which documents, which side of the split; what is left out is counted, and
each fault is one message."""

import gzip
import json
import os
import random
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config.run import Malformed
from jaxformer.data import documents as document_reader
from jaxformer.data.corpus import Split
from jaxformer.data.documents import ErrorHandler, Piece, Skipped, SourceFile, text_documents
from jaxformer.data.records import Fields, RecordField
from jaxformer.data.source import Scan, Source, find_source, scan
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


COMPRESS: dict[str, Any] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def in_blocks(raw: bytes, size: int, policy: Malformed = "refuse") -> tuple[list[Any], Skipped]:
    """The pieces, of about 8 characters, of a text file that is read in blocks, and what is left
    out."""
    blocks = [raw[start : start + size] for start in range(0, len(raw), size)]
    handler = ErrorHandler(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_reader, "PIECE_CHARACTERS", 8)
        patch.setattr(document_reader, "read_blocks", lambda path: iter(blocks))
        return [*text_documents(SourceFile(Path("a.txt"), "text"), handler)], handler.skipped


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
    compress = COMPRESS[suffix]
    path.write_bytes(compress(text[:half].encode()) + compress(text[half:].encode()))
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
    raw = text.encode()
    whole, _ = in_blocks(raw, len(raw) + 1)
    assert in_blocks(raw, block)[0] == whole
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
    told: dict[Malformed, Skipped] = {}
    found: dict[Malformed, list[str]] = {}
    rules: tuple[Malformed, ...] = ("replace", "skip")
    for rule in rules:
        pieces, told[rule] = in_blocks(raw, block, rule)
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
    assert names == sorted(names) and {"os.py", "json/decoder.py"} <= {*names}
    left_out = {"test", "tests", "idle_test", "site-packages"}
    assert not [name for name in names if left_out & {*name.split("/")[:-1]}]
    side = Split(source, Scan("", len(names), 1), "validation", 0.1)
    held_out = {piece.document for piece in side.pieces()}
    assert 0.05 < len(held_out) / len(names) < 0.15


def test_bad_bytes_in_the_standard_library_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"caf\xe9 = 1")
    (tmp_path / "b.py").write_bytes(b"x = 1\r\n")
    files = tuple(SourceFile(tmp_path / name, "python", name) for name in ("a.py", "b.py"))
    assert list(Source("data.train", "stdlib", files).pieces()) == [
        Piece("x = 1\r\n", "b.py", True)
    ]


RANDOM = os.urandom(1000).hex().encode()
BAD_FILES = {
    "a.txt": (b"abc\xff", r"a\.txt is not UTF-8 text: byte 0xff at offset 3"),
    "late.txt": (b"a" * 2_000_000 + b"\xc3(", r"byte 0xc3 at offset 2000000"),
    "cut.txt": ("aü".encode()[:-1], r"byte 0xc3 at offset 1 \(unexpected end of data"),
    "a.txt.gz": (gzip.compress(b"abc\xffd"), r"byte 0xff at offset 3"),
    "cut.txt.gz": (gzip.compress(RANDOM)[:-9], r"cut\.txt\.gz is truncated"),
    "cut.txt.zst": (zstandard.compress(RANDOM)[:-9], r"cut\.txt\.zst is truncated"),
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
    for text in ("To be, or not to be.\n" * 5_003, "aé🙂 " * 5_003):
        source = write(tmp_path / "play.txt", text)
        found = scan(source, tmp_path / "cache")
        train, held_out = (
            documents(Split(source, found, side, 0.1).pieces()) for side in ("train", "validation")
        )
        # A character that the border cuts is on neither side.
        border = int(len(text.encode()) * 0.9)
        assert train == [text.encode()[:border].decode(errors="ignore")]
        assert held_out == [text.encode()[border:].decode(errors="ignore")]


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


TEXTS = ["one\ntwo", "drei ü", "  four\n"]
TAGS: Fields = (
    RecordField("data.text_field", "words", "words"),
    RecordField("data.label_field", "tags", "tags"),
)


def found(source: Source | str | Path) -> list[tuple[str, str]]:
    """The names and the texts of documents, none of which is long enough for two pieces."""
    source = source if isinstance(source, Source) else find_source(str(source), "data.train")
    return [(piece.document, piece.text) for piece in source.pieces()]


def texts(source: Source | str | Path) -> list[str]:
    return [text for _, text in found(source)]


def parquet(path: Path, row_group_size: int = 2, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of all formats, in folders, beside what is none."""
    root = tmp_path / "corpus"
    (root / "b" / "c").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "z.txt").write_text("plain<|endoftext|>more")
    (root / "b" / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    (root / "b" / "c" / "t.tsv.zst").write_bytes(zstandard.compress(b"n\ttext\n1\trow\n"))
    parquet(root / "b" / "p.parquet", text=["column"], n=[1])
    for name in ("notes.csv", "other.csv", "LICENSE", ".hidden.txt", ".git/config.txt"):
        (root / name).write_text("no")
    return root


def test_a_directory_is_all_files_of_known_suffixes_below_it(folder: Path) -> None:
    source = find_source(str(folder), "data.train")
    expected = [("b/A.JSONL#0", "packed"), ("b/c/t.tsv#0", "row"), ("b/p.parquet#0", "column")]
    assert found(source) == [*expected, ("z.txt#0", "plain"), ("z.txt#1", "more")]
    assert source.left_out == "2 .csv, 1 without a suffix"


def test_links_to_directories_are_followed_once(folder: Path) -> None:
    (folder / "b" / "around").symlink_to(folder)
    (folder.parent / "linked").mkdir()
    (folder.parent / "linked" / "l.txt").write_text("linked")
    (folder / "link").symlink_to(folder.parent / "linked")
    names = ["b/A.JSONL#0", "b/c/t.tsv#0", "b/p.parquet#0", "link/l.txt#0", "z.txt#0", "z.txt#1"]
    assert [name for name, _ in found(folder)] == names


def test_the_name_of_a_document_depends_on_its_file_alone(folder: Path) -> None:
    before = found(folder)
    (folder / "a.txt").write_text("first")
    (folder / "z.txt").rename(folder / "moved")
    (folder / "z.txt.gz").write_bytes(gzip.compress((folder / "moved").read_bytes()))
    source = find_source(str(folder), "data.train")
    assert found(source) == [("a.txt#0", "first"), *before]
    parts = [source.part([file]) for file in source.files]
    assert [pair for part in parts for pair in found(part)] == found(source)
    assert len({part.signature() for part in parts}) == len(parts)
    assert found(f"{folder}/**/*.t[sx][tv]*") == [pair for pair in found(source) if ".t" in pair[0]]
    assert found(folder / "z.txt.gz") == [("0", "plain"), ("1", "more")]


def test_parquet_gives_the_same_documents_and_records(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS, other=[[1], [2], [3]])
    assert found(path) == [(str(index), text) for index, text in enumerate(TEXTS)]
    dictionary = pyarrow.array(TEXTS).dictionary_encode()
    for column in (dictionary, pyarrow.array(TEXTS, pyarrow.large_string())):
        assert texts(parquet(tmp_path / "b.parquet", text=column)) == TEXTS
    path = parquet(tmp_path / "tags.parquet", tags=[[0, 1], [2]], words=[["a", "b c"], ["d"]])
    records = [piece.record for piece in find_source(str(path), "data.train", TAGS).pieces()]
    assert records == [(("a", "b c"), ("0", "1")), (("d",), ("2",))]


def test_a_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = [random.Random(index).randbytes(50).hex() for index in range(5000)]
    whole = parquet(path, 1000, text=text).read_bytes()
    message = r"a\.parquet is truncated, damaged, or not .*: make or fetch it again"
    for broken in (whole[:-9], whole[:5000] + bytes(5000) + whole[10_000:], b"text"):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=message):
            found(path)


@pytest.mark.parametrize(
    ("module", "extra", "spec"),
    [("pyarrow", "parquet", "a.parquet"), ("datasets", "datasets", "datasets:a/b")],
)
def test_a_library_that_is_not_installed_is_named(
    module: str, extra: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path / "a.parquet", text=TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"not installed: pip install 'jaxformer\[{extra}\]'"):
        found(spec)


LINES = (
    b'{"text": "a"}\nno\n{"body": 1}\n\n{"text": null}\n{"text": "\xff"}\n'
    b'{"text": 1}\n{"text": " "}\n["text"]\n{"text": "b"}\n'
)
NUMBERED = {
    "not JSON": (1, 2),
    "no field 'text'": (2, 3),
    "the field 'text' is null": (1, 5),
    "the field 'text' is int": (1, 7),
    "blank documents": (1, 8),
}


def test_what_is_left_out_is_counted_by_reason_with_the_place_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    skipped = Skipped()
    source = find_source(str(path), "data.train", policy="skip")
    assert [piece.text for piece in source.pieces(skipped)] == ["a", "b"]
    places = {reason: (count, f"{path}, line {line}") for reason, (count, line) in NUMBERED.items()}
    assert skipped == places | {
        "records with bytes that are not UTF-8": (1, f"{path}, line 6, byte {LINES.index(0xFF)}")
    }
    source = find_source(str(path), "data.train", policy="replace")
    assert texts(source) == ["a", "\ufffd", "b"]
    again = Skipped()
    for _ in range(2):
        again.merge(json.loads(json.dumps(skipped)))
    assert again == {reason: (2 * count, place) for reason, (count, place) in skipped.items()}
    assert f"blank documents: 2, the first in {path}, line 8" in again.lines()


def test_rows_and_lines_that_are_none_are_left_out_in_each_format(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("n\ttext\n1\tone\n2\n\n3\tthree\n4\t\n")
    parquet(tmp_path / "a.parquet", text=["one", None, "three", ""])
    datasets.Dataset.from_dict({"text": ["one", None, "three", ""]}).save_to_disk(
        tmp_path / "saved"
    )
    places = {"a.tsv": "a.tsv, line 3", "a.parquet": "a.parquet, row 2", "saved": "row 2"}
    for spec, place in places.items():
        named = f"{'datasets:' * (spec == 'saved')}{tmp_path / spec}"
        with pytest.raises(ConfigError, match=rf"{place}: .*data\.malformed=skip"):
            found(named)
        skipped = Skipped()
        source = find_source(named, "data.train", policy="skip")
        assert [piece.text for piece in source.pieces(skipped)] == ["one", "three"]
        assert [count for count, _ in skipped.values()] == [1, 1] and "blank documents" in skipped
        assert next(iter(skipped.values()))[1].endswith(place)


def test_line_aligned_files_lose_a_line_on_all_sides(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_bytes(b"eins\nzw\xffei\n\ndrei\n")
    (tmp_path / "a.en").write_bytes(b"one\ntwo\n\nthree\n")
    fields = (
        RecordField("data.source_field", "source", "text"),
        RecordField("data.target_field", "target", "text"),
    )
    skipped = Skipped()
    source = find_source(f"{tmp_path}/a.{{de,en}}", "data.train", fields, "skip")
    found = [piece.record for piece in source.pieces(skipped)]
    assert found == [("eins", "one"), ("drei", "three")]
    blank = f"{tmp_path}/a.de and {tmp_path}/a.en, line 3"
    assert sorted(skipped.values()) == [(1, blank), (1, f"{tmp_path}/a.de, line 2, byte 7")]


def test_blank_documents_are_counted_but_not_what_lies_outside_the_separators(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text(
        "<|endoftext|>\na\n<|endoftext|>\n \n<|endoftext|>\nb\n<|endoftext|>\n"
    )
    (tmp_path / "b.txt").write_text(" \n")
    skipped = Skipped()
    pieces = find_source(str(tmp_path), "data.train").pieces(skipped)
    assert [piece.text for piece in pieces] == ["a", "b"]
    assert skipped == {"blank documents": (2, f"{tmp_path}/a.txt, document 3")}


def saved(root: Path) -> Path:
    rows = datasets.Dataset.from_dict(
        {"text": [f"document {index}" for index in range(20)], "n": list(range(20))}
    )
    rows.save_to_disk(root / "one", num_shards=3)
    datasets.DatasetDict(train=rows, test=rows.select(range(2))).save_to_disk(root / "several")
    (root / "files").mkdir()
    rows.to_parquet(root / "files" / "train.parquet")
    rows.select(range(3)).to_parquet(root / "files" / "test.parquet")
    return root


def test_a_data_set_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = saved(tmp_path)
    expected = [f"document {index}" for index in range(20)]
    one = find_source(f"datasets:{root}/one", "data.train")
    many = [str(index) for index in range(700)]
    datasets.Dataset.from_dict({"text": many}).save_to_disk(root / "long")
    assert texts(f"datasets:{root}/long") == many
    assert texts(one) == expected and len(one.files) == 3
    assert [pair for file in one.files for pair in found(one.part([file]))] == found(one)
    assert found(one)[-1][0] == "data-00002-of-00003.arrow#5"
    for name in ("several", "files", "several:train", "files:train"):
        assert texts(f"datasets:{root}/{name}") == expected
    assert texts(f"datasets:{root}/several:test") == expected[:2]
    assert texts(f"datasets:{root}/files:default:test") == expected[:3]
    fields: Fields = (RecordField("", "text", "text"), RecordField("", "n", "label"))
    _, second, *_ = find_source(f"datasets:{root}/one", "data.train", fields).pieces()
    assert second.record == ("document 1", "1")
    assert scan(one, tmp_path / "scans").documents == 20


DATASETS = {
    "several:validation": r"has the splits train, test, and no configurations",
    "one:train[:5]": r"names no split of a data set\. Write 'datasets:NAME', .* is read whole",
    "files:none": r"cannot be loaded .*Unknown split \"none\".*'train'.* Write 'datasets:NAME'",
    "files:none:train": r"cannot be loaded .* Available: \['default'\]",
    "empty": r"cannot be loaded .*doesn't contain any data files.* in its cache \(HF_HOME\)",
    "a:b:c:d": r"names no split of a data set",
}


@pytest.mark.parametrize("spec", DATASETS)
def test_a_data_set_that_cannot_be_had_is_one_message(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (saved(tmp_path) / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"^data\\.train=datasets:.*{DATASETS[spec]}"):
        found(f"datasets:{tmp_path}/{spec}")


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", body=["a"])
    message = r"a\.parquet: no field 'text': the fields are 'body'; set data\.text_field"
    with pytest.raises(ConfigError, match=message):
        found(find_source(str(path), "data.train", policy="skip"))


NOTHING = {
    "qqqqqq": r"qqqqqq does not exist \(seen from .*\); give a \.txt",
    "corpus/*.html": r"no file matches the glob 'corpus/\*\.html' \(seen from .*\); give a \.txt",
    "corpus/b*": r"no file matches the glob",
    "code": r'the directory code has no file .* are 2 \.py\): .* as in "code/\*\*/\*\.py"',
    "empty": r"the directory empty has no file .* its files are none\)",
    "corpus/notes.csv": r"notes\.csv is not a \.txt, \.jsonl, .*: convert or unpack it",
    "corpus/*.*": r"notes\.csv is not ",
    "twice": r"a\.txt and .*a\.txt\.gz are the same but for compression: keep one",
    "corpus/{z.txt,*.csv}": r"z\.txt and corpus/\*\.csv find 1 and 2 files: give as many",
    "pipe": r"pipe is neither a file nor a directory: write its text to a file",
    "x" * 5000: r"cannot be read: File name too long",
}


@pytest.mark.parametrize("spec", NOTHING)
def test_a_spec_that_names_nothing_says_what_there_is(
    spec: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("code/a.py", "code/b/c.py", "twice/a.txt", "twice/a.txt.gz", "empty/.hidden.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match=rf"^data\.train: .*{NOTHING[spec]}"):
        find_source(spec, "data.train")
