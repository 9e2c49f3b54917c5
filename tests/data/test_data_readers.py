"""Readers: directories, Parquet, data sets, standard input; what is left out is counted, each fault
is one message."""

import gzip
import io
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxformer.data.sources import Source, find_source
from jaxformer.data.sources.error_policy import ErrorPolicy, Skipped
from jaxformer.data.sources.records import Fields, RecordField
from jaxformer.data.splits import scan
from jaxformer.files import ConfigError

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
    assert source.left_out == "3 files (2 .csv, 1 without a suffix)"


def test_links_to_directories_are_followed_once(folder: Path) -> None:
    (folder / "b" / "around").symlink_to(folder)
    (folder.parent / "linked").mkdir()
    (folder.parent / "linked" / "l.txt").write_text("linked")
    (folder / "link").symlink_to(folder.parent / "linked")
    assert [name for name, _ in found(folder)] == [
        "b/A.JSONL#0",
        "b/c/t.tsv#0",
        "b/p.parquet#0",
        "link/l.txt#0",
        "z.txt#0",
        "z.txt#1",
    ]


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


def test_a_changed_rule_is_another_source(folder: Path) -> None:
    rules = [
        ErrorPolicy(),
        ErrorPolicy("skip"),
        ErrorPolicy("replace"),
        ErrorPolicy("refuse", "skip"),
    ]
    assert (
        len({find_source(str(folder), "data.train", policy=rule).signature() for rule in rules})
        == 4
    )


def test_parquet_gives_the_same_documents_and_records(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS, other=[[1], [2], [3]])
    assert found(path) == [(str(index), text) for index, text in enumerate(TEXTS)]
    dictionary = pyarrow.array(TEXTS).dictionary_encode()
    for column in (
        dictionary,
        pyarrow.array(TEXTS, pyarrow.large_string()),
        [text.encode() for text in TEXTS],
    ):
        assert texts(parquet(tmp_path / "b.parquet", text=column)) == TEXTS
    path = parquet(tmp_path / "tags.parquet", tags=[[0, 1], [2]], words=[["a", "b c"], ["d"]])
    records = [piece.record for piece in find_source(str(path), "data.train", TAGS).pieces()]
    assert records == [(("a", "b c"), ("0", "1")), (("d",), ("2",))]


def test_a_packed_parquet_is_read_too(tmp_path: Path) -> None:
    raw = parquet(tmp_path / "a.parquet", text=TEXTS).read_bytes()
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "c.parquet.zst").write_bytes(zstandard.compress(raw))
    assert texts(tmp_path / "b.parquet.gz") == texts(tmp_path / "c.parquet.zst") == TEXTS


def test_text_that_looks_compressed_is_told_to_be_named_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"abc"))
    with pytest.raises(
        ConfigError, match=r"a\.txt is not UTF-8 .* It looks compressed: end its name in \.gz\.$"
    ):
        texts(tmp_path / "a.txt")


