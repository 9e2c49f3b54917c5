"""Steps of a run that are done again, and compared with what the run logged.

On the devices, mesh and versions of the run each figure and the state are equal to the bit, but for
GPUs, which add up in no fixed order. Elsewhere sums are made in another order: a sum of n products
then differs by about sqrt(n) roundings of its dtype, for float32 and n = 4096 by 4e-6 of its value,
and each step in between adds as much. `ROUNDING` allows some hundred times that.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.arrays.sharding import platform
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import (
    Damaged,
    flat_leaves,
    read_checkpoint,
    read_manifest,
    saved_steps,
    versions,
)
from jaxformer.config.config_file import read_config
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError
from jaxformer.models.stack import compute_dtype
from jaxformer.report import read_metrics
from jaxformer.report.metrics import STATE
from jaxformer.runs.config import looked_at
from jaxformer.runs.metric_logger import as_logged
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.runs.states import batches_of, first_state
from jaxformer.runs.train_run import compile_step
from jaxformer.tools.verify.run_files import Statement, Verdict
from jaxformer.training.state import TrainState, on_mesh

FEW = 200  # steps that are done again for the newest checkpoint
# The largest difference of a figure, relative to the logged one, that is called rounding, by the
# dtype of the products.
ROUNDING = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}


def setup_of_run(
    path: Path,
    log: Log,
    mesh: Mapping[str, int] | None = None,
    cache_dir: str | Path = "",
    train: str = "",
    validation: str = "",
    init_from: str = "",
) -> RunSetup:
    """The setup of the run directory `path`, which is only read.

    `mesh` are sizes of axes of the mesh in place of those of the run; `cache_dir`, `train`,
    `validation` and `init_from` are those of `looked_at`. Raises ConfigError where `path` is no run
    directory, its data has changed, or the mesh does not fit the devices.
    """
    files = ModelFiles(path.absolute())
    run = looked_at(files, cache_dir, train, validation, init_from)
    run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, **(mesh or {})))
    return make_setup(run, log)


class StepsAgain:
    """A run whose steps are done again by its compiled step `program`. Writes nothing."""

    def __init__(self, setup: RunSetup, log: Log) -> None:
        self.setup = setup
        self.log = log
        self.folder = setup.directory.path
        self.starts = [0, *saved_steps(self.folder)]
        self.batches = batches_of(setup.directory, setup.batches)
        self.program = compile_step(setup.step, setup.target, setup.first_batch, log)
        with on_mesh(setup.mesh):
            self.bound = ROUNDING[str(compute_dtype(setup.model))]
        # The lines of metrics.jsonl with a training loss, by their steps.
        self.logged = {line["step"]: line for line in read_metrics(self.folder) if "loss" in line}

    def is_of_this_machine(self, step: int) -> bool:
        """Whether the process that logged a step ran on the devices, mesh and versions of this one,
        by the next checkpoint, which it saved."""
        mesh = read_config(self.folder / "config.json").mesh
        after = [saved for saved in self.starts if saved >= step]
        if not after or mesh != self.setup.run.mesh or platform(self.setup.mesh) == "gpu":
            return False
        return read_manifest(self.folder / "checkpoints" / str(after[0]))["versions"] == versions()

    def newest(self, step: int) -> TrainState:
        """The newest saved state from before a step, or the first state of the run."""
        target = flat_leaves(self.setup.target_over_base)
        unsaved = self.setup.unsaved
        targets = {path: leaf for path, leaf in target.items() if path not in unsaved}
        for saved in reversed([start for start in self.starts if 0 < start < step]):
            try:
                leaves = read_checkpoint(
                    self.folder / "checkpoints", saved, targets, run=self.setup.identity
                )
            except Damaged as error:
                self.log(
                    f"The checkpoint of step {saved} cannot be read, so that an earlier one is"
                    f" used: {error}"
                )
                continue
            structure = jax.tree.structure(self.setup.target)
            state: TrainState = jax.tree.unflatten(structure, (target | leaves).values())
            return state
        return first_state(self.setup, self.log)

    def advance(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """The state after the next step, and its figures; `state` is donated."""
        batch = self.setup.placed(self.batches[int(state.step)])
        state, metrics = self.program(state, batch)
        return state, as_logged(jax.device_get(metrics))

    def figures_of(self, state: TrainState, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The figures of a step, with the fingerprint of what checkpoints hold of its state."""
        unsaved = self.setup.unsaved
        leaves = {path: leaf for path, leaf in flat_leaves(state).items() if path not in unsaved}
        return {**metrics, STATE: fingerprint(leaves)}

    def drawn(self, count: int) -> list[int]:
        """So many logged steps, ascending: that of the newest checkpoint, where at most `FEW` steps
        lead to it, and others that are drawn from twice as many, those nearest behind a checkpoint
        or the beginning, since all steps in between have to be done again."""

        def distance(step: int) -> int:
            return min(step - start for start in self.starts if start < step)

        steps = sorted((step for step in self.logged if step), key=distance)
        nearest = steps[: 2 * count]
        drawn = random.SystemRandom().sample(nearest, min(count, len(nearest)))
        # The newest checkpoint is what somebody would use.
        newest = self.starts[-1]
        if drawn and newest in self.logged and newest not in drawn and distance(newest) <= FEW:
            drawn[0] = newest
        return sorted(drawn)

    def statements(self, steps: Sequence[int]) -> Iterator[Statement]:
        """Does logged steps again, in ascending order, each from its newest earlier checkpoint, or
        from the step before it where that is newer."""
        state: TrainState | None = None
        begun = 0
        for step in steps:
            start = max(start for start in self.starts if start < step)
            if state is not None and int(state.step) < start:
                state = None  # frees its memory
            if state is None:
                try:
                    state = self.newest(step)
                except ConfigError as error:
                    verdict: Verdict = "NO" if start else "unknown"
                    yield Statement(f"step {step}", verdict, f"not done again: {error}")
                    continue
                begun = int(state.step)
            metrics: dict[str, float] = {}
            while int(state.step) < step:
                state, metrics = self.advance(state)
            figures = self.figures_of(state, metrics)
            exact = self.is_of_this_machine(step)
            verdict, text = compared(figures, self.logged[step], self.bound, exact)
            source = f"from step {begun}" if begun else "from the beginning"
            yield Statement(f"step {step}", verdict, f"{source}: {text}.")


