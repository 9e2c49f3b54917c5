"""A small BERT on the standard library's source, in minutes; `classifier` tells its packages apart.

python train.py configs/bert_tiny.py
python examples/stdlib_packages.py && python train.py configs/bert_tiny.py:classifier
"""

from dataclasses import replace

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    DataConfig,
    Embedding,
    Head,
    OptimizerConfig,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
    with_settings,
)

config = RunConfig(
    run=RunSettings(dir="runs/bert_tiny"),
    model=ModelConfig(
        family="encoder",
        d_model=192,
        n_layers=4,
        n_heads=3,
        max_length=128,
        positions="learned",
        norm="layer",
        norm_placement="post",
        activation="gelu",
        bias="all",
        tied_head=True,
        init="xavier",
        embedding=Embedding(norm=True, token_types=2),
        head=Head(next_sentence=True),
    ),
    data=DataConfig(train="stdlib", sequence_length=128),
    tokenizer=TokenizerConfig(vocab_size=4096, training_bytes=4_000_000),
    optimizer=OptimizerConfig(
        name="muon", learning_rate=4e-3, schedule="linear", warmup_steps=50, final_fraction=0.0
    ),
    train=TrainConfig(steps=800, batch_size=32, log_every=20, eval_batches=20),
)
classifier = replace(
    config,
    run=replace(config.run, dir="runs/bert_tiny_classifier", init_from="runs/bert_tiny"),
    model=with_settings(
        config.model, {"head.kind": "classes", "head.next_sentence": False, "dropout": 0.1}
    ),
    data=replace(config.data, train="packages/train.jsonl", validation="packages/validation.jsonl"),
    optimizer=replace(config.optimizer, name="adamw", learning_rate=3e-4, b2=0.98, warmup_steps=30),
    train=replace(config.train, steps=150, eval_every=50, eval_batches=0, checkpoint_every=50),
)
scratch = replace(
    classifier, run=replace(classifier.run, dir="runs/bert_tiny_scratch", init_from="")
)
