"""A small T5 (v1.1's gated feed-forward, its own output layer) on the standard library's source."""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    Attention,
    DataConfig,
    OptimizerConfig,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
)

config = RunConfig(
    run=RunSettings(
        dir="runs/t5_tiny",
        sample_prompt="def __init__(self, <extra_id_0>):\n        self.<extra_id_1> = ",
    ),
    model=ModelConfig(
        family="encoder_decoder",
        d_model=192,
        n_layers=3,
        n_heads=3,
        d_ff=512,
        max_length=128,
        positions="t5",
        norm="rms",
        norm_eps=1e-6,
        activation="geglu_tanh",
        init="fan_in",
        attention=Attention(scale=1.0),
    ),
    data=DataConfig(train="stdlib", sequence_length=32, source_length=128),
    tokenizer=TokenizerConfig(vocab_size=4096, training_bytes=4_000_000),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, schedule="linear", warmup_steps=100, final_fraction=0.0, b2=0.98
    ),
    train=TrainConfig(
        steps=1500,
        batch_size=32,
        log_every=20,
        eval_every=500,
        eval_batches=20,
        checkpoint_every=500,
    ),
)
