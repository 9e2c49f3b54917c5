"""What a scan tells apart, how files are grouped, and what a tokenizer of the cache is found by."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare, tokenize
from test_prepare import run_of, written

from jaxformer.config.run import TokenizerConfig
from jaxformer.data import splits
from jaxformer.data.records import RecordField
from jaxformer.data.source import find_source
from jaxformer.data.splits import Scan, Split, file_groups, scan


def scanned(folder: Path, files: dict[str, list[str]]) -> Scan:
    folder.mkdir()
    for name, texts in files.items():
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return scan(find_source(str(folder), "data.train"), folder / ".scans")


def test_text_is_another_when_its_borders_or_names_are(tmp_path: Path) -> None:
    variants = [
        {"a.jsonl": ["ab", "c"]},
        {"a.jsonl": ["a", "bc"]},
        {"a.jsonl": ["abc"]},
        {"b.jsonl": ["ab", "c"]},
    ]
    variants.append({"a.jsonl": ["ab"], "b.jsonl": ["c"]})
    found = [
        scanned(tmp_path / str(number), files).content for number, files in enumerate(variants)
    ]
    assert len(set(found)) == 5 and scanned(tmp_path / "again", variants[0]).content == found[0]


def test_units_are_as_many_neighbours_as_fit_or_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "GROUP_BYTES", 100)
    for number, size in enumerate((60, 40, 1, 0, 99, 500, 0, 50, 51)):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    groups = file_groups(find_source(str(tmp_path), "data.train"))
    assert [[int(file.path.stem) for file in group.files] for group in groups] == [
        [0, 1],
        [2, 3, 4],
        [5],
        [6, 7],
        [8],
    ]


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.05, False), (0.1, True), (0.85, True), (0.95, False)]
)
def test_documents_are_chosen_among_where_both_sides_have_enough(
    fraction: float, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a")
    source = find_source(str(tmp_path / "a.txt"), "data.train")
    assert Split(source, Scan("", 100, 100), "train", fraction).by_document is expected


@pytest.mark.parametrize(
    ("data", "tokenizer"),
    [
        ({}, {"pattern": "llama3"}),
        ({}, {"training_bytes": 3000}),
        ({}, {"vocab_size": 270}),
        ({"validation_fraction": 0.3}, {}),
        ({"train": "{text}/1.jsonl"}, {}),
    ],
)
def test_a_tokenizer_is_found_only_by_all_that_it_was_made_of(
    data: dict[str, Any], tokenizer: dict[str, Any], tmp_path: Path
) -> None:
    text = written(tmp_path, documents=200)
    run = run_of(tmp_path, f"{text}/0.jsonl", TokenizerConfig(vocab_size=280))
    changes = {
        name: value.format(text=text) if isinstance(value, str) else value
        for name, value in data.items()
    }
    other = replace(
        run, data=replace(run.data, **changes), tokenizer=replace(run.tokenizer, **tokenizer)
    )
    for made in (1, 2):
        for each in (run, other)[:made] * 2:
            tokenize(each)
        assert len(list((tmp_path / "cache" / "tokenizers").glob("*.json"))) == made


def test_the_last_records_of_few_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"source": "{n}", "target": "t"}}\n' for n in range(10))
    )
    fields = tuple(RecordField(f"data.{name}_field", name, "text") for name in ("source", "target"))
    source = find_source(str(tmp_path / "a.jsonl"), "data.train", fields)
    found = scan(source, tmp_path / "scans")
    sides = [Split(source, found, side, 0.2).pieces() for side in ("train", "validation")]
    assert ["".join(str(piece.record[0]) for piece in side) for side in sides] == ["01234567", "89"]


def test_text_is_sampled_by_the_size_of_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxformer.data import corpus

    taken: dict[str, int] = {}
    spread = corpus.spread
    monkeypatch.setattr(
        corpus,
        "spread",
        lambda split, most: taken.update({split.source.spec[-5]: most}) or spread(split, most),
    )
    for name, size in (("a", 3000), ("b", 1000)):
        (tmp_path / f"{name}.txt").write_text("word " * size)
    prepare(
        run_of(
            tmp_path,
            f"{tmp_path}/a.txt; {tmp_path}/b.txt",
            TokenizerConfig(vocab_size=260, training_bytes=4000),
        )
    )
    assert taken == {"a": 3000, "b": 1000}
