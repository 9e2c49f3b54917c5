"""Run on eight forced host devices: a checkpoint in a bucket, saved from one mesh and read on
others. Prints JSON for checkpoints/test_buckets.py."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.training.state import TrainState

SHAPE = 64, 32


def on_mesh(shape: tuple[int, int], value: float, step: int) -> TrainState:
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("rows", "columns"))
    sharding = NamedSharding(mesh, PartitionSpec("rows", "columns"))
    array = jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE) * value
    return TrainState(jnp.array(step), {"w": jax.device_put(array, sharding)}, None)


def main(url: str) -> None:
    with Checkpoints(url) as checkpoints:
        checkpoints.save(on_mesh((4, 2), 1.5, 1), 1)
    expected = np.asarray(on_mesh((8, 1), 1.5, 1).params["w"])
    equal = {}
    for shape in ((4, 2), (8, 1), (1, 8)):
        with Checkpoints(url) as checkpoints:
            read = checkpoints.newest(on_mesh(shape, 0, 0))
        array = read.params["w"]
        equal[str(shape)] = [bool((np.asarray(array) == expected).all()), len(array.devices())]
    print(json.dumps(equal))


main(sys.argv[1])
