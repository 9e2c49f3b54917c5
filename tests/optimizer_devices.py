"""Run on eight forced host devices: some steps of optimizers on a sharded table beside those of one
device. Prints JSON for test_optimizers.py."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optimizer_variants import VARIANTS

from jaxformer.arrays.mesh import make_mesh
from jaxformer.arrays.params import Spec, dotted, normal, ones
from jaxformer.config.train import OptimizerConfig
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.state import init_state

STEPS = 3
OF_HEADS = ("layers", "heads", "head_dim", "embed")
TABLE = {
    "out": Spec((2, 4, 8, 32), OF_HEADS, normal(1.0), inputs=("heads", "head_dim")),
    "tokens": Spec((32, 32), ("vocab", "embed"), normal(1.0), inputs=("vocab",), lookup=True),
    "up": Spec((2, 32, 32), ("layers", "embed", "mlp"), normal(1.0), inputs=("embed",)),
    "norm": Spec((2, 32), ("layers", "norm"), ones),
}


def gradients(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=spec.shape).astype("f") for name, spec in TABLE.items()}


def trained(config, mesh):
    """The state after some steps."""
    optimizer = optax.with_extra_args_support(make_optimizer(config, lambda step: 0.1, TABLE))
    state = init_state(TABLE, optimizer, mesh=mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.optimizer))

    def step(params, moments, gradient):
        # What make_step gives: here of a Hessian that is 1 on its diagonal.
        step_arguments = {"hessian_product": jax.tree.leaves, "key": jax.random.key(0)}
        updates, moments = optimizer.update(gradient, moments, params, **step_arguments)
        return jax.tree.map(jnp.add, params, updates), moments

    run = jax.jit(step, out_shardings=shardings)
    params, moments = state.params, state.optimizer
    with jax.set_mesh(mesh):
        for i in range(STEPS):
            params, moments = run(params, moments, gradients(i))
    return params, moments


def whole_on_every_device(tree):
    """The paths of the arrays of a matrix's size that no axis of the mesh divides."""
    return [
        dotted(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.size >= 256 and leaf.sharding.is_fully_replicated
    ]


def main() -> None:
    meshes = make_mesh(devices=jax.devices()[:1]), make_mesh(2, 2, 2)
    report = {}
    for name, settings in VARIANTS.items():
        config = OptimizerConfig(**settings)
        alone, sharded = (trained(config, mesh) for mesh in meshes)
        apart = jax.tree.map(
            lambda a, b: float(np.abs(np.asarray(a, "d") - np.asarray(b, "d")).max()),
            *(alone[0], sharded[0]),
        )
        report[name] = {
            "apart": max(jax.tree.leaves(apart)),
            "replicated": whole_on_every_device(sharded),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
