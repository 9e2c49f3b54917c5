"""Examples that are longer than a row: an answer keeps its beginning, and an example of which
nothing is learned is in no row, which is said, or refused where no other is left."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import write_lines
from corpora import prepare

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data.documents import Piece
from jaxformer.data.examples import ExampleStore, Parts, open_or_encode
from jaxformer.data.rows import RowFormat
from jaxformer.data.templates import (
    ExampleRows,
    MessagesTemplate,
    PreferenceTemplate,
    SFTTemplate,
    TagTemplate,
    Template,
)
from jaxformer.files import ConfigError
from jaxformer.runs.objectives import objective_of
from jaxformer.tokenizer import byte_tokenizer

END = byte_tokenizer().end_token
LONG = {"source": "0123456789abcdef", "target": "YES!"}
SHORT = {"source": "01", "target": "no"}


def run_of(folder: Path, records: list[dict[str, Any]], **data: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "train": str(write_lines(folder / "answers.jsonl", records)),
        "validation_fraction": 0.0,
        "cache_dir": str(folder / "cache"),
        "objective": "sft",
        "sequence_length": 12,
    }
    return RunConfig(
        run=dataclasses.replace(RunConfig().run, dir=str(folder / "run")),
        data=DataConfig(**(settings | data)),
        tokenizer=TokenizerConfig(kind="bytes"),
    )


def test_a_prompt_longer_than_a_row_loses_its_start_and_the_answer_keeps_its_beginning(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    row = prepare(run_of(tmp_path, [LONG]), said.append).train[0]
    assert row["tokens"].tolist() == [*b"89abcdefYES!"]
    assert row["targets"].tolist() == [*b"9abcdefYES!", END]
    assert row["weights"].tolist() == [0] * 7 + [1] * 5
    assert any("1 of 1 examples are longer than a row, and are cut at the start" in x for x in said)
    answer = {"source": LONG["source"], "target": "YES!" * 5}  # the prompt keeps half a row
    row = prepare(run_of(tmp_path, [answer])).train[0]
    assert row["tokens"].tolist() == [*b"abcdefYES!YE"] and row["weights"].sum() == 7


def test_examples_without_a_target_are_left_out_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    corpus = prepare(run_of(tmp_path, [LONG, SHORT, LONG], cut="end"), said.append)
    assert any("train: 2 of 3 examples (67%) are left out" in x for x in said), said
    assert any("data.cut=prompt" in x for x in said)
    rows = [corpus.train[index] for index in range(len(corpus.train))]
    assert [row["tokens"][:5].tolist() for row in rows] == [[*b"01no", 0]]
    assert all(row["weights"].any() for row in rows)
    kept = prepare(run_of(tmp_path, [LONG, SHORT, LONG], cut="prompt"))
    assert corpus.train.fingerprint != kept.train.fingerprint  # so neither run continues the other


@pytest.mark.parametrize("side", ["train", "validation"])
def test_where_no_example_has_a_target_the_run_is_refused(side: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, [LONG, LONG], cut="end")
    if side == "validation":
        other = str(write_lines(tmp_path / "short.jsonl", [SHORT]))
        held = dataclasses.replace(run.data, validation=run.data.train, train=other)
        run = dataclasses.replace(run, data=held)
    message = (
        rf"^data\.{side}=.*none of its 2 examples has anything to learn .*data\.sequence_length=12;"
        r" the longest takes 20 tokens.*data\.cut=prompt"
    )
    with pytest.raises(ConfigError, match=message):
        prepare(run)


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def records_of(kind: type[Template]) -> list[tuple[Any, ...]]:
    """Records with parts of every length from 0 to more than a row."""
    texts = ["x" * size for size in (0, 1, 2, 5, 7, 8, 9, 20)]
    if kind is SFTTemplate:
        return [(prompt, answer) for prompt in texts for answer in texts]
    if kind is PreferenceTemplate:
        return [(prompt, one, two) for prompt in texts for one in texts[1:] for two in texts[1:]]
    if kind is TagTemplate:
        return [((), ()), *((("ab",) * size, ("N",) * size) for size in (1, 3, 9))]
    roles = ("user", "assistant", "user", "assistant")
    turns = [(a, b, c, "y") for a in texts for b in texts for c in texts[::3]]
    return [
        (tuple(json.dumps({"role": r, "content": t}) for r, t in zip(roles, each, strict=True)),)
        for each in turns
    ]


def store_of(folder: Path, template: Template, records: list[tuple[Any, ...]]) -> ExampleStore:
    def encode(batch: list[Any], labels: dict[str, int]) -> list[Parts]:
        # Nothing of the first record is learned, as of a template that writes no answer.
        first, *others = template.encode(batch, labels)
        lost = list(first)
        if isinstance(template, PreferenceTemplate | MessagesTemplate):
            lost[-1] = []
        return [tuple(lost), *others]

    return open_or_encode(folder, lambda: [Piece("", "", True, each) for each in records], encode)


@pytest.mark.parametrize("cut", ["prompt", "end"])
@pytest.mark.parametrize("kind", [SFTTemplate, MessagesTemplate, PreferenceTemplate, TagTemplate])
def test_the_examples_in_rows_are_those_with_a_weight(
    kind: type[Template], cut: str, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.metadata = dataclasses.replace(tokenizer.metadata, template=CHAT)
    for length in (8, 9, 13):
        template = kind(RowFormat(length, length, cut=cut), tokenizer)
        store = store_of(tmp_path / str(length), template, records_of(kind))
        weights = [template.arrays(*store[index])["weights"] for index in range(len(store))]
        expected = np.array([bool(each.any(-1).all()) for each in weights])
        assert not expected.all() and expected.any()
        rows = ExampleRows(store, template, seed=0)
        members = np.concatenate([rows.members(index) for index in range(len(rows))])
        assert sorted(members.tolist()) == np.flatnonzero(expected).tolist()
        assert rows.left_out == (~expected).sum()


def test_a_cut_of_another_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.cut=end says how .*sft.*=causal: leave it out"):
        objective_of(ModelConfig(), DataConfig(objective="causal", cut="end"))
