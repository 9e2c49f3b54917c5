"""A small regression with spikes for test_spikes.py. Run on eight forced host devices: prints JSON
of what they skip, and of the nats of each row that they sum."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf
from jaxformer.losses.cross_entropy import cross_entropy
from jaxformer.training.loop import fit
from jaxformer.training.spikes import skip_spikes
from jaxformer.training.state import on_mesh
from jaxformer.training.step import make_step

SPIKES = {20, 21, 30}  # steps, counted from 0
RULE = optax.adam(1e-2)


class Batches:
    """`batches[k]` is the batch of step k. That of a step in `spikes` has targets times `factor`;
    with `left_out` it is the next one instead, and with a `slope` a gradient as much larger for
    the same loss."""

    def __init__(self, spikes=frozenset(), factor=100.0, left_out=False, slope=1.0):
        self.spikes, self.factor, self.left_out, self.slope = spikes, factor, left_out, slope

    def __getitem__(self, step):
        if self.left_out:
            step = [k for k in range(step + len(self.spikes) + 1) if k not in self.spikes][step]
        rng = np.random.default_rng(step)
        x = rng.standard_normal((8, 4)).astype(np.float32)
        y = x[:, :1] ** 2
        slope = np.ones_like(y)
        if step in self.spikes:
            y, slope = (y, slope * self.slope) if self.slope != 1 else (y * self.factor, slope)
        return {"x": x, "y": y, "slope": slope.astype(np.float32)}


def params_of():
    first, second = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(first, (4, 16)), "v": jax.random.normal(second, (16, 1))}


def loss(params, batch, key):
    error = (jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2
    steep = batch["slope"] * (error - jax.lax.stop_gradient(error))
    return {"loss": ((jax.lax.stop_gradient(error) + steep).sum(), error.size)}


def trained(batches, steps=40, optimizer=None, mesh=None, microbatches=1, hooks=(), **options):
    """(state, [(step, metrics)]) of a run, by default with a window of 16."""
    optimizer = optimizer or skip_spikes(RULE, factor=10.0, window=16)
    seen = []

    def note(step, state, metrics):
        numbers = {name: float(value) for name, value in metrics.items()}
        del numbers["step_seconds"]
        seen.append((step, numbers))

    state = fit(
        make_step(loss, optimizer, microbatches=microbatches),
        jf.init_state(params_of(), optimizer, mesh=mesh),
        batches,
        steps=steps,
        hooks=[*hooks, note],
        **options,
    )
    return state, seen


def nats_by_row(mesh=None):
    """The objective and the nats of each row, [8], in tiles."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16, 4)).astype(np.float32)
    head = jnp.asarray(rng.standard_normal((23, 4)), jnp.float32)
    targets, weights = jnp.asarray(rng.integers(0, 23, (8, 16))), jnp.ones((8, 16))

    def objective(x):
        return cross_entropy(x, head, targets, weights, tile=4, nats_by_row=True)

    with on_mesh(mesh):
        (total, nats), _ = jax.jit(jax.value_and_grad(objective, has_aux=True))(x)
    return [float(total), *np.asarray(nats).tolist()]


if __name__ == "__main__":
    state, seen = trained(Batches(SPIKES), mesh=jf.make_mesh())
    print(
        json.dumps(
            {
                "devices": len(state.step.sharding.device_set),
                "skipped": [step for step, metrics in seen if metrics["spikes_in_a_row"]],
                "losses": [metrics["loss"] for _, metrics in seen],
                "nats": nats_by_row(jf.make_mesh(data=2, fsdp=2, context=2)),
            }
        )
    )
