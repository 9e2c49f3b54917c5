"""The library's own step as the benchmarks call it: the one file that knows how it is made.

Import it after `keep_memory()`, since it imports JAX.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxformer.arrays.mesh import mesh_of, place_batch
from jaxformer.config.run import RunConfig
from jaxformer.report import MetricsLog
from jaxformer.runs import train_run as loop
from jaxformer.runs.kernel_check import prove_attention, prove_experts
from jaxformer.runs.resolve import resolve_without_data
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.training.state import TrainState, init_state
from jaxformer.training.step import Batch


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
    """The compiled step of a run and the batches of its text, prepared as `jf.train` does, whatever
    its run directory holds."""
    with tempfile.TemporaryDirectory(prefix="jaxformer-steps-") as folder:
        settings = dataclasses.replace(run.run, dir=str(Path(folder, "run")))
        setup = make_setup(dataclasses.replace(run, run=settings), _quiet)
    return Ready(
        mesh=setup.mesh,
        step=loop.compile_step(setup.step, setup.target, setup.first_batch, _quiet),
        state=lambda: _state(setup),
        batch=lambda i: setup.placed(setup.batches[i]),
        tokens_per_step=setup.tokens_per_step,
    )


def _state(setup: RunSetup) -> TrainState:
    return init_state(setup.specs, setup.optimizer, mesh=setup.mesh, seed=setup.run.run.seed)


def ready_on_random_tokens(run: RunConfig) -> tuple[Ready, str]:
    """The jitted step of a run with one batch of random tokens, and the kernel in words."""
    mesh = mesh_of(run.mesh.sizes)
    resolved, shapes = resolve_without_data(run, mesh)
    specs, optimizer = resolved.specs, resolved.optimizer
    arrays = place_batch(random_batch(shapes, run), mesh)
    found = Ready(
        mesh=mesh,
        step=resolved.step,
        state=lambda: init_state(specs, optimizer, mesh=mesh, seed=run.run.seed),
        batch=lambda i: arrays,
        tokens_per_step=run.train.batch_size * run.data.sequence_length,
    )
    return found, resolved.kernel


def random_batch(shapes: Mapping[str, Any], run: RunConfig) -> dict[str, np.ndarray]:
    """The arrays of a batch, [rows, length] or [rows, 1], with random tokens and targets.

    Where the run has segment ids, rows are padded at their end, by a quarter on average; those of
    data.packing documents or best_fit hold four documents instead.
    """
    rng = np.random.default_rng(0)
    batch: dict[str, np.ndarray] = {}
    if shapes["targets"].shape == shapes["tokens"].shape:
        # Each target is the next token, drawn as torch_baseline.py draws them.
        rows, length = shapes["tokens"].shape
        text = rng.integers(run.model.vocab_size, size=(rows, length + 1))
        batch |= {"tokens": text[:, :-1], "targets": text[:, 1:]}
    for name, array in shapes.items():
        if name in batch:
            continue
        if name.endswith("segment_ids"):
            batch[name] = random_segments(rng, array.shape, run.data.packing != "stream")
        elif name in ("tokens", "targets", "source"):
            batch[name] = rng.integers(run.model.vocab_size, size=array.shape)
        elif name in ("token_types", "next_sentence"):
            batch[name] = rng.integers(2, size=array.shape)
        elif name in ("weights", "next_sentence_weights"):
            batch[name] = np.ones(array.shape)
        else:
            raise ValueError(f"the batch has an array {name!r}, for which no values are known here")
    if "weights" in batch and "segment_ids" in batch:
        batch["weights"] = np.where(batch["segment_ids"] == 0, 0, batch["weights"])
    return {name: array.astype(shapes[name].dtype) for name, array in batch.items()}


def random_segments(rng: np.random.Generator, shape: tuple[int, int], packed: bool) -> np.ndarray:
    """Segment ids [rows, length]: four documents of random lengths that fill each row, or one that
    fills from half of it to all, and padding."""
    rows, length = shape
    index = np.arange(length)
    if packed:
        begins = np.sort(rng.integers(1, length, size=(rows, 3)))
        return 1 + (index >= begins[:, :, None]).sum(axis=1)
    filled = rng.integers(length // 2, length + 1, size=(rows, 1))
    return (index < filled).astype(int)


def kernels_hold(run: RunConfig) -> str:
    """Which kernels of attention and of experts serve the run, and their errors beside float32."""
    mesh = mesh_of(run.mesh.sizes)
    resolved, _ = resolve_without_data(run, mesh)
    return f"{resolved.kernel}. {prove_attention(resolved)} {prove_experts(resolved)}".strip()


def stamp_steps(stamps: dict[int, float]) -> None:
    """From now on `jf.train` notes in `stamps` the time at which it first logged each step."""

    class Stamped(MetricsLog):
        def log(self, step: int, values: Mapping[str, Any], state: str = "") -> None:
            stamps.setdefault(step, time.perf_counter())
            super().log(step, values, state)

    loop.MetricsLog = Stamped  # type: ignore[misc]


def _quiet(text: str) -> None:
    pass
