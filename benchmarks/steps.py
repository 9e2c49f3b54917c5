"""The library's own step as the benchmarks call it: the one file that knows how it is made.

Import it after `keep_memory()`, since it imports JAX.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import RunConfig
from jaxformer.mesh import make_mesh, place_batch
from jaxformer.models import decoder
from jaxformer.objectives import loss_of
from jaxformer.optim import make_optimizer, make_schedule
from jaxformer.plan.abstract import with_kernel
from jaxformer.report import MetricsLog
from jaxformer.runs import run as loop
from jaxformer.runs.device import prove_kernel
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.training.state import TrainState, init_state
from jaxformer.training.step import Batch, make_step

PACKED = False  # whether rows come with segment ids; the random tokens have none


@dataclass
class Ready:
    """A step, its first state and the batches it takes; call the step under `jax.set_mesh(mesh)`.

    `step(state, batch)` gives (state, metrics) and is a function that JAX has jitted or compiled;
    `batch(i)` is the batch of step i, on the devices.
    """

    mesh: Mesh
    step: Any
    state: Callable[[], TrainState]
    batch: Callable[[int], Batch]
    tokens_per_step: int


def ready(run: RunConfig) -> Ready:
    """The compiled step of a run and the batches of its text, prepared as `jf.train` does."""
    setup = make_setup(run, _quiet)
    return Ready(
        mesh=setup.mesh,
        step=loop.compile_step(setup, setup.run.data.sequence_length, _quiet),
        state=lambda: _state(setup),
        batch=lambda i: place_batch(setup.batches[i], setup.mesh),
        tokens_per_step=setup.tokens_per_step,
    )


def _state(setup: RunSetup) -> TrainState:
    return init_state(setup.specs, setup.optimizer, mesh=setup.mesh, seed=setup.run.run.seed)


def ready_on_random_tokens(run: RunConfig) -> tuple[Ready, str]:
    """The jitted step of a decoder's run with one batch of random tokens, and the kernel in
    words."""
    run, kernel = with_kernel(run, PACKED, jax.default_backend())
    mesh = make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
    schedule = make_schedule(run.optimizer, run.train.steps)
    specs = decoder.specs(run.model)
    optimizer = make_optimizer(run.optimizer, schedule, specs)
    size = (run.train.batch_size, run.data.sequence_length + 1)
    rows = np.random.default_rng(0).integers(run.model.vocab_size, size=size).astype(np.int32)
    ones = np.ones(rows[:, 1:].shape, np.float32)
    batch = jax.device_put({"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": ones})
    found = Ready(
        mesh=mesh,
        step=make_step(
            loss_of("causal", run.model),
            optimizer,
            microbatches=run.train.microbatches,
            seed=run.run.seed,
            schedules={"learning_rate": schedule},
        ),
        state=lambda: init_state(specs, optimizer, mesh=mesh, seed=run.run.seed),
        batch=lambda i: batch,
        tokens_per_step=run.train.batch_size * run.data.sequence_length,
    )
    return found, kernel


def kernel_holds(run: RunConfig) -> str:
    """Which attention kernel serves the run, and its error beside float32."""
    chosen, reason = with_kernel(run, PACKED, jax.default_backend())
    return f"{reason}. {prove_kernel(chosen, PACKED)}".strip()


def stamp_steps(stamps: dict[int, float]) -> None:
    """From now on `jf.train` notes in `stamps` the time at which it first logged each step."""

    class Stamped(MetricsLog):
        def log(self, step: int, values: Mapping[str, Any]) -> None:
            stamps.setdefault(step, time.perf_counter())
            super().log(step, values)

    loop.MetricsLog = Stamped  # type: ignore[misc]


def _quiet(text: str) -> None:
    pass
