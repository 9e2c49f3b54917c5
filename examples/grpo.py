"""GRPO (arXiv:2402.03300): a model learns from a reward of the texts that it writes itself.

python examples/grpo.py runs/quickstart runs/grpo  # the same line continues what runs/grpo holds

In each step the model completes some beginnings of Python that leave brackets open, each of them
several times. The reward of a text is the fraction of its brackets that have a partner. A text that
is better than the others of its beginning becomes more likely, a worse one less likely.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf

SEED = 0
BEGINNINGS, TEXTS = 8, 8  # of a step, and for each of them
NEW_TOKENS = 16
KL_WEIGHT = 0.02  # of the divergence from the model at the start, which keeps the text Python
PAIRS = {")": "(", "]": "[", "}": "{"}
CALLS = ("print", "len", "sorted", "sum", "self.add", "os.path.join", "dict", "range")


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


def log_probs(params: Any, config: jf.ModelConfig, batch: Any) -> jax.Array:
    """The log-probability of each target, [B, T]."""
    logits = jf.forward(params, config, batch["tokens"], segment_ids=batch["segment_ids"])
    return -optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])


class Completions:
    """Batches of what the model writes: `rows(step, state)` depends on the number of the step and
    the parameters before it alone, so that the rows of a step can be made again."""

    def __init__(self, config: jf.ModelConfig, tokenizer: Any, reference: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.reference = reference
        self.score = jax.jit(log_probs, static_argnums=1)
        beginnings = [f"x = {a}({b}(self.items[" for a in CALLS for b in CALLS]
        encoded = tokenizer.encode_batch(beginnings)
        # All are as long as the longest, so that nothing compiles again; padded on the left.
        self.tokens = np.zeros((len(encoded), max(map(len, encoded))), np.int32)
        self.segments = np.zeros_like(self.tokens)
        for row, ids in enumerate(encoded):
            self.tokens[row, -len(ids) :] = ids
            self.segments[row, -len(ids) :] = 1

    def rows(self, step: int, state: jf.TrainState) -> dict[str, Any]:
        """The batch of a step: each text with its advantage over the others of its beginning."""
        drawn = np.random.default_rng((SEED, step)).integers(0, len(self.tokens), BEGINNINGS)
        tokens = np.repeat(self.tokens[drawn], TEXTS, axis=0)  # [B, T]
        segments = np.repeat(self.segments[drawn], TEXTS, axis=0)
        key = jax.random.fold_in(jax.random.key(SEED), step)
        new = jf.generate(
            state.params, self.config, tokens, NEW_TOKENS, key=key, segment_ids=segments
        )
        whole = np.concatenate([tokens, np.asarray(new)], axis=1)  # [B, T + NEW_TOKENS]
        real = np.concatenate([segments, np.ones_like(new)], axis=1)
        texts = [self.tokenizer.decode(row[real[index] != 0]) for index, row in enumerate(whole)]
        rewards = np.array([reward(text) for text in texts], np.float32)
        groups = rewards.reshape(BEGINNINGS, TEXTS)
        deviations = groups.std(axis=1, keepdims=True) + 1e-4
        advantages = (groups - groups.mean(axis=1, keepdims=True)) / deviations
        if step % 10 == 0:
            print(f"step {step}, reward {rewards[0]:.2f}: {texts[0]!r}", flush=True)
        batch = {
            "tokens": whole[:, :-1],
            "targets": whole[:, 1:],
            "segment_ids": real[:, :-1],
            # The new tokens are the targets of the last positions.
            "weights": np.arange(whole.shape[1] - 1)[None] >= tokens.shape[1] - 1,
            "advantages": advantages.reshape(-1, 1),
            "rewards": rewards,
        }
        batch["weights"] = np.broadcast_to(batch["weights"], batch["tokens"].shape)
        return batch | {"reference": self.score(self.reference, self.config, batch)}


def main(model: str, directory: str, steps: int = 100) -> tuple[jf.TrainState, list[float]]:
    """Trains, and returns the last state and the mean reward of the texts of each step."""
    loaded = jf.load(model)
    config = loaded.config

    def loss(params: Any, batch: Any, key: Any) -> dict[str, Any]:
        now = log_probs(params, config, batch)  # [B, T]
        weights = batch["weights"].astype(jnp.float32)
        # The texts are of these parameters, so the ratio is 1; its gradient is that of `now`.
        ratio = jnp.exp(now - jax.lax.stop_gradient(now))
        behind = batch["reference"] - now
        divergence = jnp.exp(behind) - behind - 1  # at least 0; its mean is the KL divergence
        gain = ratio * batch["advantages"] - KL_WEIGHT * divergence
        count = weights.sum()
        return {
            "loss": (-(gain * weights).sum(), count),
            "kl": ((divergence * weights).sum(), count),
            "reward": (batch["rewards"].sum(), batch["rewards"].size),
        }

    rewards = list[float]()
    optimizer = optax.adam(1e-3)
    state = jf.init_state(jax.tree.map(jnp.copy, loaded.params), optimizer)
    state = jf.fit(
        jf.make_step(loss, optimizer),
        state,
        Completions(config, loaded.tokenizer, loaded.params),
        steps=steps,
        checkpoints=jf.Checkpoints(directory, every=50),
        hooks=[lambda step, state, metrics: rewards.append(float(metrics["reward"]))],
    )
    return state, rewards


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
