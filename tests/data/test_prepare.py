"""Text tokenized beforehand, in one go or by the tasks of a job array; what goes wrong is told
before the work where it can be."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare, tokenize

from jaxformer.cli import main
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import TokenStore, corpus
from jaxformer.data import source as source_files
from jaxformer.data.corpus import Split
from jaxformer.data.records import RecordField
from jaxformer.data.source import Scan, file_groups, find_source, scan
from jaxformer.files import ConfigError

ROOT = Path(__file__).parents[2]
BYTES = TokenizerConfig(kind="bytes")


def written(folder: Path, files: int = 6, documents: int = 30) -> Path:
    """A directory of files of short documents."""
    (folder / "text").mkdir(parents=True)
    for file in range(files):
        texts = [
            f"file {file}, document {index}: {'so ' * (index % 5)}it goes"
            for index in range(documents)
        ]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "text" / f"{file}.jsonl").write_text(lines)
    return folder / "text"


def run_of(
    folder: Path,
    train: str,
    tokenizer: TokenizerConfig = BYTES,
    cache: str = "cache",
    **data: object,
) -> RunConfig:
    settings = DataConfig(train=train, cache_dir=str(folder / cache), sequence_length=16)
    return RunConfig(data=replace(settings, **data), tokenizer=tokenizer)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """The tokens and documents of every store below a folder."""
    kept = [path for kind in ("tokens", "documents") for path in folder.rglob(f"*.{kind}")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(kept)}


def line(folder: Path, *more: str) -> list[str]:
    """`jaxformer prepare` on a text, by bytes."""
    text = folder / "text"
    train = str(text if text.exists() else written(folder))
    settings = ["--data.train", train, "--data.cache_dir", str(folder / "cache")]
    config = str(ROOT / "configs" / "quickstart.py")
    return ["prepare", config, *settings, "--tokenizer.kind", "bytes", *more]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one message of a call that ends with status 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return " ".join(told.split())


def test_facts_of_a_text_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["ab", "abcdé", "a"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "no record\n")
    settings = ["--data.train", str(path), "--data.malformed", "skip"]
    assert main(line(tmp_path, *settings)) == 0
    told = capsys.readouterr().out
    assert "3 documents, 12 tokens, 1.000 bytes per token" in told
    assert f"{path}, line 4" in told and ": 1, the first" in told


def test_files_that_are_prepared_apart_are_found_by_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "GROUP_BYTES", 1)
    text = written(tmp_path)
    for part in ("[135]", "[024]"):
        tokenize(run_of(tmp_path, f"{text}/{part}.jsonl"))
    said: list[str] = []
    run = run_of(tmp_path, str(text))
    store = tokenize(run, said.append)
    found = prepare(run, said.append)
    assert store.documents == 180 and not any("tokenizing" in line for line in said)
    assert found.validation is not None
    assert store.tokens == found.train.tokens + found.validation.tokens


def test_only_what_changed_is_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "GROUP_BYTES", 1)
    text = written(tmp_path)
    run = run_of(tmp_path, str(text))
    first = tokenize(run)
    before = contents(tmp_path / "cache")
    with open(text / "3.jsonl", "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    again = tokenize(run)
    after = contents(tmp_path / "cache")
    assert again.documents == first.documents + 1
    assert before.items() <= after.items() and len(after) == len(before) + 2


# Arguments and the words of the message.
REFUSED = [
    (["--data.weights", "1 2"], "data.weights='1 2'"),
    (["--data.train", "none.txt"], "none.txt"),
    (["--data.train", " ; "], "data.train names no source"),
    (["--data.cache_dir", "{}/file/below"], "below/scans cannot be made (Not a directory)"),
    (["--output", "x"], "output"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_line_that_cannot_work_is_one_message(
    case: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    (tmp_path / "file").touch()
    named = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    assert message in refused(capsys, line(tmp_path, *named))
    assert not (tmp_path / "cache").exists()


def test_files_without_text_are_units_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "GROUP_BYTES", 1)
    text = written(tmp_path, files=2)
    (text / "0a.jsonl").touch()
    (text / "0b.txt").write_text(" \n<|endoftext|>\n")
    run = run_of(tmp_path, str(text))
    first = tokenize(run)
    said: list[str] = []
    second = tokenize(run, said.append)
    assert first.documents == second.documents == 60
    assert not any("tokeniz" in told for told in said)


def test_a_full_disk_is_one_message_and_the_work_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = line(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        told = refused(capsys, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        "00000.tokens cannot be written (File too large): make room, or choose another path" in told
    )
    assert not list(tmp_path.rglob("*.tmp")) and main(arguments) == 0


def test_files_that_change_while_they_are_read_leave_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = written(tmp_path, files=2)
    run, text_store = run_of(tmp_path, str(text)), corpus.text_store

    def changed_before(*arguments: Any) -> TokenStore:
        with open(text / "1.jsonl", "a") as file:
            file.write(json.dumps({"text": "one more"}) + "\n")
        return text_store(*arguments)

    monkeypatch.setattr(corpus, "text_store", changed_before)
    with pytest.raises(ConfigError, match="its files changed while they were read"):
        tokenize(run)
    assert not list((tmp_path / "cache" / "stores").iterdir())
    monkeypatch.undo()
    assert tokenize(run).documents == 61


def scanned(folder: Path, files: dict[str, list[str]]) -> Scan:
    folder.mkdir()
    for name, texts in files.items():
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return scan(find_source(str(folder), "data.train"), folder / ".scans")


def test_text_is_another_when_its_borders_or_names_are(tmp_path: Path) -> None:
    variants: list[dict[str, list[str]]] = [{"a.jsonl": ["ab", "c"]}, {"a.jsonl": ["a", "bc"]}]
    variants += [{"a.jsonl": ["abc"]}, {"b.jsonl": ["ab", "c"]}]
    variants += [{"a.jsonl": ["ab"], "b.jsonl": ["c"]}, variants[0]]
    found = [scanned(tmp_path / str(at), files).content for at, files in enumerate(variants)]
    assert len({*found}) == 5 and found[0] == found[-1]


def test_units_are_as_many_neighbours_as_fit_or_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "GROUP_BYTES", 100)
    for number, size in enumerate((60, 40, 1, 0, 99, 500, 0, 50, 51)):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    groups = file_groups(find_source(str(tmp_path), "data.train"))
    numbers = [[int(file.path.stem) for file in group.files] for group in groups]
    assert numbers == [[0, 1], [2, 3, 4], [5], [6, 7], [8]]


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
    taken: dict[str, int] = {}
    spread = corpus.spread
    monkeypatch.setattr(
        corpus,
        "spread",
        lambda split, most: taken.update({split.source.spec[-5]: most}) or spread(split, most),
    )
    for name, size in (("a", 3000), ("b", 1000)):
        (tmp_path / f"{name}.txt").write_text("word " * size)
    tokenizer = TokenizerConfig(vocab_size=260, training_bytes=4000)
    prepare(run_of(tmp_path, f"{tmp_path}/a.txt; {tmp_path}/b.txt", tokenizer))
    assert taken == {"a": 3000, "b": 1000}
