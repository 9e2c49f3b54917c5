"""The quickstart with a recurrent mixer, the gated delta rule, in three layers of four."""

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, RunSettings, TokenizerConfig, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/hybrid_small", sample_prompt="def __init__(self, "),
    model=ModelConfig(
        d_model=128, n_layers=4, n_heads=2, layer_pattern="dddm", max_length=256, tied_head=True
    ),
    data=DataConfig(train="stdlib", sequence_length=256),
    tokenizer=TokenizerConfig(kind="bpe", vocab_size=4096, training_bytes=4_000_000),
    optimizer=OptimizerConfig(
        name="muon", learning_rate=6e-3, warmup_steps=40, schedule="linear", final_fraction=0.0
    ),
    train=TrainConfig(
        steps=600, batch_size=8, log_every=5, eval_every=50, eval_batches=8, checkpoint_every=100
    ),
)
