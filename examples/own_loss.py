"""A loss of your own: a small decoder learns the next-byte distribution of a larger one
(distillation, arXiv:1503.02531).

python examples/own_loss.py [RUN_DIRECTORY]  # the same line continues what the directory holds
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf

TEXT = np.frombuffer(Path(optax.__file__).read_bytes(), np.uint8)  # any array of token ids
TEACHER = jf.ModelConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=4, max_length=64)
STUDENT = jf.ModelConfig(vocab_size=256, d_model=32, n_layers=1, n_heads=2, max_length=64)


class Windows:
    """`batches[k]` is the batch of step k, so that nothing about the data has to be saved."""

    def __getitem__(self, step: int) -> dict[str, Any]:
        starts = np.random.default_rng(step).integers(0, len(TEXT) - 65, 16)
        rows = np.stack([TEXT[start : start + 65] for start in starts]).astype(np.int32)
        weights = np.ones((16, 64), np.float32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def main(directory: str) -> jf.TrainState:
    optimizer = optax.adamw(3e-3)
    teach = jf.make_step(jf.loss_of("causal", TEACHER), optimizer)
    teacher = jf.fit(teach, jf.init_state(jf.specs(TEACHER), optimizer), Windows(), steps=60).params

    def distill(params: Any, batch: Any, key: Any) -> dict[str, Any]:
        wanted = jax.nn.log_softmax(jf.forward(teacher, TEACHER, batch["tokens"]))  # [B, T, V]
        found = jax.nn.log_softmax(jf.forward(params, STUDENT, batch["tokens"]))
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)  # [B, T], nats
        nats = jf.loss_of("causal", STUDENT)(params, batch, None)["loss"]
        return {"loss": (divergence.sum(), divergence.size), "nats": nats}

    def show(step: int, state: Any, metrics: Any) -> None:
        if step % 20 == 0:
            print(step, {name: f"{value:.4f}" for name, value in metrics.items()}, flush=True)

    step = jf.make_step(distill, optimizer)
    state = jf.init_state(jf.specs(STUDENT), optimizer)
    saved = jf.Checkpoints(directory, every=50)
    return jf.fit(step, state, Windows(), steps=100, checkpoints=saved, hooks=[show])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
