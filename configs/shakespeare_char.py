"""nanoGPT's character model of Shakespeare: `config` is its CPU size, `shakespeare_char.py:gpu` its
GPU size.

The CPU size learns at three times nanoGPT's rate, which its short run needs: 0.1 nats lower.

Give it the text: --data.train PATH/tinyshakespeare.txt
"""

from dataclasses import replace

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, RunSettings, TokenizerConfig, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/shakespeare_char"),
    model=ModelConfig(
        vocab_size=66,  # 65 characters and the end-of-text token
        d_model=128,
        n_layers=4,
        n_heads=4,
        max_length=64,
        positions="learned",
        norm="layer",
        activation="gelu",
        tied_head=True,
    ),
    data=DataConfig(train="tinyshakespeare.txt", sequence_length=64),
    tokenizer=TokenizerConfig(kind="characters"),
    optimizer=OptimizerConfig(learning_rate=3e-3, b2=0.99, warmup_steps=100),
    train=TrainConfig(
        steps=2000,
        batch_size=12,
        log_every=10,
        eval_every=500,
        eval_batches=50,
        checkpoint_every=1000,
    ),
)
gpu = replace(
    config,
    run=replace(config.run, dir="runs/shakespeare_char_gpu"),
    model=replace(config.model, d_model=384, n_layers=6, n_heads=6, max_length=256, dropout=0.2),
    data=replace(config.data, sequence_length=256),
    optimizer=replace(config.optimizer, learning_rate=1e-3),
    train=replace(config.train, steps=5000, batch_size=64),
)