def test_a_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = parquet(
        path, 1000, text=[random.Random(index).randbytes(50).hex() for index in range(5000)]
    ).read_bytes()
    for broken in (
        whole[:-50],
        whole[:-9],
        whole[: len(whole) // 2],
        whole[:5000] + bytes(5000) + whole[10_000:],
        b"text",
    ):
        path.write_bytes(broken)
        with pytest.raises(
            ConfigError, match=r"a\.parquet is truncated or damaged, .*: make or fetch it again"
        ):
            found(path)


BAD_TEXT = pyarrow.Array.from_buffers(
    pyarrow.string(), 3, pyarrow.array([b"ok", b"a\xffb", b"fine"]).buffers()
)


def test_text_of_a_column_that_is_not_utf8_goes_by_the_rule(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=BAD_TEXT)
    with pytest.raises(
        ConfigError, match=r"a\.parquet, row 2 is not UTF-8 text: byte 0xff at offset 1"
    ):
        found(path)
    for rule, kept in (("replace", ["ok", "a\ufffdb", "fine"]), ("skip", ["ok", "fine"])):
        skipped = Skipped()
        source = find_source(str(path), "data.train", policy=ErrorPolicy(rule))  # type: ignore[arg-type]
        assert [piece.text for piece in source.pieces(skipped)] == kept
        assert [(count, place) for count, place in skipped.values()] == [
            (1, f"{path}, row 2, byte 1")
        ]


@pytest.mark.parametrize(
    ("module", "spec"), [("pyarrow", "a.parquet"), ("datasets", "datasets:a/b")]
)
def test_a_library_that_is_not_installed_is_named(
    module: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path / "a.parquet", text=TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError,
        match=(
            r"not installed: pip install"
            rf" 'jaxformer\[{'parquet' if module == 'pyarrow' else module}\]'"
        ),
    ):
        found(spec)


LINES = (
    b'{"text": "a"}\nno\n{"body": 1}\n\n{"text": null}\n{"text": "\xff"}\n'
    b'{"text": 1}\n{"text": " "}\n["text"]\n{"text": "b"}\n'
)
NUMBERED = {
    "lines that are not JSON": (1, 2),
    "records without the field 'text'": (2, 3),
    "records whose field 'text' is null": (1, 5),
    "records whose field 'text' is int": (1, 7),
    "blank documents": (1, 8),
}


def test_what_is_left_out_is_counted_by_reason_with_the_place_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    skipped = Skipped()
    source = find_source(str(path), "data.train", policy=ErrorPolicy("skip", "skip"))
    assert [piece.text for piece in source.pieces(skipped)] == ["a", "b"]
    places = {reason: (count, f"{path}, line {line}") for reason, (count, line) in NUMBERED.items()}
    assert skipped == places | {
        "records with bytes that are not UTF-8": (1, f"{path}, line 6, byte {LINES.index(0xFF)}")
    }
    source = find_source(str(path), "data.train", policy=ErrorPolicy("replace", "skip"))
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
    for spec, place in (
        ("a.tsv", "a.tsv, line 3"),
        ("a.parquet", "a.parquet, row 2"),
        ("saved", "row 2"),
    ):
        named = f"{'datasets:' * (spec == 'saved')}{tmp_path / spec}"
        with pytest.raises(ConfigError, match=rf"{place}(:| has 1 columns).*data\.malformed=skip"):
            found(named)
        skipped = Skipped()
        source = find_source(named, "data.train", policy=ErrorPolicy(malformed="skip"))
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
    source = find_source(f"{tmp_path}/a.{{de,en}}", "data.train", fields, ErrorPolicy("skip"))
    assert [piece.record for piece in source.pieces(skipped)] == [
        ("eins", "one"),
        ("drei", "three"),
    ]
    assert sorted(skipped.values()) == [
        (1, f"{tmp_path}/a.de and {tmp_path}/a.en, line 3"),
        (1, f"{tmp_path}/a.de, line 2, byte 7"),
    ]


def test_blank_documents_are_counted_but_not_what_lies_outside_the_separators(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text(
        "<|endoftext|>\na\n<|endoftext|>\n \n<|endoftext|>\nb\n<|endoftext|>\n"
    )
    (tmp_path / "b.txt").write_text(" \n")
    skipped = Skipped()
    assert [piece.text for piece in find_source(str(tmp_path), "data.train").pieces(skipped)] == [
        "a",
        "b",
    ]
    assert skipped == {"blank documents": (2, f"{tmp_path}/a.txt, document 3")}


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_is_truncated_is_refused_whatever_the_rules(suffix: str, tmp_path: Path) -> None:
    raw = json.dumps({"text": os.urandom(1000).hex()}).encode() + b"\n"
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((gzip.compress(raw) if suffix == ".gz" else zstandard.compress(raw))[:-9])
    with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix} is truncated"):
        found(find_source(str(path), "data.train", policy=ErrorPolicy("skip", "skip")))


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
    datasets.Dataset.from_dict({"text": [str(index) for index in range(700)]}).save_to_disk(
        root / "long"
    )
    assert texts(f"datasets:{root}/long") == [str(index) for index in range(700)]
    assert texts(one) == expected and len(one.files) == 3
    assert [pair for file in one.files for pair in found(one.part([file]))] == found(one)
    assert found(one)[-1][0] == "data-00002-of-00003.arrow#5"
    for name in ("several", "files"):
        assert (
            texts(f"datasets:{root}/{name}") == texts(f"datasets:{root}/{name}:train") == expected
        )
    assert (
        texts(f"datasets:{root}/several:test") == expected[:2]
        and texts(f"datasets:{root}/files:default:test") == expected[:3]
    )
    fields = (
        RecordField("data.text_field", "text", "text"),
        RecordField("data.label_field", "n", "label"),
    )
    assert [
        piece.record for piece in find_source(f"datasets:{root}/one", "data.train", fields).pieces()
    ][1] == ("document 1", "1")
    assert scan(one, tmp_path / "scans").documents == 20


DATASETS = {
    "a split": (
        "several:validation",
        r"has the splits train, test and no configurations: write 'datasets:.*several:SPLIT'",
    ),
    "a split of one": (
        "one:train[:5]",
        r"a part of a split: write 'datasets:NAME', .* A split is read whole",
    ),
    "a split of files": (
        "files:none",
        r'files:none cannot be loaded .*Unknown split "none".*\'train\'.* To choose, write',
    ),
    "a configuration": (
        "files:none:train",
        r"files:none:train cannot be loaded .* Available: \['default'\]",
    ),
    "nothing": (
        "empty",
        r"empty cannot be loaded by the library `datasets`: .*doesn't contain any data files",
    ),
    "too much": ("a:b:c:d", r"names no data set, or a part of a split: write 'datasets:NAME'"),
}


@pytest.mark.parametrize("case", DATASETS)
def test_a_data_set_that_cannot_be_had_is_one_message(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    spec, message = DATASETS[case]
    (saved(tmp_path) / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"^data\\.train=datasets:.*{message}"):
        found(f"datasets:{tmp_path}/{spec}")


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(tmp_path / "saved")
    path = parquet(tmp_path / "a.parquet", body=["a"])
    for spec, name in ((f"datasets:{tmp_path}/saved", r"\.arrow"), (str(path), r"a\.parquet")):
        with pytest.raises(
            ConfigError,
            match=rf"{name} has no field 'text' \(its fields are 'body'\): set data\.text_field",
        ):
            found(find_source(spec, "data.train", policy=ErrorPolicy("skip", "skip")))


def test_without_the_hub_there_is_one_message_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    class Unreachable:
        def head(self, url: str, timeout: float) -> None:
            asked.append(timeout)
            raise OSError("Name or service not known")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Unreachable)
    load = datasets.load_dataset
    offline: list[bool] = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **named: (
            offline.append(datasets.config.HF_HUB_OFFLINE) or load(*args, **named)
        ),
    )
    with pytest.raises(ConfigError) as raised:
        find_source("datasets:roneneldan/TinyStories:train", "data.train")
    parts = [
        "data.train=datasets:roneneldan/TinyStories:train",
        "cannot be reached",
        str(tmp_path),
        "save_to_disk",
        "HF_HOME",
    ]
    assert not [part for part in parts if part not in str(raised.value)], str(raised.value)
    assert (
        asked == [10]
        and offline == [True]
        and not datasets.config.HF_HUB_OFFLINE
        and "Retry" not in capfd.readouterr().err
    )


