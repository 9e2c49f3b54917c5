"""Tells the topics of docstrings apart: a sentence model that is fine-tuned, and a BERT of its
shape from scratch.

python examples/stdlib_docstrings.py
python train.py configs/topics.py --run.init_from DIRECTORY
python train.py configs/topics.py:scratch --tokenizer.path DIRECTORY

DIRECTORY is all-MiniLM-L6-v2 or another BERT; `scratch` has the shape of that one.
"""

from dataclasses import replace

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    DataConfig,
    Head,
    OptimizerConfig,
    RunSettings,
    TrainConfig,
    with_settings,
)

config = RunConfig(
    run=RunSettings(dir="runs/topics"),
    model=ModelConfig(family="encoder", head=Head(kind="classes")),
    data=DataConfig(
        train="topics/train.jsonl", validation="topics/validation.jsonl", sequence_length=48
    ),
    optimizer=OptimizerConfig(
        learning_rate=2e-4, b2=0.98, warmup_steps=10, schedule="linear", final_fraction=0.0
    ),
    train=TrainConfig(steps=100, batch_size=16, eval_every=100, eval_batches=0, log_every=10),
)
scratch = replace(
    config,
    run=RunSettings(dir="runs/topics_scratch"),
    model=with_settings(
        config.model,
        {
            "d_model": 384,
            "n_layers": 6,
            "n_heads": 12,
            "d_ff": 1536,
            "max_length": 512,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "post",
            "norm_eps": 1e-12,
            "activation": "gelu",
            "bias": "all",
            "embedding.norm": True,
            "embedding.token_types": 2,
            "head.pooler": True,
            "tied_head": True,
        },
    ),
)
