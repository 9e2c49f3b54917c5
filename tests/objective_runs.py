"""A run of every objective, on records or a text that are made for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from corpora import prepare

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.config.settings import with_settings


def run_of(family: str, model: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    settings: Any = {"family": family, **(model or {})}
    return RunConfig(model=with_settings(ModelConfig(), settings), data=DataConfig(**data))


TEXT = "<|endoftext|>".join(
    f"the {index}th tale of the {'very ' * (index % 7)}old king and his hat" for index in range(200)
)

RECORDS = [
    {
        "source": f"ein Hut {i}",
        "target": f"a hat {i}",
        "text": f"hat {i} here",
        "label": "ab"[i % 2],
        "tags": ["A", "B", "A"],
    }
    for i in range(200)
]

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal": ("decoder", {}, {}),
    "causal best fit": ("decoder", {}, {"packing": "best_fit"}),
    "mlm": ("encoder", {"head.next_sentence": True, "embedding.token_types": 2}, {}),
    "mlm words": ("encoder", {}, {"mask_units": "words", "packing": "documents"}),
    "mlm best fit": ("encoder", {}, {"packing": "best_fit"}),
    "span_corruption": ("encoder_decoder", {}, {}),
    "prefix": ("encoder_decoder", {}, {}),
    "seq2seq": ("encoder_decoder", {}, {}),
    "sft": ("decoder", {}, {}),
    "classes": (
        "encoder",
        {"head.kind": "classes", "embedding.token_types": 2},
        {"pair_field": "target"},
    ),
    "classes of a decoder": ("decoder", {"head.kind": "classes"}, {}),
    "token_classification": ("encoder", {"head.kind": "tags"}, {"label_field": "tags"}),
}

OF_RECORDS = ("seq2seq", "sft", "classes", "token_classification")


def prepared(case: str, folder: Path, **changes: Any) -> tuple[RunConfig, Any]:
    family, model, data = CASES[case]
    objective = case.split()[0]
    path = folder / ("data.jsonl" if objective in OF_RECORDS else "data.txt")
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in RECORDS) if objective in OF_RECORDS else TEXT
    )
    data = {"train": str(path), "cache_dir": str(folder / "cache"), "sequence_length": 32} | data
    run = run_of(family, model, **data, objective=objective)
    run = replace(run, tokenizer=TokenizerConfig(vocab_size=400), **changes)
    return run, prepare(run)
