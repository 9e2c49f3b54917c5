"""Run on eight forced host devices: the step of each mesh beside that of one device. Prints JSON for test_sharding.py."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh
from test_learning_laws import a_batch, a_run

from jaxformer.config import MeshConfig
from jaxformer.layers.embed import head_weight
from jaxformer.losses import cross_entropy
from jaxformer.models import decoder
from jaxformer.optim import make_optimizer, make_schedule
from jaxformer.params import init_params
from jaxformer.sharding import MESH_AXES, batch_sharding, make_mesh, parameter_sharding
from jaxformer.train.state import init_state
from jaxformer.train.step import make_step

MESHES = {"data 8": (8, 1, 1), "fsdp 8": (1, 8, 1), "tensor 2": (4, 1, 2), "all three": (2, 2, 2), "tensor 4": (2, 1, 4)}
CASES = [("llama", 1, 0.0, MESHES), ("gpt2", 2, 0.1, ["all three"])]
STEPS = 3


def train(run, mesh):
    """Losses and gradient norms of some steps, and the final params on the host."""
    with jax.set_mesh(mesh):
        specs, schedule = decoder.specs(run.model), make_schedule(run.optimizer, run.train.steps)
        optimizer = make_optimizer(run.optimizer, schedule, specs)
        state = init_state(specs, optimizer, mesh, run.run.seed)
        step = make_step(run, optimizer, schedule, mesh)
        seen = []
        for i in range(STEPS):
            state, metrics = step(state, jax.device_put(a_batch(16, seed=i), batch_sharding(mesh)))
            seen.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        shards = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)}
        spread = max(leaf.size / leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params))
        return np.array(seen), jax.tree.map(np.asarray, state.params), {"devices": max(shards), "spread": spread}


def explicit_axes_trace(run):
    """Names what fails to trace under explicit axes: a placement that is nowhere said is an error there."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), 16, explicit=True)
    specs = decoder.specs(run.model)

    def loss(params, batch):
        from jaxformer.layers.masks import places_of

        x, _ = decoder.hidden(params, run.model, batch["tokens"], places_of(batch["tokens"], None, None))
        return cross_entropy(x, head_weight(params, run.model), batch["targets"], batch["weights"])[0]

    with jax.set_mesh(mesh):
        params = init_params(specs, jax.random.key(run.run.seed))
        from jaxformer.params import map_specs

        params = jax.tree.map(
            jax.device_put, params, map_specs(lambda _, s: parameter_sharding(mesh, s.shape, s.axes), specs)
        )
        batch = jax.device_put(a_batch(16), batch_sharding(mesh))
        value = jax.jit(loss)(params, batch)
        jax.jit(jax.grad(loss)).lower(params, batch)
    return float(value) / float(a_batch(16)["weights"].sum())


def main() -> None:
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), MESH_AXES)
    report = {}
    for name, pieces, dropout, meshes in CASES:
        run = a_run(name, 16, train={"microbatches": pieces}, vocab_size=64, dropout=dropout)
        losses, params, _ = train(run, one)
        for label in meshes:
            found, placed, facts = train(run, make_mesh(MeshConfig(*MESHES[label]), 16, pieces))
            apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), placed, params)
            report[f"{name}, {pieces} microbatches, {label}"] = facts | {
                "loss": float(np.abs(found / losses - 1).max()),
                "params": max(jax.tree.leaves(apart)),
            }
    run = a_run("llama", 16, vocab_size=64)
    report["explicit"] = {"loss": explicit_axes_trace(run), "one device": float(train(run, one)[0][0, 0])}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
