"""Runs of two processes that are interrupted and continued: every family, every kind of adapter and
of its base, and every packing."""

import json
import random
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from several import SMALL, finished, launch_all
from tiny_run import assert_same_run, copy, finish, fork, line, saved

from jaxformer.config.adapter import AdapterKind, BaseWeights
from jaxformer.config.run import Packing

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

STEPS = 2
WORDS = ("the", "cat", "dog", "tree", "sees", "likes", "under", "over", "river", "stone")
PLAIN = SMALL | {
    "data.packing": "stream",
    "model.attention.kernel": "xla",
    "model.dropout": 0.0,
    "optimizer.decay_steps": STEPS,
    "tokenizer.vocab_size": 400,
    "train.checkpoint_every": 1,
    "train.eval_every": 0,
    "train.microbatches": 1,
    "train.steps": STEPS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "recurrent": {
        "model.layer_pattern": "dm",
        "model.n_layers": 2,
        "model.feed_forward": "experts",
        "model.experts.n": 4,
        "model.experts.d_ff": 16,
    },
    "encoder": {"model.family": "encoder"},
    "encoder_decoder": {"model.family": "encoder_decoder"},
}
# objective: (family, adapter.kind, adapter.base, data.packing)
ROWS = {
    "causal": ("recurrent", "none", "float32", "best_fit"),
    "mlm": ("encoder", "none", "float32", "best_fit"),
    "prefix": ("encoder_decoder", "prompt", "float32", "stream"),
    "seq2seq": ("encoder_decoder", "lora", "nf4", "documents"),
    "sft": ("decoder", "lora", "nf4_double", "best_fit"),
    "dpo": ("decoder", "lora", "int8", "stream"),
    "orpo": ("decoder", "prefix", "float32", "stream"),
}


def test_the_table_holds_every_family_every_adapter_and_every_packing() -> None:
    families, kinds, bases, packings = (set(column) for column in zip(*ROWS.values(), strict=True))
    assert families == set(FAMILIES)
    assert kinds == set(get_args(AdapterKind)) and bases == set(get_args(BaseWeights))
    assert packings == set(get_args(Packing))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With records of every field, and a model of each family to start from."""
    made = tmp_path_factory.mktemp("kinds")
    rng = random.Random(0)
    with (made / "records.jsonl").open("w") as file:
        for _ in range(80):
            words = rng.choices(WORDS, k=12)
            record = {
                "text": " ".join(words),
                "source": " ".join(words[:4]),
                "target": " ".join(words[4:8]),
                "prompt": " ".join(words[:4]),
                "chosen": f" {words[4]}",
                "rejected": f" {words[5]} {words[6]}",
            }
            file.write(json.dumps(record) + "\n")
    for family, changes in FAMILIES.items():
        made_of = PLAIN | changes | {"train.checkpoint_every": 0}
        finish(fork(line(made / family, made / "records.jsonl", made_of)))
    return made


@pytest.mark.fault(
    "a run of two processes without the checkpoints after its first one, as after a SIGKILL, for"
    " every family, kind of adapter and of base, and packing",
    kept="Continued, the run is the uninterrupted one.",
    status="0",
)
@pytest.mark.parametrize("objective", ROWS)
def test_a_run_of_two_processes_continues_as_the_uninterrupted_one(
    objective: str, folder: Path, tmp_path: Path
) -> None:
    family, kind, base, packing = ROWS[objective]
    changes = PLAIN | FAMILIES[family] | {"data.objective": objective, "data.packing": packing}
    if kind != "none":
        changes |= {"adapter.kind": kind, "run.init_from": folder / family}
    if kind == "lora":
        changes |= {"adapter.rank": 2, "adapter.base": base}
    run_dir = tmp_path / "whole"
    finished(launch_all(2, run_dir, folder / "records.jsonl", changes))
    assert saved(run_dir) == [1, 2]
    ended = copy(run_dir, tmp_path / "ended")
    shutil.rmtree(ended / "checkpoints/2")
    out = finished(launch_all(2, ended, folder / "records.jsonl", changes))[0][1]
    assert f"Continuing {ended} from step 1" in out
    assert saved(ended) == [1, 2]
    assert_same_run(ended, run_dir)
