"""Small states that tests save to a bucket and read from it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.training.state import TrainState

SIZE = 3000


def state_of(step: int) -> TrainState:
    params = {"w": jnp.arange(SIZE) + jnp.float32(step), "b": jnp.full(7, step, jnp.bfloat16)}
    return TrainState(jnp.array(step), params, None)


def save(run_dir: Path, *steps: int, **retention: int) -> None:
    with Checkpoints(run_dir, **retention) as checkpoints:
        for step in steps:
            checkpoints.save(state_of(step), step, {"val_loss": float(step)})


def newest(run_dir: Path, lines: list[str] | None = None) -> TrainState:
    with Checkpoints(run_dir) as checkpoints:
        return checkpoints.newest(state_of(0), ([] if lines is None else lines).append)


def assert_is_of(step: int, state: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(step)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
