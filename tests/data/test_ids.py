"""Token ids as data: what is read of .npy and .bin files is what the text would give, or is
refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from corpora import prepare, tokenize
from stored import PACKINGS, same
from tiny_run import line, train_here

from jaxformer.cli import main
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Batches, Corpus, evaluation_batches
from jaxformer.files import ConfigError
from jaxformer.tokenizer import END_OF_TEXT, Tokenizer, train_bpe_tokenizer

TALES = [f"the {index}th tale of the {'very ' * (index % 7)}old king" for index in range(200)]
ONE, MANY = " ".join(TALES), END_OF_TEXT.join(TALES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, one document and many, as text and as `jaxformer tokenizer encode`
    writes their ids."""
    folder = tmp_path_factory.mktemp("ids")
    train_bpe_tokenizer([ONE], 320).save(folder / "tokenizer.json")
    for name, text, more in (("one", ONE, []), ("many", MANY, ["--special_tokens"])):
        (folder / f"{name}.txt").write_text(text)
        output = ["--output", str(folder / f"{name}.npy"), *more]
        assert main(["tokenizer", "encode", str(folder), str(folder / f"{name}.txt"), *output]) == 0
    return folder


def run_of(made: Path, train: object, cache: Path, **data: Any) -> RunConfig:
    settings: Any = {"cache_dir": str(cache), "sequence_length": 16} | data
    data_config = DataConfig(train=str(train), **settings)
    return RunConfig(data=data_config, tokenizer=TokenizerConfig(path=str(made)))


