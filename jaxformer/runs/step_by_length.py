"""The step of a run: for each batch the program for the length of its rows, traced where
run.profile says."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxformer.config.settings import Log
from jaxformer.runs.directory import profile_dir
from jaxformer.runs.setup import RunSetup
from jaxformer.training.loop import Advance
from jaxformer.training.program import Metrics
from jaxformer.training.state import TrainState
from jaxformer.training.step import Batch

# By the length of the rows: (state, batch) -> (state, metrics), compiled.
Programs = dict[int, Any]


class StepByLength:
    """The step that `fit` calls: for each batch, the program for the length of its rows."""

    def __init__(self, setup: RunSetup, first: int, programs: Programs, log: Log) -> None:
        self.setup, self.done, self._programs, self._log = setup, first, programs, log

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        before, now = self.setup.length(max(self.done - 1, 0)), self.setup.length(self.done)
        if before != now:
            self._log(f"From step {self.done + 1} on, rows have {now} tokens instead of {before}.")
        self.done += 1
        return self._programs[now](state, batch)  # type: ignore[no-any-return]

    def next_program(self) -> Any:
        """The compiled program of the next step."""
        return self._programs[self.setup.length(self.done)]


@contextlib.contextmanager
def traced(setup: RunSetup, step: StepByLength) -> Iterator[Advance]:
    """The step, which traces the steps of run.profile into the run directory."""
    run = setup.run.run
    if not run.profile:
        yield step
        return
    from jaxformer.training.profile import Profile

    profile = Profile(step, run.profile, profile_dir(run.dir), program=step.next_program)
    try:
        yield profile
    finally:
        profile.close()
