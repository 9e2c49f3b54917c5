"""A longer context: a small decoder learns to find needles in rows of 64 tokens, and then finds
them in rows of up to 256 by a scaling of RoPE, without further training.

    python examples/long_context.py    # half a minute on a CPU; prints a table of accuracies

A needle is a token that states the value of a key. A row hides one for every key in hay, and asks
for all of them at its end; the accuracy is the share of right answers. Scalings: linear
(arXiv:2306.15595), dynamic, yarn (2309.00071), llama3 (2407.21783), longrope (2402.13753).
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax

import jaxformer as jf
from jaxformer.config.settings import with_settings

KEYS = VALUES = 8
# Token ids: needles from 0, one for each key and value, then questions, answers and hay.
QUESTION = KEYS * VALUES
ANSWER = QUESTION + KEYS
HAY = ANSWER + VALUES
VOCABULARY = HAY + 16
TRAINED, FACTOR = 64, 4
# With this base some pairs of dimensions turn many times in 64 tokens and others not once, as those
# of a large model do in the length at which it is trained.
CONFIG = jf.ModelConfig(
    vocab_size=VOCABULARY,
    d_model=64,
    n_layers=2,
    n_heads=2,
    max_length=TRAINED,
    rope=jf.Rope(theta=100.0),
)


def haystacks(seed: tuple[int, ...], rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of needles in hay, and then a question and its answer for each key: [rows, length]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(HAY, VOCABULARY, (rows, length + 1))
    values = rng.integers(0, VALUES, (rows, KEYS))
    depths = rng.random((rows, length + 1 - 2 * KEYS)).argsort(axis=1)[:, :KEYS]
    np.put_along_axis(tokens, depths, np.arange(KEYS) * VALUES + values, axis=1)
    asked = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)
    tokens[:, -2 * KEYS :: 2] = QUESTION + asked
    tokens[:, -2 * KEYS + 1 :: 2] = ANSWER + np.take_along_axis(values, asked, axis=1)
    weights = np.zeros((rows, length), np.float32)
    weights[:, -2 * KEYS + 1 :: 2] = 1  # the answers
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


class Haystacks:
    """`batches[k]` is the batch of step k, so that nothing about the data has to be saved."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return haystacks((self.seed, step), 32, TRAINED)


@jax.jit(static_argnums=1)
def accuracy(params: Any, config: jf.ModelConfig, batch: dict[str, jax.Array]) -> jax.Array:
    """The share of answers that are right; a guess has 1 / VALUES."""
    is_right = jf.forward(params, config, batch["tokens"]).argmax(-1) == batch["targets"]
    return (is_right * batch["weights"]).sum() / batch["weights"].sum()


def scaled(scaling: Any, **settings: Any) -> jf.ModelConfig:
    """The config for rows of up to FACTOR times the trained length."""
    return with_settings(
        CONFIG,
        {
            "max_length": FACTOR * TRAINED,
            "rope.original_length": TRAINED,
            "rope.scaling": scaling,
            "rope.factor": float(FACTOR),
            **settings,
        },
    )


def longrope(unscaled: int) -> jf.ModelConfig:
    """LongRoPE whose first pairs keep their frequencies, and whose others have them divided."""
    pairs = CONFIG.rotated_width // 2
    return scaled(
        "longrope",
        **{
            "rope.short_factor": " ".join(["1"] * pairs),
            "rope.long_factor": " ".join(["1"] * unscaled + [str(FACTOR)] * (pairs - unscaled)),
        },
    )


def searched(params: Any, seed: int) -> jf.ModelConfig:
    """The LongRoPE with the lowest loss on long rows. The paper searches divisors that grow with
    the pair by evolution; here every other number of unscaled pairs is tried."""
    batch = jax.device_put(haystacks((seed, 1, 1), 64, FACTOR * TRAINED))

    def loss(config: jf.ModelConfig) -> float:
        nats, answers = jf.loss_of("causal", config)(params, batch, None)["loss"]
        return float(nats / answers)

    return min(map(longrope, range(0, CONFIG.rotated_width // 2, 2)), key=loss)


def main(seed: int = 0, steps: int = 400) -> dict[str, list[float]]:
    """Trains at TRAINED tokens and prints the accuracy at one, two and FACTOR times as many."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 50, steps))
    state = jf.fit(
        jf.make_step(jf.loss_of("causal", CONFIG), optimizer),
        jf.init_state(jf.specs(CONFIG), optimizer, seed=seed),
        Haystacks(seed),
        steps=steps,
    )
    scalings = ("linear", "dynamic", "yarn", "llama3")
    configs = {"none": CONFIG} | {name: scaled(name) for name in scalings}
    configs["longrope"] = searched(state.params, seed)
    lengths = (TRAINED, 2 * TRAINED, FACTOR * TRAINED)
    print("scaling ", *(f"{length:5} tokens" for length in lengths))
    accuracies = {}
    for name, config in configs.items():
        accuracies[name] = [
            float(accuracy(state.params, config, haystacks((seed, 0, 0), 128, length)))
            for length in lengths
        ]
        print(f"{name:8}", *(f"{share:12.3f}" for share in accuracies[name]), flush=True)
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Extends the context of a small model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    main(**vars(parser.parse_args()))
