"""TinyLlama's shape, 1.1B parameters (arXiv:2401.02385).

Give it text and a tokenizer: --data.train 'corpus/*.jsonl.zst' --tokenizer.path
llama/tokenizer.json
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, RunSettings, TokenizerConfig, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/llama_1b"),
    model=ModelConfig(
        vocab_size=32_000,
        d_model=2048,
        n_layers=22,
        n_heads=32,
        n_kv_heads=4,
        d_ff=5632,
        max_length=2048,
    ),
    data=DataConfig(sequence_length=2048),
    tokenizer=TokenizerConfig(vocab_size=32_000, training_bytes=1_000_000_000),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000,
        batch_size=256,
        microbatches=16,
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
    ),
)
