"""An objective that somebody outside the package adds: a row, its template, and a field of its
own."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from corpora import prepare

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Batches, NumpyBatch, RowFormat, Template
from jaxformer.data.examples import Labels, Parts
from jaxformer.data.sources.records import Record, RecordField
from jaxformer.files import ConfigError
from jaxformer.runs import objectives
from jaxformer.runs.objectives import Objective, task_of
from jaxformer.tokenizer import Tokenizer

REJECTED = RecordField("", "rejected", "text")


class Preferences(Template):
    """A prompt with the answer that is preferred, and with the one that is not: two rows a pair."""

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.lengths["rejected"] = self.length

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        return zip(*(self.ids(records, field) for field in range(3)), strict=True)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return (lengths[:, 0] + lengths[:, 1:].max(1) + 1)[:, None]

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, chosen, rejected = parts
        found = {
            "tokens": np.concatenate([prompt, chosen, [self.end]]),
            "rejected": np.concatenate([prompt, rejected, [self.end]]),
        }
        return {name: ids[: self.length].astype(np.int32) for name, ids in found.items()}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    row = Objective(("decoder",), "language", ("source", "target", REJECTED), template=Preferences)
    monkeypatch.setattr(objectives, "OBJECTIVES", {"preferences": row})  # so that auto finds it
    path = tmp_path / "pairs.jsonl"
    lines = [{"source": "q", "target": "yes", "rejected": "no" * index} for index in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(
        train=str(path), cache_dir=str(tmp_path / "cache"), sequence_length=16, prefetch=0
    )
    return RunConfig(data=data, tokenizer=TokenizerConfig(kind="bytes"))


def test_a_row_of_the_table_is_an_objective(run: RunConfig) -> None:
    task = task_of(run.model, run.data)
    assert task.name == "preferences" and task.fields[2] is REJECTED and not task.every_token
    assert [field.setting for field in task.fields] == [
        "data.source_field",
        "data.target_field",
        "",
    ]
    corpus = prepare(run)
    row = corpus.train[0]
    assert row["tokens"][:5].tolist() == [*b"qyes", 256]
    count = row["rejected"].tolist().index(256)
    assert bytes(row["rejected"][:count].tolist()) == b"q" + b"no" * ((count - 1) // 2)
    batch = Batches(corpus.train, run.data, 2, 0)[0]
    assert batch["tokens"].shape == batch["rejected"].shape == (2, 16)


def test_a_field_without_a_setting_is_named_where_it_is_missing(run: RunConfig) -> None:
    path = Path(run.data.train)
    path.write_text('{"source": "q", "target": "yes"}\n')
    with pytest.raises(
        ConfigError, match=r"no field 'rejected' .*: data\.objective reads the text there"
    ):
        prepare(run)
    path.write_text('{"source": "q", "target": "yes", "rejected": 3}\n')
    with pytest.raises(ConfigError, match=r"'rejected' is int, not a string; see data\.objective"):
        prepare(run)
    text = path.with_suffix(".txt")
    text.write_text("plain")
    with pytest.raises(
        ConfigError, match=r"text \(data\.target_field=target\) and text \(rejected\)"
    ):
        prepare(RunConfig(data=DataConfig(train=str(text)), tokenizer=run.tokenizer))


def test_what_its_rows_are_not_made_for_is_refused(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"data\.objective=preferences takes at least 8 tokens"):
        task_of(ModelConfig(), DataConfig(sequence_length=7))
