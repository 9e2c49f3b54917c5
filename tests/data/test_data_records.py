"""Records: each format gives the same ones, each fault is one message, and the rows that are made
of them lose none."""

import gzip
import json
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from corpora import prepare, template_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pretrained_tokenizers import saved

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.config.settings import with_settings
from jaxformer.data import NumpyBatch
from jaxformer.data import store as store_files
from jaxformer.data.corpus import joined_labels
from jaxformer.data.documents import Piece, Record
from jaxformer.data.examples import ExampleStore, open_or_encode
from jaxformer.data.records import Fields, RecordField
from jaxformer.data.rows import RowFormat
from jaxformer.data.source import find_source
from jaxformer.data.templates import ExampleRows, PairTemplate, PreferenceTemplate, SFTTemplate
from jaxformer.files import ConfigError
from jaxformer.tokenizer import MARKS, Tokenizer, byte_tokenizer

BYTES = byte_tokenizer()
END = BYTES.end_token
PAIR: Fields = (
    RecordField("data.source_field", "source", "text"),
    RecordField("data.target_field", "target", "text"),
)
TAGS: Fields = (
    RecordField("data.text_field", "text", "words"),
    RecordField("data.label_field", "label", "tags"),
)


def records(spec: object, fields: Fields = PAIR) -> list[Record]:
    return [piece.record for piece in find_source(str(spec), "data.train", fields).pieces()]


def test_every_format_gives_the_same_records(tmp_path: Path) -> None:
    expected = [("ein Hut", "a hat"), ("zwei ü", ""), ('drei "Hüte"', "three")]
    lines = [json.dumps({"id": 1, "target": b, "source": a}) for a, b in expected]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n\n".join(lines).encode()))
    rows = ["id\tsource\ttarget", *(f"1\t{a}\t{b}" for a, b in expected)]
    (tmp_path / "a.tsv").write_bytes("\r\n".join(rows).encode())
    for side, name in enumerate(("de", "en")):
        (tmp_path / f"a.{name}").write_text("".join(pair[side] + "\n" for pair in expected))
    for name in ("a.jsonl.gz", "a.tsv", "a.{de,en}"):
        assert records(tmp_path / name) == expected


def test_blank_lines_are_no_records_but_blank_fields_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n  \n{"source": "", "target": "a"}\n\t\n')
    (tmp_path / "a.tsv").write_text("source\ttarget\n\n  \n\ta\n\t\n")
    assert records(tmp_path / "a.jsonl") == [("", "a")]
    assert records(tmp_path / "a.tsv") == [("", "a"), ("", "")]


def test_words_and_tags_are_lists_or_apart_by_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": ["a", "b c"], "label": [0, "X"]}\n{"text": "a b", "label": "0 X"}\n'
    )
    assert records(tmp_path / "a.jsonl", TAGS) == [
        (("a", "b c"), ("0", "X")),
        (("a", "b"), ("0", "X")),
    ]


# Files, which of them is read, its fields, and the words of the message.
FAULTS: list[tuple[dict[str, str], str, Fields, str]] = [
    ({"a.tsv": "source\ttext\n"}, "a.tsv", PAIR, r"line 1: no field 'target': .* 'source', 'te"),
    (
        {"a.tsv": "source\ttarget\na\tb\na\n"},
        "a.tsv",
        PAIR,
        r"line 3: another number of columns: 1",
    ),
    ({"a.jsonl": '{"source": "a"}'}, "a.jsonl", PAIR, r"no field 'target'.*set data\.target_field"),
    ({"a.jsonl": '{"text": [1], "label": "a"}'}, "a.jsonl", TAGS, r"'text' is list: it has to be"),
    ({"a.tsv": "text\tlabel\na b\tX\n"}, "a.tsv", TAGS, r"line 2: another .* 'text' has 2 and the"),
    ({"a.de": "a\nb\nc", "a.en": "a\n"}, "a.{de,en}", PAIR, r"a\.de and .*a\.en .*the shortest 1"),
    ({"a.de": "a", "a.en": "a", "a.fr": "a"}, "a.{de,en,fr}", PAIR, r"names 3 line-aligned files"),
    ({"a.de": "a"}, "a.{de,en}", PAIR, r"a\.en does not exist"),
    ({"a.txt": "a"}, "a.txt", PAIR, r"a\.txt is plain text, .* \(data\.source_field=source\) and"),
    ({"a.tsv": "source\ttarget\na\t\udcff\n"}, "a.tsv", PAIR, r"line 2 is not UTF-8 .* offset 16"),
]


@pytest.mark.parametrize("case", range(len(FAULTS)))
def test_a_fault_is_one_message_with_file_line_and_field(case: int, tmp_path: Path) -> None:
    files, spec, fields, message = FAULTS[case]
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        records(tmp_path / spec, fields)


def run_of(family: str = "encoder_decoder", head: str = "auto", **data: Any) -> RunConfig:
    settings = {"family": family, "head.kind": head}
    settings["embedding.token_types"] = 2 * (family == "encoder")
    return RunConfig(
        model=with_settings(ModelConfig(), settings),
        data=DataConfig(**data),
        tokenizer=TokenizerConfig(kind="bytes"),
    )


