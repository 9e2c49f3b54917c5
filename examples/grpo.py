"""GRPO (arXiv:2402.03300): a model learns from a reward of the texts that it writes itself.

python examples/grpo.py runs/quickstart runs/grpo  # the same line continues what runs/grpo holds

In each step the model completes some beginnings of Python that leave brackets open, each of them
several times. The reward of a text is the fraction of its brackets that have a partner. A text that
is better than the others of its beginning becomes more likely, a worse one less likely.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxformer as jf
from jaxformer.config.train import GRPOConfig
from jaxformer.losses.policy import grpo_loss
from jaxformer.runs.rollouts import Rollouts

SETTINGS = GRPOConfig(
    group=8,
    new_tokens=16,
    kl=0.02,  # of the divergence from the model at the start, which keeps the text Python
    lengths="tokens",
)
ANSWERS = 64  # of a step
PAIRS = {")": "(", "]": "[", "}": "{"}
CALLS = ("print", "len", "sorted", "sum", "self.add", "os.path.join", "dict", "range")
BEGINNINGS = [f"x = {a}({b}(self.items[" for a in CALLS for b in CALLS]


def reward(text: str) -> float:
    """The fraction of the brackets of a text that have a partner; 0 without brackets."""
    waiting, matched, count = list[str](), 0, 0
    for character in text:
        if character in PAIRS.values():
            waiting.append(character)
            count += 1
        elif character in PAIRS:
            count += 1
            if waiting and waiting[-1] == PAIRS[character]:
                waiting.pop()
                matched += 2
    return matched / max(count, 1)


def rewards_of(beginnings: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [reward(a + b) for a, b in zip(beginnings, answers, strict=True)]


def main(model: str, directory: str, steps: int = 100) -> tuple[jf.TrainState, list[float]]:
    """Trains, and returns the last state and the mean reward of the texts of each step."""
    loaded = jf.load(model)
    config = loaded.config
    assert loaded.tokenizer is not None

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return grpo_loss(params, config, batch, SETTINGS)

    def log(step: int, state: Any, metrics: Any) -> None:
        rewards.append(float(metrics["reward"]))
        if step % 10 == 0:
            print(f"step {step}, reward {rewards[-1]:.3f}, kl {float(metrics['kl']):.4f}")

    rewards = list[float]()
    optimizer = optax.adam(1e-3)
    state = jf.init_state(jax.tree.map(jnp.copy, loaded.params), optimizer)
    state = jf.fit(
        jf.make_step(loss, optimizer, rowwise=True),
        state,
        Rollouts(
            config,
            loaded.tokenizer,
            BEGINNINGS,
            rewards_of,
            SETTINGS,
            batch_size=ANSWERS,
            reference=loaded.params,
        ),
        steps=steps,
        checkpoints=jf.Checkpoints(directory, every=50),
        hooks=[log],
    )
    return state, rewards


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
