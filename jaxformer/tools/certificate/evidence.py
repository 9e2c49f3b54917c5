"""What the checks of a certificate look at: a run that is set up, a state of it, and a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.arrays.mesh import held_blocks, replicated
from jaxformer.config.settings import Log
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.device import TOLERANCE
from jaxformer.runs.setup import RunSetup
from jaxformer.tools.certificate.record import ReplayEntry
from jaxformer.tools.certificate.steps import StepsAgain
from jaxformer.training.state import TrainState, on_mesh
from jaxformer.training.step import Batch


class Measured(NamedTuple):
    """What a check measured: whether the claim holds (None: the run has nothing that it is about),
    and the largest `figure` beside the `bound` that it may reach, None where there is no number."""

    holds: bool | None
    text: str
    figure: float | None = None
    bound: float | None = None


@dataclass
class Evidence:
    """A run on attached devices.

    Attributes:
      setup: of the run.
      state: its newest state, which no check changes but the last one, which donates it.
      again: its compiled step, and steps that are done again by it.
      batch: the batch of the step after it, of this process; NumPy arrays, rows first.
      replays: its steps that were done again.
      folder: a directory that all processes share, in which a check may save a state.
    """

    setup: RunSetup
    state: TrainState
    again: StepsAgain
    batch: dict[str, np.ndarray]
    replays: Sequence[ReplayEntry]
    folder: Path
    log: Log

    @property
    def dtype(self) -> str:
        """The dtype of the products of the model."""
        with on_mesh(self.setup.mesh):
            return str(compute_dtype(self.setup.model))

    @property
    def tolerance(self) -> float:
        """The largest relative difference that the rounding of the dtype explains."""
        return TOLERANCE[self.dtype]

    def rows(self, wanted: int) -> Batch:
        """The first rows of each block of rows of the batch, about `wanted` over all devices: at
        least one a block, and all where there are no more."""
        blocks, count = held_blocks(self.setup.mesh)
        size = len(next(iter(self.batch.values()))) // len(blocks)
        kept = min(max(-(-wanted // count), 1), size)
        index = [block * size + row for block in range(len(blocks)) for row in range(kept)]
        return {name: array[index] for name, array in self.batch.items()}

    def row_count(self, batch: Mapping[str, np.ndarray]) -> int:
        """The rows of a batch over all processes."""
        blocks, count = held_blocks(self.setup.mesh)
        return len(next(iter(batch.values()))) // len(blocks) * count


class Check(NamedTuple):
    """A row of the table of checks.

    Attributes:
      name: in certificate.json.
      proves: the claim, one sentence, for the page and the documentation.
      how: how it is shown.
      missing: why the check does not apply to a run; empty where it does.
      run: the check itself.
      broken: what the test of the check breaks to see it fail, for the documentation.
    """

    name: str
    proves: str
    how: str
    missing: Callable[[Evidence], str]
    run: Callable[[Evidence], Measured]
    broken: str


def always(evidence: Evidence) -> str:
    """Of a check that applies to every run."""
    return ""


def on_one_device(tree: Any, mesh: Mesh) -> Any:
    """A tree of arrays of the mesh as arrays that one device of this process holds."""
    everywhere = jax.tree.map(lambda _: replicated(mesh), tree)
    with on_mesh(mesh):
        gathered = jax.jit(lambda leaves: leaves, out_shardings=everywhere)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)
