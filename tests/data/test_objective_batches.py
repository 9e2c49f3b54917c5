"""Every objective from settings to batches: the invariants that all hold, and one message for what
cannot be learned."""

import functools
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare
from objective_runs import CASES, TEXT, prepared, run_of
from stored import assert_shared, same

from jaxformer.config.run import TokenizerConfig
from jaxformer.data import Batches, evaluation_batches
from jaxformer.files import ConfigError
from jaxformer.runs.objectives import task_of
from jaxformer.tokenizer import byte_tokenizer


@pytest.mark.parametrize("case", CASES)
def test_batches_are_functions_of_seed_and_step_on_any_number_of_processes(
    case: str, tmp_path: Path
) -> None:
    run, corpus = prepared(case, tmp_path)
    made, again = (Batches(corpus.train, run.data, 8, 7) for _ in range(2))
    for step in (made.steps_per_epoch + 1, 0):
        assert same(made[step], again[step])
        assert not same(made[step], Batches(corpus.train, run.data, 8, 8)[step])
    batches = functools.partial(Batches, corpus.train, run.data, 8, 7)
    assert_shared(batches, [made.steps_per_epoch + 1, 0])
    found = list(islice(Batches(corpus.train, run.data, 8, 7).iterate(3), 4))
    assert all(same(batch, made[3 + offset]) for offset, batch in enumerate(found))
    shapes = {name: (array.shape[1], array.dtype.name) for name, array in made[0].items()}
    single = {"next_sentence", "next_sentence_weights"} | (
        {"targets", "weights"} if "classes" in case else set()
    )
    assert shapes == {
        name: (1 if name in single else 32, "float32" if "weights" in name else "int32")
        for name in made[0]
    }


@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_the_same_each_time_and_is_filled_up_with_no_weight(
    case: str, tmp_path: Path
) -> None:
    run, corpus = prepared(case, tmp_path)
    size = len(corpus.validation) + 1
    (first,), (again,) = (
        list(evaluation_batches(corpus.validation, run.data, size)) for _ in range(2)
    )
    assert same(first, again)
    assert all(not array[-1].any() for array in first.values())
    assert first["weights"][:-1].any(1).all()


def test_each_epoch_and_each_seed_masks_anew(tmp_path: Path) -> None:
    run, corpus = prepared("mlm words", tmp_path)
    size = len(corpus.train)

    def masks(seed: int, epoch: int) -> dict[bytes, bytes]:
        batches = Batches(corpus.train, run.data, 1, seed)
        found = (batches[step] for step in range(epoch * size, (epoch + 1) * size))
        return {batch["targets"].tobytes(): batch["weights"].tobytes() for batch in found}

    first = masks(7, 0)
    for other in (masks(7, 1), masks(8, 0)):
        assert first.keys() == other.keys()
        assert sum(first[row] != other[row] for row in first) > 0.9 * len(first)


def test_auto_is_what_the_model_is_for() -> None:
    expected = {"decoder": "causal", "encoder": "mlm", "encoder_decoder": "span_corruption"}
    for family, objective in expected.items():
        run = run_of(family)
        assert task_of(run.model, run.data).name == objective


BOTH = "encoder_decoder"
# Family, settings of the model, settings of the data, and the words of the message.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("decoder", {}, {"objective": "mlm"}, r"mlm needs model\.family encoder and .*\(causal, sft,"),
    ("encoder", {}, {"objective": "causal"}, r"causal needs model\.family decoder"),
    ("encoder", {}, {"objective": "classes"}, r"needs .*kind=classes, .*kind=masked"),
    (BOTH, {}, {"packing": "documents"}, r"packing=documents cannot .*=span_corruption"),
    (BOTH, {}, {"packing": "best_fit"}, r"packing=best_fit cannot .*=span_corruption"),
    ("encoder", {"head.next_sentence": True}, {"packing": "documents"}, r"cannot .*next_sentence"),
    ("encoder", {}, {"sequence_length": 4}, r"sequence_length=4, .* at least 8 tokens"),
    (
        BOTH,
        {},
        {"objective": "seq2seq"},
        r"a\.txt is plain text, or ids of it, and data\.objective",
    ),
    ("encoder", {}, {"tokenizer": ""}, r"tokenizer\.path=.* has no \[CLS\], \[SEP\], \[MASK\]"),
    (BOTH, {}, {"tokenizer": ""}, r"has no <extra_id_0> and so on, which .*=span_corruption"),
    (
        "encoder",
        {"head.next_sentence": True},
        {"sequence_length": 9000},
        r"takes 26,991: give more",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_learnt_is_one_message(case: int, tmp_path: Path) -> None:
    family, model, changes, message = REFUSED[case]
    (tmp_path / "a.txt").write_text(TEXT)
    data = {"train": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path / "cache")} | changes
    tokenizer = TokenizerConfig(kind="bytes")
    if "tokenizer" in data:
        del data["tokenizer"]
        byte_tokenizer().save(tmp_path / "tokenizer.json")
        tokenizer = TokenizerConfig(path=str(tmp_path))
    run = replace(run_of(family, model, **data), tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=message):
        Batches(prepare(run).train, run.data, 2, 0)