def assert_same_batches(
    found: Corpus, expected: Corpus, data: DataConfig, batch_size: int = 4
) -> None:
    made, wanted = (Batches(corpus.train, data, batch_size, 7) for corpus in (found, expected))
    assert made.examples == wanted.examples
    assert all(same(made[step], wanted[step]) for step in (0, 3, made.steps_per_epoch + 1))
    assert found.validation and expected.validation
    held = (evaluation_batches(rows, data, 8) for rows in (found.validation, expected.validation))
    assert all(same(*pair) for pair in zip(*held, strict=True))
    for rows, others in ((found.train, expected.train), (found.validation, expected.validation)):
        assert (rows.tokens, rows.documents) == (others.tokens, others.documents)
        assert rows.bytes == others.bytes


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["one", "many"])
def test_ids_give_the_batches_of_their_text(
    name: str, packing: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxformer.data.ids.BLOCK_IDS", 6)
    run = run_of(made, made / f"{name}.txt", tmp_path / "text", packing=packing)
    own = run_of(made, made / f"{name}.npy", tmp_path / "ids", packing=packing)
    assert_same_batches(prepare(own), prepare(run), run.data)


def test_ids_are_read_in_their_order(made: Path, tmp_path: Path) -> None:
    whole = {"validation_fraction": 0.0, "order": "text"}
    text = run_of(made, made / "many.txt", tmp_path / "text", **whole)
    own = run_of(made, made / "many.npy", tmp_path / "ids", **whole)
    found, expected = (Batches(prepare(run).train, run.data, 4, 7) for run in (own, text))
    assert all(same(found[step], expected[step]) for step in range(expected.steps_per_epoch))


def test_ids_are_mapped_where_they_lie(made: Path, tmp_path: Path) -> None:
    for name in ("one", "many"):
        prepare(run_of(made, made / f"{name}.npy", tmp_path))
    copied = sorted(path.stat().st_size for path in tmp_path.rglob("*.tokens"))
    assert copied == [2, 2]  # the end token that each text lacks
    said: list[str] = []
    prepare(run_of(made, made / "many.npy", tmp_path), said.append)
    assert not any("reading" in told for told in said)


@pytest.mark.parametrize("kind", ["uint16", "int64", ">i4", "many files"])
def test_ids_of_any_width_and_in_any_files_are_the_same(
    kind: str, made: Path, tmp_path: Path
) -> None:
    found = np.append(np.load(made / "many.npy"), Tokenizer.load(made).end_token)
    path: object = tmp_path / "train.bin"
    if kind == "uint16":  # as nanoGPT writes it
        found.astype(np.uint16).tofile(tmp_path / "train.bin")
    elif kind == "many files":
        middle = len(found) // 2
        cut = int(np.flatnonzero(found[:middle] == found[-1])[-1]) + 1
        path = tmp_path / "part*.npy"
        for number, part in enumerate((found[:cut], found[cut:])):
            np.save(tmp_path / f"part{number}.npy", part)
    else:
        path = tmp_path / "train.npy"
        np.save(tmp_path / "train.npy", found.astype(kind))
    validation = {"validation": str(made / "one.npy")}  # no document is chosen by its file's name
    run = run_of(made, path, tmp_path / "cache", **validation)
    assert_same_batches(
        prepare(run), prepare(run_of(made, made / "many.npy", tmp_path, **validation)), run.data
    )


def test_a_bin_file_of_a_large_vocabulary_is_uint32(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(70_000)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.add_special_tokens([END_OF_TEXT])
    Tokenizer(backend).save(tmp_path / "tokenizer.json")
    numbers = np.arange(69_000, 70_001, dtype=np.uint32)
    numbers.tofile(tmp_path / "train.bin")
    corpus = prepare(
        run_of(tmp_path, tmp_path / "train.bin", tmp_path / "cache", validation_fraction=0.0)
    )
    assert corpus.train.tokens == 1001 and corpus.train.documents == 1
    assert corpus.train[0]["tokens"].tolist() == list(range(69_000, 69_016))


def test_ids_are_mixed_with_text(made: Path, tmp_path: Path) -> None:
    twice = {"weights": "2 1"}
    text = run_of(made, f"{made}/many.txt; {made}/one.txt", tmp_path / "text", **twice)
    run = run_of(made, f"{made}/many.npy; {made}/one.txt", tmp_path / "ids", **twice)
    assert_same_batches(prepare(run), prepare(text), run.data)


def test_a_file_that_changed_is_other_data(made: Path, tmp_path: Path) -> None:
    found = np.load(made / "many.npy")
    np.save(tmp_path / "a.npy", found)
    run = run_of(made, tmp_path / "a.npy", tmp_path / "cache")
    before = prepare(run)
    found[5] += 1
    np.save(tmp_path / "a.npy", found)
    after = prepare(run)
    assert before.train.fingerprint != after.train.fingerprint
    np.save(tmp_path / "b.npy", found)  # the same ids lie elsewhere
    moved = prepare(run_of(made, tmp_path / "b.npy", tmp_path / "cache"))
    assert moved.train.fingerprint == after.train.fingerprint


def test_prepare_indexes_ids(made: Path, tmp_path: Path) -> None:
    run = run_of(made, made / "many.npy", tmp_path / "cache")
    assert tokenize(run).documents == len(TALES)
    next((tmp_path / "cache").rglob("00000.documents")).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"00000\.documents was altered since it was written"):
        tokenize(run)


def written(folder: Path, name: str, content: bytes | np.ndarray) -> Path:
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        np.save(folder / name, content, allow_pickle=True)
    return folder / name


SHORT = np.arange(20, dtype=np.uint16)
# Of a file: its name, its content, and the words of the message.
REFUSED: list[tuple[str, bytes | np.ndarray, str]] = [
    ("a.npy", np.array([1, 320]), r"id 320 at place 1 of .*a\.npy is not in .*, .* 320 entries"),
    ("a.npy", np.array([-1, 3]), r"id -1 at place 0 of .*a\.npy is not in the vocab"),
    ("a.npy", np.zeros(3), r"is no .npy array .* float64, shape \(3,\)\): write it by numpy.save"),
    ("a.npy", np.zeros((2, 3), np.int32), r"it is one of int32, shape \(2, 3\)"),
    ("a.npy", np.array([{}]), r"a\.npy is no .npy array of one row of integers"),
    ("a.npy", b"ids", r"a\.npy is no .npy array"),
    ("a.npy", np.zeros(0, np.uint16), r"a\.npy is empty: there is nothing to train on"),
    ("a.bin", b"", r"a\.bin is empty"),
    ("a.bin", b"abc", r"a\.bin has 3 bytes, which is no whole number of uint16"),
    ("a.bin", SHORT.astype(np.uint32).tobytes(), r"every second id of .*, as if they were uint32"),
    (
        "a.bin",
        np.full(9, 500, np.uint16).tobytes(),
        r"id 500 at place 0 .*, read as uint16, is not",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_holds_no_ids_is_one_message(case: int, made: Path, tmp_path: Path) -> None:
    name, content, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"data\.train.*{message}"):
        prepare(run_of(made, written(tmp_path, name, content), tmp_path / "cache"))


def test_ids_need_their_tokenizer_and_an_objective_of_text(made: Path, tmp_path: Path) -> None:
    run = run_of(made, made / "many.npy", tmp_path)
    with pytest.raises(
        ConfigError, match=r"many\.npy holds token ids, and tokenizer\.path is empty: set"
    ):
        prepare(replace(run, tokenizer=TokenizerConfig(kind="bytes")))
    with pytest.raises(
        ConfigError, match=r"many\.npy is plain text, or ids of it, .* needs records"
    ):
        prepare(run_of(made, made / "many.npy", tmp_path, objective="sft"))
    with pytest.raises(ConfigError, match=r"b\.npy\.gz is not a .*not compressed"):
        prepare(run_of(made, written(tmp_path, "b.npy.gz", b"ids"), tmp_path))


@pytest.mark.slow
def test_a_run_trains_on_ids_and_is_evaluated_on_others(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"tokenizer.path": made, "train.steps": 3, "train.eval_every": 0}
    assert train_here(line(tmp_path / "run", made / "many.npy", changes)) == 0
    np.load(made / "one.npy").tofile(tmp_path / "val.bin")
    capsys.readouterr()
    for text in (tmp_path / "val.bin", made / "one.txt"):
        assert main(["evaluate", str(tmp_path / "run"), "--data.validation", str(text)]) == 0
    told = capsys.readouterr().out.strip().splitlines()
    assert "bits per byte" in told[0] and told[: len(told) // 2] == told[len(told) // 2 :]
