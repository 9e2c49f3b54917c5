"""Mixtral's shape, 46.7B parameters of which a token uses 12.9B: 8 experts, 2 of a token
(arXiv:2401.04088).

Give it text and a tokenizer: --data.train 'corpus/*.jsonl.zst' --tokenizer.path
mixtral/tokenizer.json. On 64 devices: --mesh.expert 8 --mesh.fsdp 8
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    DataConfig,
    Experts,
    OptimizerConfig,
    Rope,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
)

config = RunConfig(
    run=RunSettings(dir="runs/mixtral_8x7b"),
    model=ModelConfig(
        vocab_size=32_000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        feed_forward="experts",
        max_length=4096,
        experts=Experts(n=8, per_token=2, d_ff=14_336, balance_loss=0.02),
        rope=Rope(theta=1e6),
    ),
    data=DataConfig(sequence_length=4096),
    tokenizer=TokenizerConfig(vocab_size=32_000, training_bytes=1_000_000_000),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000,
        batch_size=256,
        microbatches=16,
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
    ),
)
