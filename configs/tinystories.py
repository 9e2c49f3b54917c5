"""A 17M-parameter Llama on TinyStories, 327.68M tokens: 256 rows of 256 tokens for 5,000 steps.

Give it the text, documents apart by <|endoftext|>: --data.train TinyStoriesV2-GPT4-train.txt
--data.validation ...-valid.txt
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, RunSettings, TokenizerConfig, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/tinystories", sample_prompt="Once upon a time"),
    model=ModelConfig(
        d_model=512, n_layers=4, n_heads=16, d_ff=1344, max_length=256, init="truncated_normal"
    ),
    data=DataConfig(
        train="TinyStoriesV2-GPT4-train.txt",
        validation="TinyStoriesV2-GPT4-valid.txt",
        sequence_length=256,
    ),
    tokenizer=TokenizerConfig(kind="bpe", vocab_size=10_000, training_bytes=100_000_000),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=250),
    train=TrainConfig(
        steps=5000, batch_size=256, eval_every=500, eval_batches=20, checkpoint_every=500
    ),
)
