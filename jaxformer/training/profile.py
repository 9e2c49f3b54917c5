"""A trace of some steps by `jax.profiler`, which xprof opens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxformer.config.settings import step_range
from jaxformer.training.program import Metrics
from jaxformer.training.state import TrainState


class Profile:
    """A step that traces some of its calls, to be given to `fit` in its place.

    profile = jf.Profile(step, "10:13", "profile")
    state = jf.fit(profile, state, batches, steps=100)

    Args:
      step: any function (state, batch) -> (state, metrics), as from `make_step`.
      steps: "10:13" traces the steps 10, 11 and 12, counted from 1 as `fit` counts, "10" one.
      directory: gets the trace; `xprof --logdir DIRECTORY` opens it.

    The devices are waited for before the first traced step and after the last one; no other step is
    slower.
    """

    def __init__(
        self, step: Callable[[Any, Any], tuple[Any, Any]], steps: str, directory: str | Path
    ) -> None:
        self.steps = step_range(steps, "steps")
        self.directory = Path(directory)
        self._step = step
        self._number = -1  # of the last step that was begun; -1 before the first
        self._running = False

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Return the step's new state and metrics."""
        if self._number < 0:
            self._number = int(state.step)
        self._number += 1
        if self._number not in self.steps:
            return self._step(state, batch)
        if not self._running:
            jax.block_until_ready(state)
            self.directory.mkdir(parents=True, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # the tracer of Python code would slow the steps down
            jax.profiler.start_trace(str(self.directory), profiler_options=options)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=self._number):
            state, metrics = self._step(state, batch)
        if self._number == self.steps[-1]:
            jax.block_until_ready((state, metrics))
            self.close()
        return state, metrics

    def close(self) -> None:
        """Ends a trace that is running. After `fit` a call is needed only if that ended or failed
        before the last step to trace."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
