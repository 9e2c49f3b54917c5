"""A model of your own: an MLP that learns a curve, through the same step, sharding, resume and
evaluation as train.py.

python examples/own_model.py [RUN_DIRECTORY]  # the same line continues what the directory holds
"""

import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf


class Points:
    """`batches[k]` is the batch of step k: points of a curve, drawn from the step's number."""

    def __getitem__(self, step: int) -> dict[str, Any]:
        x = np.random.default_rng(step).uniform(-3, 3, (64, 1)).astype(np.float32)
        return {"x": x, "y": np.sin(2 * x)}


def init(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Any pytree will do: here a list of layers, [1, 64], [64, 64] and [64, 1]."""
    layers = []
    for size in ((1, 64), (64, 64), (64, 1)):
        key, own = jax.random.split(key)
        layers.append({"w": jax.random.normal(own, size) / size[0] ** 0.5, "b": jnp.zeros(size[1])})
    return layers


def loss(params: Any, batch: Any, key: jax.Array | None) -> dict[str, Any]:
    x = batch["x"]
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])  # [B, width]
    error = x @ params[-1]["w"] + params[-1]["b"] - batch["y"]  # [B, 1]
    absolute = jnp.sum(jnp.abs(error))
    return {"loss": (jnp.sum(error**2), error.size), "absolute": (absolute, error.size)}


def show(step: int, state: Any, metrics: Any) -> None:
    if "val_loss" in metrics:
        print(step, metrics)


def main(directory: str) -> jf.TrainState:
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 500))
    state = jf.init_state(init(jax.random.key(0)), optimizer, mesh=jf.make_mesh())
    step = jf.make_step(loss, optimizer, microbatches=2)
    evaluate = jf.make_evaluate(loss, [Points()[10_000 + k] for k in range(4)])
    saved = jf.Checkpoints(directory, every=100)
    return jf.fit(
        step, state, Points(), steps=500, evaluate=evaluate, checkpoints=saved, hooks=[show]
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
