"""The original Transformer, small, on German to English: 29,000 pairs of Multi30k
(arXiv:1605.00459).

Give it the files: --data.train 'multi30k/train.{de,en}.gz' --data.validation
'multi30k/val.{de,en}.gz'
"""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import (
    DataConfig,
    Embedding,
    OptimizerConfig,
    RunSettings,
    TokenizerConfig,
    TrainConfig,
)

config = RunConfig(
    run=RunSettings(
        dir="runs/transformer_multi30k", sample_prompt="Ein Hund läuft über eine Wiese."
    ),
    model=ModelConfig(
        family="encoder_decoder",
        d_model=256,
        n_layers=3,
        n_heads=4,
        d_ff=512,
        max_length=256,
        positions="sinusoidal",
        norm="layer",
        norm_placement="pre",
        activation="relu",
        bias="all",
        tied_head=True,
        dropout=0.15,
        init="xavier",
        embedding=Embedding(scale="sqrt"),
    ),
    data=DataConfig(objective="seq2seq", sequence_length=128),
    tokenizer=TokenizerConfig(vocab_size=6000),
    optimizer=OptimizerConfig(
        learning_rate=2e-3,
        schedule="linear",  # in so few epochs, a better BLEU than with the paper's inverse_sqrt
        warmup_steps=200,
        final_fraction=0.0,
        b2=0.98,
        eps=1e-9,
        weight_decay=0.0,
    ),
    train=TrainConfig(steps=1600, batch_size=32, label_smoothing=0.1, log_every=20),
)