def compared(
    now: Mapping[str, Any], logged: Mapping[str, Any], bound: float, exact: bool = False
) -> tuple[Verdict, str]:
    """How figures compare with those of a line that has them, and a phrase about each. Differences
    of up to `bound` are rounding, but where the state is that of the log to the bit every figure
    has to be. Where `exact`, another state is NO."""
    names: dict[Verdict, list[str]] = {"equal": [], "equal to rounding": [], "NO": []}
    has_same_state = STATE in now and now[STATE] == logged.get(STATE)
    for name in now:
        if name not in logged:
            continue
        if repr(now[name]) == repr(logged[name]):  # nan too
            names["equal"].append(name)
            continue
        if name == STATE:
            names["NO" if exact else "equal to rounding"].append("state, another one")
            continue
        difference = abs(now[name] - logged[name]) / max(abs(logged[name]), 1e-12)
        if has_same_state or not difference <= bound:
            names["NO"].append(f"{name} {now[name]!r}, logged {logged[name]!r}")
        else:
            names["equal to rounding"].append(f"{name} by {difference:.1e}")
    phrases: dict[Verdict, str] = {
        "equal": "equal to the bit",
        "equal to rounding": f"equal to rounding (at most {bound:g} of the figure)",
        "NO": "not equal",
    }
    found = [verdict for verdict, named in names.items() if named]
    text = "; ".join(f"{phrases[verdict]}: {', '.join(names[verdict])}" for verdict in found)
    return found[-1], text
