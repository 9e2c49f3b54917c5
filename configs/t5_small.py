"""T5 small (arXiv:1910.10683): 60M parameters, span corruption.

Give it text: --data.train 'corpus/*.jsonl.zst' [--data.objective prefix]
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    Attention,
    DataConfig,
    Head,
    OptimizerConfig,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
)

config = RunConfig(
    run=RunSettings(dir="runs/t5_small"),
    model=ModelConfig(
        family="encoder_decoder",
        d_model=512,
        n_layers=6,
        n_heads=8,
        head_dim=64,
        d_ff=2048,
        max_length=512,
        positions="t5",
        norm="rms",
        norm_eps=1e-6,
        activation="relu",
        tied_head=True,
        dropout=0.1,
        init="fan_in",
        # The paper drops 0.1 of the attention weights too; without, GPUs take fused attention (see
        # bert_base.py). The paper's: --model.attention.dropout auto.
        attention=Attention(scale=1.0, dropout=0.0),
        head=Head(scale="rsqrt"),
    ),
    data=DataConfig(sequence_length=128, source_length=512),
    tokenizer=TokenizerConfig(vocab_size=32_128, training_bytes=1_000_000_000),
    optimizer=OptimizerConfig(
        name="adafactor",
        learning_rate=1e-2,
        schedule="inverse_sqrt",
        warmup_steps=10_000,
        weight_decay=0.0,
    ),
    train=TrainConfig(
        steps=524_288, batch_size=128, eval_every=5000, eval_batches=50, checkpoint_every=5000
    ),
)
