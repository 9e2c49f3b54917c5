"""Run on eight forced host devices: steps of the objective contrastive on meshes, beside one
device. Prints JSON for test_contrastive.py."""

import json
import sys

import jax
import numpy as np
import optax
from shapes import model

import jaxformer as jf
from jaxformer.arrays.mesh import batch_sharding, make_mesh

MESHES = {"data 8": dict(data=8), "fsdp 4 x tensor 2": dict(data=1, fsdp=4, tensor=2)}
CONFIG = model("llama", family="encoder", **{"head.kind": "none"})
PAIRS = 16


def a_batch(sides):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (PAIRS, sides, 12), dtype=np.int32)
    segments = (np.arange(12) < rng.integers(4, 13, (PAIRS, sides, 1))).astype(np.int32)
    if sides > 2:
        # A pair without a hard negative, and one whose hard negative is the positive of another.
        segments[3, 2] = 0
        for array in (tokens, segments):
            array[5, 2] = array[11, 1]
    return {"tokens": tokens, "segment_ids": segments}


def stepped(mesh, sides, steps):
    """The loss, the norm of the gradient, and the params after some steps."""
    with jax.set_mesh(mesh):
        optimizer = optax.sgd(0.1)
        state = jf.init_state(jf.specs(CONFIG), optimizer, mesh=mesh, seed=0)
        step = jf.make_step(jf.loss_of("contrastive", CONFIG, widths=(8,)), optimizer)
        batch = jax.device_put(a_batch(sides), batch_sharding(mesh))
        for _ in range(steps):
            state, metrics = step(state, batch)
        return [float(metrics["loss"]), float(metrics["grad_norm"])], jax.tree.map(
            np.asarray, state.params
        )


def main():
    report = {}
    for sides, steps in ((2, 3), (3, 1)):
        figures, params = stepped(make_mesh(devices=jax.devices()[:1]), sides, steps)
        for name, sizes in MESHES.items():
            found, placed = stepped(make_mesh(**sizes), sides, steps)
            apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), placed, params)
            report[f"{name}, {sides} texts"] = {
                "figures": float(np.abs(np.array(found) / figures - 1).max()),
                "params": max(jax.tree.leaves(apart)),
            }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
