"""Run on eight forced host devices: steps of models with experts on each mesh, beside one device.
Prints JSON for test_expert_devices.py. With the argument "slow": those of the slow test."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from eight_devices import steps
from learning_steps import a_run

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.settings import with_settings
from jaxformer.layers import dispatch

MESHES = {
    "expert 8": dict(data=1, expert=8),
    "expert 4 x fsdp 2": dict(data=1, fsdp=2, expert=4),
    "expert 2 x tensor 2 x data 2": dict(data=2, expert=2, tensor=2),
    "expert 2 x context 2 x fsdp 2": dict(data=1, fsdp=2, expert=2, context=2),
    "fsdp 4 x tensor 2": dict(data=1, fsdp=4, tensor=2),
}
EXPERTS = {"feed_forward": "experts", "experts.n": 8, "experts.d_ff": 32}
SIGMOID = {
    "experts.router": "sigmoid",
    "experts.router_bias": "balanced",
    "experts.groups": 4,
    "experts.top_groups": 2,
    "experts.scale": 2.5,
    "experts.shared_ff": 16,
    "experts.dense_layers": 1,
    "n_layers": 3,
    "layer_loop": "scan",
}
CASES = {"top 2": ({}, [("expert 8", {}), ("expert 2 x tensor 2 x data 2", {})])}
SLOW_CASES = {
    "top 2": ({}, [("expert 2 x context 2 x fsdp 2", {}), ("fsdp 4 x tensor 2", {})]),
    "one expert, biases, learned router, encoder": (
        {"experts.per_token": 1, "experts.renormalize": False, "family": "encoder"}
        | {"bias": "all", "experts.router_bias": "learned", "activation": "gelu"},
        [("expert 2 x tensor 2 x data 2", {})],
    ),
    "alternating": ({"experts.pattern": "de", "n_layers": 2}, [("expert 4 x fsdp 2", {})]),
    "capacity": ({"experts.capacity": 1.0}, [("expert 2 x context 2 x fsdp 2", {})]),
    "sigmoid in groups": (SIGMOID, [("expert 4 x fsdp 2", {})]),
    "both": (
        {"family": "encoder_decoder", "n_encoder_layers": 1, "positions": "t5"},
        [("expert 2 x tensor 2 x data 2", {})],
    ),
}


def traffic():
    """Whether rows of sizes drawn at random, also of none, arrive at the device that they were sent
    to in the order of their sources, and come back to their places."""
    mesh, rng = make_mesh(1, expert=8), np.random.default_rng(0)
    sent = rng.integers(0, 5, (8, 8))
    sent[2], sent[:, 3] = 0, 0
    rows = np.full((8, 40), -1)
    for source in range(8):
        flat = [100 * source + 10 * to + i for to in range(8) for i in range(sent[source, to])]
        rows[source, : len(flat)] = flat

    def there_and_back(x):
        me = jax.lax.axis_index("expert")
        there, back = dispatch.traffic_of(jnp.asarray(sent), me)
        arrived = dispatch.exchanged(x.reshape(-1, 1), 40, there)
        returned = dispatch.exchanged(arrived, 40, back)
        return arrived.reshape(1, -1), returned.reshape(1, -1)

    by_device = jax.P("expert")
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            there_and_back, in_specs=by_device, out_specs=by_device, check_vma=False
        )
        arrived, returned = (np.asarray(array) for array in jax.jit(run)(rows.astype(np.float32)))
    right = []
    for to in range(8):
        expected = [
            100 * source + 10 * to + i for source in range(8) for i in range(sent[source, to])
        ]
        right.append(arrived[to, : len(expected)].tolist() == expected)
        number = sent[to].sum()
        right.append(np.array_equal(returned[to, :number], rows[to, :number]))
    return right


def decoding():
    """Greedy tokens on one device, and on a mesh that divides experts, and not the rows."""
    config = with_settings(
        jf.ModelConfig(), {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 1, **EXPERTS}
    )
    params = jf.init(config, jax.random.key(0))
    prompt = np.random.default_rng(0).integers(0, 64, (3, 6), dtype=np.int32)
    generate = functools.partial(jf.generate, params, config, prompt, 8, temperature=0)
    one = np.asarray(generate()).tolist()
    with jax.set_mesh(make_mesh(data=1, expert=4, tensor=2)):
        return {"one": one, "several": np.asarray(generate()).tolist()}


def main():
    slow = sys.argv[1:] == ["slow"]
    runs = {
        name: (
            a_run("llama", 16, **({"vocab_size": 64, "n_layers": 1} | EXPERTS | changes)),
            places,
        )
        for name, (changes, places) in (SLOW_CASES if slow else CASES).items()
    }
    report = {"steps": steps(runs, MESHES)}
    if not slow:
        report |= {"traffic": traffic(), "decoding": decoding()}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