class Stream(io.TextIOWrapper):
    """Standard input of some bytes, or a terminal."""

    def __init__(self, raw: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(raw))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("spec", "raw"),
    [
        ("-", b"one<|endoftext|>two"),
        ("-.jsonl", b'{"text": "one"}\n{"text": "two"}'),
        ("-.tsv", b"text\none\ntwo\n"),
    ],
)
def test_standard_input_is_kept_and_found_again(
    spec: str, raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", Stream(raw))
        source = find_source(spec, "data.train", cache=tmp_path)
        assert texts(source) == texts(source) == ["one", "two"]
        # A second source of the same stream is the same one.
        assert find_source(spec, "data.train", cache=tmp_path) == source
        signatures.append(source.signature())
    assert signatures[0] == signatures[1] and len(list(tmp_path.rglob("*.*"))) == 1


def test_standard_input_that_cannot_be_read_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Stream(b"")
    closed.close()
    (tmp_path / "file").write_text("")
    cases = [
        (
            Stream(b"a", terminal=True),
            tmp_path,
            r"data\.train=- is standard input, which is a terminal: pipe text into it",
        ),
        (closed, tmp_path, "which is closed: pipe text into it"),
        (None, tmp_path, "which is closed: pipe text into it"),
        (Stream(b""), tmp_path, "which is empty: pipe text into it"),
        (Stream(b"a"), tmp_path / "file", "data.cache_dir"),
    ]
    for stream, cache, message in cases:
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(ConfigError, match=message):
            find_source("-", "data.train", cache=cache)
    assert not list(tmp_path.rglob("*.tmp"))


NOTHING = {
    "a near name": (
        "corpsu",
        r"corpsu does not exist \(seen from .*; did you mean corpus\?; give a \.txt",
    ),
    "a near folder": (
        "corpsu/deep/z.txt",
        r"z\.txt does not exist \(seen from .*; did you mean corpus\?;",
    ),
    "a near file": ("corpus/x.txt", r"does not exist .*; did you mean corpus/z\.txt\?;"),
    "a named source": ("stdlb", r"did you mean stdlib"),
    "no near name": ("qqqqqq", r"qqqqqq does not exist \(seen from [^;]*\); give a \.txt"),
    "a glob of other files": (
        "corpus/*.html",
        r"no file matches .*; corpus has 4 files \(2 \.csv, ",
    ),
    "a glob in a folder": ("corpsu/*.txt", r"no file matches .*did you mean corpus\?"),
    "a glob of directories": (
        "corpus/b*",
        (
            r"the glob 'corpus/b\*' matches directories only \(corpus/b\): end it as in"
            r" 'corpus/b\*/\*\.txt'"
        ),
    ),
    "a directory of code": (
        "code",
        (
            r"the directory code has no file .* seen: 2 files \(2 \.py\)\): .* as in"
            r" \"code/\*\*/\*\.py\""
        ),
    ),
    "an empty directory": (
        "empty",
        r"the directory empty has no file .* seen: no file at all\): give one that has",
    ),
    "a csv": (
        "corpus/notes.csv",
        r"notes\.csv is not .*: write the columns to a \.tsv, \.jsonl or \.parquet file",
    ),
    "a glob with a csv": ("corpus/*.*", r"notes\.csv is not "),
    "twice": ("twice", r"a\.txt and .*a\.txt\.gz are the same but for compression: keep one"),
    "sides": (
        "corpus/{z.txt,*.csv}",
        r"corpus/z\.txt finds 1 and corpus/\*\.csv finds 2 files: give as many",
    ),
    "a pipe": (
        "pipe",
        r"pipe is neither a file nor a directory: give -, and pipe the text into it",
    ),
    "a long name": ("x" * 5000, r"cannot be read: File name too long"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_spec_that_names_nothing_says_what_there_is(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("code/a.py", "code/b/c.py", "twice/a.txt", "twice/a.txt.gz", "empty/.hidden.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    os.mkfifo("pipe")
    spec, message = NOTHING[case]
    with pytest.raises(ConfigError, match=rf"^data\.train: .*{message}"):
        find_source(spec, "data.train")


def test_a_folder_without_permission_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("c"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match=r"data\.train: .*/b/c cannot be read: Permission denied"):
        find_source(str(folder), "data.train")
