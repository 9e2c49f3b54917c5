"""Run directories of untrained models of every family, and what commands print of them."""

import base64
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CACHE
from shapes import strong

import jaxformer as jf
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cli import main
from jaxformer.config import with_settings
from jaxformer.config.run import to_json
from jaxformer.runs.directory import RunDirectory
from jaxformer.tokenizer import MARKS, SENTINELS, Tokenizer, train_bpe_tokenizer
from jaxformer.training.state import TrainState

Capture = pytest.CaptureFixture[str]
TEXT = "the cat sees a dog under the tall tree and the dog likes a small cat by the river"
PAIRS = [(f"{a} {b}", f"{b} {a}") for a, b in itertools.pairwise(TEXT.split())]
TOKENIZER = train_bpe_tokenizer([TEXT] * 3, 420, (*MARKS, *SENTINELS[:3]))
SHAPE: dict[str, Any] = dict(
    vocab_size=TOKENIZER.vocab_size + 2, d_model=16, n_layers=1, n_heads=2, d_ff=24, max_length=64
)
RUNS: dict[str, dict[str, Any]] = {
    "decoder": {"n_layers": 2},
    "encoder_decoder": {"family": "encoder_decoder"},
    "masked": {"family": "encoder", "embedding.token_types": 2, "positions": "learned"},
    "classes": {
        "family": "encoder",
        "embedding.token_types": 2,
        "head.kind": "classes",
        "head.n_classes": 3,
    },
    "decoder classes": {"head.kind": "classes", "head.n_classes": 3},
    "tags": {"family": "encoder", "head.kind": "tags", "head.n_classes": 3},
}
LABELS = ("DET", "NOUN", "VERB")


def write_run(folder: Path, name: str, tokenizer: Tokenizer = TOKENIZER) -> Path:
    base, pairs = jf.RunConfig(), folder.with_name("pairs.tsv")
    pairs.write_text(
        "source\ttarget\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS)
    )
    objective = "seq2seq" if name == "encoder_decoder" else "auto"
    data = replace(
        base.data,
        train=str(pairs),
        validation=str(pairs),
        objective=objective,
        sequence_length=32,
        cache_dir=f"{CACHE}/data",
    )
    config = with_settings(jf.ModelConfig(), SHAPE | RUNS[name])
    run = replace(base, run=replace(base.run, dir=str(folder)), model=config, data=data)
    folder.mkdir()
    labels = LABELS if config.head.n_classes else ()
    directory = RunDirectory(run.run.dir)
    record = directory.check_data({"tokenizer": tokenizer.fingerprint()}, labels, {})
    directory.claim(to_json(run), tokenizer, record)
    params = strong(jf.init(config, jax.random.key(0)), size=0.3)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(TrainState(jnp.int32(1), params, {}), 1)
    return folder


def printed(capsys: Capture, *arguments: object) -> str:
    """What a command printed, which ended well."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def page_data(path: Path) -> dict[str, Any]:
    """The data that a page holds, its maps decoded."""
    text = path.read_text()
    found = re.search(r'(\{"title":.*\})', text)
    assert found
    data: dict[str, Any] = json.JSONDecoder().raw_decode(found[1])[0]
    for entry in data["maps"].values():
        steps = np.frombuffer(base64.b64decode(entry["weights"]), "<u2").reshape(entry["shape"])
        entry["weights"] = steps / 65_535
    return data