def stored(folder: Path, pairs: list[tuple[str, str]], run: RunConfig) -> ExampleStore:
    template = template_of(PairTemplate, run, BYTES)
    return open_or_encode(
        folder, lambda: [Piece("", "", True, pair) for pair in pairs], template.encode
    )


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.text("abé", max_size=9), st.text("xyz", max_size=9)), min_size=1, max_size=40
    ),
    st.integers(8, 30),
    st.integers(8, 30),
    st.integers(0, 9),
)
def test_packing_loses_no_pair_and_mixes_none(
    pairs: list[tuple[str, str]], length: int, source: int, seed: int
) -> None:
    run = run_of(sequence_length=length, source_length=source)
    with tempfile.TemporaryDirectory() as folder:
        rows = ExampleRows(
            stored(Path(folder), pairs, run), template_of(PairTemplate, run, BYTES), seed
        )
        found: list[tuple[bytes, bytes]] = []
        for row in (rows[index] for index in range(len(rows))):
            numbers = row["segment_ids"].max()
            assert row["source_segment_ids"].max() == numbers and numbers > 0
            assert (row["weights"] == (row["segment_ids"] > 0)).all()
            for number in range(1, numbers + 1):
                ids = row["source"][row["source_segment_ids"] == number].tolist()
                target = row["segment_ids"] == number
                tokens, targets = row["tokens"][target].tolist(), row["targets"][target].tolist()
                assert ids[-1] == targets[-1] == END and tokens == [END, *targets[:-1]]
                found.append((bytes(ids[:-1]), bytes(targets[:-1])))
        cut = [(a.encode()[: source - 1], b.encode()[: length - 1]) for a, b in pairs]
        assert Counter(found) == Counter(cut)
        assert rows.cut == sum(
            (a.encode(), b.encode()) != short for (a, b), short in zip(pairs, cut, strict=True)
        )


def one_row(
    folder: Path, run: RunConfig, lines: list[dict[str, Any]], row: int = 0
) -> tuple[NumpyBatch, tuple[str, ...], list[str]]:
    """A row of records without held-out ones, the labels, and what was said."""
    path, said = folder / "data.jsonl", list[str]()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"train": str(path), "cache_dir": str(folder / "cache"), "validation_fraction": 0.0}
    data = replace(run.data, **settings)  # type: ignore[arg-type]
    corpus = prepare(replace(run, data=data), said.append)
    return corpus.train[row], corpus.labels, said


def test_what_is_kept_is_found_again_only_for_the_same_records_and_objective(
    tmp_path: Path,
) -> None:
    lines = [{"source": "abc", "target": "x"}]
    one_row(tmp_path, run_of(objective="seq2seq", sequence_length=16), lines)
    fields = {"text_field": "source", "label_field": "target", "sequence_length": 16}
    for label in ("x", "y"):
        lines[0]["target"] = label * (1 + (label == "y"))
        row, labels, _ = one_row(tmp_path, run_of("decoder", "classes", **fields), lines)
        assert row["tokens"][:4].tolist() == [*b"abc", END] and labels == (lines[0]["target"],)
    kept = {*tmp_path.glob("cache/stores/*/manifest.json")}
    one_row(tmp_path, run_of("decoder", "classes", **fields), lines)
    assert len(kept) == 3 and {*tmp_path.glob("cache/stores/*/manifest.json")} == kept


def test_only_answers_are_learnt(tmp_path: Path) -> None:
    run = run_of("decoder", objective="sft", sequence_length=16)
    row, _, said = one_row(tmp_path, run, [{"source": "abc", "target": "xy"}])
    assert row["tokens"].tolist() == [*b"abcxy", *[0] * 11]
    assert row["targets"].tolist() == [*b"bcxy", END, *[0] * 11]
    assert row["weights"].tolist() == [0, 0, 1, 1, 1, *[0] * 11]
    assert row["segment_ids"].tolist() == [1] * 5 + [0] * 11
    run = run_of("decoder", objective="sft", sequence_length=16, cut="end")
    row, _, said = one_row(tmp_path, run, [{"source": "a" * 14, "target": "xyz"}])
    assert row["targets"].tolist() == [*b"a" * 13, *b"xyz"] and row["weights"].sum() == 3
    assert any("1 of 1 examples are longer than a row, and are cut" in line for line in said)


@pytest.mark.parametrize("kind", ["llama2", "gpt2", "qwen3", "t5"])
def test_prompt_and_answer_are_the_ids_of_the_joint_text(kind):
    """With SentencePiece no space comes between them; the prompt is that which a model continues,
    as far as the joint text has its ids."""
    theirs = transformers.AutoTokenizer.from_pretrained(saved(kind))
    tokenizer = Tokenizer.load(saved(kind))
    pairs = [("2+2=", "4"), ("Hello", " world"), ("Hello ", "world"), ("the w", "orld"), ("", "a")]
    template = SFTTemplate(RowFormat(32, 32), tokenizer)
    preferences = PreferenceTemplate(RowFormat(32, 32), tokenizer)
    triples = [(prompt, answer, "other") for prompt, answer in pairs]
    chosen = [[*a, *b] for a, b, _ in preferences.encode(triples, {})]
    for (prompt, answer), (ids, edges), both in zip(
        pairs, template.encode(pairs, {}), chosen, strict=True
    ):
        joint = theirs(prompt + answer, add_special_tokens=False)["input_ids"]
        assert ids == both == [*template.before, *joint, tokenizer.end_token]
        begin = edges[0] - len(template.before)
        alone = theirs(prompt, add_special_tokens=False)["input_ids"]
        assert joint[:begin] == alone[:begin] and joint[: begin + 1] != alone[: begin + 1]


