"""A model learns from a reward of the answers that it writes itself (GRPO, arXiv:2402.03300).

    python examples/grpo.py > brackets.jsonl
    python train.py configs/grpo.py --run.init_from runs/quickstart

For a task of your own, name its prompts by data.train and its reward by grpo.reward.
"""

from jaxformer import RunConfig
from jaxformer.config import DataConfig, GRPOConfig, OptimizerConfig, RunSettings, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/grpo"),
    data=DataConfig(
        train="brackets.jsonl",
        objective="grpo",
        source_length=32,
        sequence_length=48,
        target_field="",
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, schedule="constant", warmup_steps=0, weight_decay=0
    ),
    # 8 prompts a step, each answered 8 times. The divergence from the model at the start keeps the
    # text Python.
    grpo=GRPOConfig(
        reward="examples.grpo:rewards_of", group=8, new_tokens=16, kl=0.02, lengths="tokens"
    ),
    train=TrainConfig(steps=100, batch_size=64, eval_every=50, checkpoint_every=50),
)
