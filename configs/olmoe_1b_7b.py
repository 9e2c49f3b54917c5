"""OLMoE's shape, 6.9B parameters of which a token uses 1.3B: 64 experts, 8 of a token
(arXiv:2409.02060).

Give it text and a tokenizer: --data.train 'corpus/*.jsonl.zst' --tokenizer.path
olmoe/tokenizer.json. On eight devices: --mesh.expert 8
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    Attention,
    DataConfig,
    Experts,
    OptimizerConfig,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
)

config = RunConfig(
    run=RunSettings(dir="runs/olmoe_1b_7b"),
    model=ModelConfig(
        vocab_size=50_304,
        d_model=2048,
        n_layers=16,
        n_heads=16,
        feed_forward="experts",
        max_length=4096,
        init="truncated_normal",
        attention=Attention(query_key_norm="width"),
        experts=Experts(
            n=64, per_token=8, d_ff=1024, renormalize=False, balance_loss=0.01, z_loss=0.001
        ),
    ),
    data=DataConfig(sequence_length=4096),
    tokenizer=TokenizerConfig(vocab_size=50_304, training_bytes=1_000_000_000),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2500),
    train=TrainConfig(
        steps=100_000,
        batch_size=256,
        microbatches=16,
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
    ),
)