def test_a_text_to_classify_is_framed_as_in_bert(tmp_path: Path) -> None:
    cls, sep, _ = range(257, 257 + len(MARKS))
    lines = [
        {"text": "abcdefgh", "other": "xy", "label": 10},
        {"text": "a", "label": 9, "other": ""},
    ]
    run = run_of("encoder", "classes", sequence_length=12)
    row, labels, _ = one_row(tmp_path, run, lines)
    assert labels == ("9", "10") and row["targets"].tolist() == row["weights"].tolist() == [1]
    assert row["tokens"].tolist() == [cls, *b"abcdefgh", sep, 0, 0]
    assert row["segment_ids"].tolist() == [1] * 10 + [0] * 2
    run = run_of("encoder", "classes", sequence_length=12, pair_field="other")
    row, _, said = one_row(tmp_path, run, lines)
    # The longer of the two is cut.
    assert row["tokens"].tolist() == [cls, *b"abcdefg", sep, *b"xy", sep]
    assert row["token_types"].tolist() == [0] * 9 + [1] * 3
    assert any("1 of 2 examples" in line for line in said)
    row, _, _ = one_row(tmp_path, run_of("decoder", "classes", sequence_length=12), lines)
    assert row["tokens"].tolist() == [*b"abcdefgh", END, 0, 0, 0] and "token_types" not in row


def test_a_words_tag_is_learnt_on_its_first_piece(tmp_path: Path) -> None:
    cls, sep, _ = range(257, 257 + len(MARKS))
    lines = [{"text": ["ab", "c"], "label": ["Y", "X"]}, {"text": "d", "label": "Y"}]
    row, labels, _ = one_row(tmp_path, run_of("encoder", "tags", sequence_length=16), lines)
    assert labels == ("X", "Y")
    frames = [[cls, *b"ab c", sep], [cls, *b"d", sep]]
    tags, told = [[0, 1, 0, 0, 0, 0], [0, 1, 0]], [[0, 1, 0, 1, 0, 0], [0, 1, 0]]
    order = (0, 1) if row["segment_ids"].tolist().count(1) == 6 else (1, 0)
    assert row["tokens"].tolist()[:9] == [token for index in order for token in frames[index]]
    assert row["weights"].tolist()[:9] == [weight for index in order for weight in told[index]]
    assert row["targets"].tolist()[:9] == [tag for index in order for tag in tags[index]]
    assert not row["weights"][9:].any()
    assert sorted(Counter(row["segment_ids"].tolist()).values()) == [3, 6, 7]


def test_labels_have_one_order_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    assert joined_labels((), {"b", "10", "9", "a"}) == ("9", "10", "a", "b")
    for name, labels in (("train", "ab"), ("validation", "bca")):
        lines = (json.dumps({"text": "x", "label": label}) for label in labels)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "validation")}
    run = run_of(
        "encoder", "classes", cache_dir=str(tmp_path / "cache"), sequence_length=16, **paths
    )
    message = r"data\.validation=.* labels that the training data has not: 'c'\. It knows a, b: "
    with pytest.raises(ConfigError, match=message):
        prepare(run)
    corpus = prepare(run, labels=("c", "b", "a"))  # those of a model that has learned them
    assert [int(corpus.train[row]["targets"][0]) for row in range(2)] == [2, 1]
    assert corpus.labels == ("c", "b", "a")


def test_examples_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sequence_length=16)
    pairs = [("ab", "x"), ("", "yz")]
    stored(tmp_path, pairs, run)
    with monkeypatch.context() as patch:
        patch.setattr(PairTemplate, "encode", lambda *parts: pytest.fail("encoded again"))
        again = stored(tmp_path, pairs, run)
    parts = [[bytes(part.tolist()) for part in again[index]] for index in range(2)]
    assert parts == [[b"ab", b"x"], [b"", b"yz"]]
    (tmp_path / "manifest.json").unlink()
    assert ExampleStore.open(tmp_path) is None


@pytest.mark.parametrize("name", ["00000.tokens", "00000.bounds"])
def test_examples_that_were_altered_without_a_trace_are_refused(name: str, tmp_path: Path) -> None:
    stored(tmp_path, [("ab", "x"), ("", "yz")], run_of(sequence_length=16))
    # As in another process.
    store_files.Written.verify_once.cache_clear()
    path = tmp_path / name
    raw, found = bytearray(path.read_bytes()), path.stat()
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(ConfigError, match=rf"{name} was altered since it was written"):
        ExampleStore.open(tmp_path)
