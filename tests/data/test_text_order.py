"""Rows in the order of the text (data.order=text): a function of the step, and read while the text
is tokenized."""

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import prepare
from stored import BYTES, assert_shared, data, rows_of, same, stored

from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig, to_json
from jaxformer.config.train import TrainConfig
from jaxformer.data import Batches, RowBlocks, TokenStore
from jaxformer.data import store as store_files
from jaxformer.files import ConfigError
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.run_evaluation import _on_text
from jaxformer.runs.setup import make_setup
from jaxformer.runs.summary import summary

IN_ORDER = data(8, order="text")


def ordered(made: TokenStore, size: int, *blocks: RowBlocks) -> Batches:
    return Batches(rows_of(made, IN_ORDER), IN_ORDER, size, 7, *blocks)


def test_rows_come_as_the_text_has_them_each_time_anew_for_any_number_of_processes() -> None:
    with stored([20] * 3) as made:  # 63 tokens with the end tokens: 8 rows
        batches = ordered(made, 4)
        assert [batches.row_numbers(step) for step in range(3)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [0, 1, 2, 3],
        ]
        assert same(batches[10**9], batches[0])
        assert (batches[1]["tokens"][0] == made.read(32, 40)).all()
        assert_shared(functools.partial(ordered, made, 4), [0, 3])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A head of 60 characters, and shards of 100, of which all but the first wait for this
    event."""
    go_on, write = threading.Event(), store_files.write_index

    def written(path: Path, *rest: Any) -> store_files.Shard:
        assert path.name == "00000" or go_on.wait(60)
        return write(path, *rest)

    monkeypatch.setattr(store_files, "HEAD_CHARACTERS", 60)
    monkeypatch.setattr(store_files, "SHARD_CHARACTERS", 100)
    monkeypatch.setattr(store_files, "write_index", written)
    return go_on


def run_of(folder: Path, order: str, **more: Any) -> RunConfig:
    (folder / "text").mkdir(exist_ok=True)
    for name in "ab":
        tales = [f"the {number}th {name} tale of an old king" for number in range(20)]
        (folder / "text" / f"{name}.txt").write_text("<|endoftext|>".join(tales))
    settings: Any = {"validation_fraction": 0.0, "sequence_length": 8} | more
    train, cache = str(folder / "text"), str(folder / "cache")
    config = DataConfig(train=train, cache_dir=cache, order=order, **settings)  # type: ignore[arg-type]
    return RunConfig(data=config, tokenizer=TokenizerConfig(kind="bytes"))


def test_batches_begin_while_the_text_is_tokenized_and_are_those_of_the_whole_text(
    slow: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxformer.data.source.GROUP_BYTES", 1)  # each file has a store
    run, said = run_of(tmp_path, "text"), list[str]()
    corpus = prepare(run, said.append)
    batches = Batches(corpus.train, run.data, 4, 7)
    first = batches[0]
    assert not [*(tmp_path / "cache" / "stores").glob("*/manifest.json")]
    assert any(line.startswith("train: tokens in the making, 1,674 bytes") for line in said)
    slow.set()
    again = prepare(run)
    assert again.train.tokens == corpus.train.tokens
    assert again.train.fingerprint == corpus.train.fingerprint
    whole = Batches(again.train, run.data, 4, 7)
    assert same(first, whole[0]) and batches.steps_per_epoch == whole.steps_per_epoch
    for step in range(2 * whole.steps_per_epoch):
        assert same(batches[step], whole[step])


@pytest.mark.timeout(120)
def test_a_run_says_what_it_does_while_its_text_is_tokenized(
    slow: threading.Event, tmp_path: Path
) -> None:
    run = dataclasses.replace(run_of(tmp_path, "text"), train=TrainConfig(batch_size=4))
    setup = make_setup(run, lambda line: None)
    assert "tokens in the making" in summary(setup)["data"]
    slow.set()
    assert setup.corpus.train.tokens


def test_what_stops_the_making_is_raised_by_the_next_read(
    slow: threading.Event, tmp_path: Path
) -> None:
    corpus = prepare(run_of(tmp_path, "text"))
    (tmp_path / "text" / "b.txt").write_text("another tale")
    slow.set()
    with pytest.raises(ConfigError, match="its files changed while they were read"):
        np.array(corpus.train[100]["tokens"])


def test_a_byte_that_is_no_utf8_is_named_when_its_part_is_read(
    slow: threading.Event, tmp_path: Path
) -> None:
    run = run_of(tmp_path, "text")
    with open(tmp_path / "text" / "b.txt", "ab") as file:
        at = file.tell()
        file.write(b"\xff")
    slow.set()
    corpus = prepare(run)
    assert corpus.train[0]["tokens"].any() and not [*(tmp_path / "cache" / "scans").iterdir()]
    with pytest.raises(ConfigError, match=f"b.txt is not UTF-8 text: byte 0xff at offset {at}"):
        assert corpus.train[100]


def test_a_text_is_known_by_samples_of_it_wherever_it_is(
    slow: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxformer.data.source.SAMPLES", 1)
    monkeypatch.setattr("jaxformer.data.source.SAMPLE_BYTES", 8)
    slow.set()
    run = run_of(tmp_path, "text")
    first = prepare(run).train
    assert len(first)
    folder = tmp_path / "text"
    copy = folder.rename(tmp_path / "copy")
    elsewhere = dataclasses.replace(run, data=dataclasses.replace(run.data, train=str(copy)))
    moved = prepare(elsewhere).train
    assert moved.fingerprint == first.fingerprint and len(moved) == len(first)
    # Between the samples, of the same size: the run would go on with another text.
    text = (copy / "b.txt").read_text()
    (copy / "b.txt").write_text(text.replace("an old king", "an odd king"))
    altered = prepare(elsewhere).train
    for _ in range(2):  # when it is read, and when it is known from that
        with pytest.raises(ConfigError, match="was altered, in places by which it is not known"):
            assert len(altered)
        altered = prepare(elsewhere).train
    (copy / "b.txt").write_text(text + "!")
    assert prepare(elsewhere).train.fingerprint != first.fingerprint


def test_its_bpe_is_made_of_the_beginning(tmp_path: Path) -> None:
    run = run_of(tmp_path, "text")
    settings = TokenizerConfig(vocab_size=300, training_bytes=500)
    made = prepare(dataclasses.replace(run, tokenizer=settings)).tokenizer
    text = (tmp_path / "text" / "a.txt").read_text()
    (tmp_path / "text" / "b.txt").unlink()
    (tmp_path / "text" / "a.txt").write_text(text[:800])
    again = prepare(dataclasses.replace(run, tokenizer=settings)).tokenizer
    assert made.fingerprint() == again.fingerprint()


def test_held_out_text_is_tokenized_before(slow: threading.Event, tmp_path: Path) -> None:
    slow.set()
    corpus = prepare(run_of(tmp_path, "text", validation_fraction=0.5))
    assert corpus.validation and type(corpus.train.store) is TokenStore


def test_an_evaluation_reads_no_rows_to_train_on(tmp_path: Path) -> None:
    BYTES.save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(to_json(run_of(tmp_path, "text")))
    files = ModelFiles(tmp_path)
    text = str(tmp_path / "text" / "a.txt")
    cache = str(tmp_path / "cache")
    read = _on_text(files, text, train="", init_from="", cache_dir=cache)
    corpus = prepare(read)
    assert corpus.validation and type(corpus.train.store) is TokenStore
    with pytest.raises(ConfigError, match="held out no text"):
        _on_text(files, "", train="", init_from="", cache_dir=cache)
