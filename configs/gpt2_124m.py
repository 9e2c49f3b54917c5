"""GPT-2 124M (Radford et al. 2019) with the hyperparameters of its usual reproductions.

Give it text and a tokenizer: --data.train 'corpus/*.jsonl.zst' --tokenizer.path gpt2/tokenizer.json
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, RunSettings, TokenizerConfig, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/gpt2_124m"),
    model=ModelConfig(
        vocab_size=50_304,  # 50,257 padded to a multiple of 128
        d_model=768,
        n_layers=12,
        n_heads=12,
        max_length=1024,
        positions="learned",
        norm="layer",
        activation="gelu_tanh",
        bias="all",
        tied_head=True,
    ),
    data=DataConfig(sequence_length=1024),
    tokenizer=TokenizerConfig(vocab_size=50_257, training_bytes=1_000_000_000),
    optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
    train=TrainConfig(
        steps=19_073,
        batch_size=512,
        microbatches=8,
        eval_every=500,
        eval_batches=20,
        checkpoint_every=1000,
    ),
)
