"""The original Transformer's base model (arXiv:1706.03762): 65M parameters, post-norm, with its
schedule and smoothing.

Give it pairs and a shared vocabulary: --data.train 'wmt/train.{en,de}.gz' --data.validation
'wmt/dev.{en,de}.gz'
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    Attention,
    DataConfig,
    Embedding,
    OptimizerConfig,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
)

config = RunConfig(
    run=RunSettings(dir="runs/transformer_base"),
    model=ModelConfig(
        family="encoder_decoder",
        d_model=512,
        n_layers=6,
        n_heads=8,
        d_ff=2048,
        max_length=1024,
        positions="sinusoidal",
        norm="layer",
        norm_placement="post",
        activation="relu",
        bias="all",
        tied_head=True,
        dropout=0.1,
        init="xavier",
        embedding=Embedding(scale="sqrt"),
        # As in section 5.4 of the paper, which drops of embeddings and outputs of sublayers alone.
        attention=Attention(dropout=0.0),
    ),
    data=DataConfig(objective="seq2seq", sequence_length=512),
    tokenizer=TokenizerConfig(vocab_size=37_000, training_bytes=1_000_000_000),
    optimizer=OptimizerConfig(
        # the maximum of the paper's d_model^-0.5 min(step^-0.5, step warmup^-1.5)
        learning_rate=(512 * 4000) ** -0.5,
        schedule="inverse_sqrt",
        warmup_steps=4000,
        b2=0.98,
        eps=1e-9,
        weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=100_000, batch_size=56, label_smoothing=0.1, eval_every=1000, checkpoint_every=1000
    ),
)
