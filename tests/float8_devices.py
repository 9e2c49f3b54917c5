"""Run on eight forced host devices: a step with products in 8 bits on meshes, beside one device.
Prints JSON for test_float8.py."""

import json
import sys

import jax
import numpy as np
import optax
from shapes import LENGTH, VOCABULARY, model

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (16, LENGTH), dtype=np.int32)
# Gradients of some devices are much smaller than those of others, and so are their scales.
WEIGHTS = np.repeat(np.float32([1, 0.1]), 8)[:, None] * np.ones_like(TOKENS)
BATCH = {"tokens": TOKENS, "targets": TOKENS[:, ::-1], "weights": WEIGHTS.astype("float32")}
CONFIG = model("gpt2")
MESHES = {"all three": (dict(data=2, fsdp=2, tensor=2), 1), "replicas": (dict(data=8), 2)}


def stepped(mesh, microbatches):
    """The change of the parameters by a step, and its loss."""
    optimizer = optax.sgd(1.0)
    # Away from the initial values, which are equal in all columns of biases and norms.
    params = jax.tree.map(lambda leaf: 3 * leaf, jf.init(CONFIG, jax.random.key(0)))
    start = jax.tree.map(np.asarray, params)
    if mesh is None:
        state = jf.init_state(params, optimizer)
    else:
        state = jf.init_state(jf.specs(CONFIG), optimizer, mesh=mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
        state = state.replace(params=jax.device_put(params, shardings))
    loss = jf.loss_of("causal", CONFIG, products="fp8")
    step = jf.make_step(loss, optimizer, microbatches=microbatches, rowwise=True)
    state, metrics = step(state, BATCH)
    return jax.tree.map(np.subtract, state.params, start), float(metrics["loss"])


def main():
    report = {}
    for label, (sizes, microbatches) in MESHES.items():
        one, several = stepped(None, microbatches), stepped(make_mesh(**sizes), microbatches)
        difference = optax.tree.norm(jax.tree.map(np.subtract, one[0], several[0]))
        report[label] = {
            "loss": abs(one[1] - several[1]),
            "change": float(difference / optax.tree.norm(one[0])),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
