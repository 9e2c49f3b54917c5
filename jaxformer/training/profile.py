"""A trace of some steps of a run by `jax.profiler`, and a table of where their time and memory
went."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.config.format import human_bytes
from jaxformer.config.settings import step_range
from jaxformer.files import replacing, write_text
from jaxformer.training.program import Metrics
from jaxformer.training.state import TrainState
from jaxformer.training.trace import SCOPES, newest_trace, operations, places_of, time_table

TABLE, MEMORY = "table.md", "memory.prof"
# The statistics of the allocator of a GPU or a TPU, and their names in the table.
ALLOCATOR = {
    "peak_bytes_in_use": "peak of the allocator",
    "peak_bytes_reserved": "peak reserved by the allocator",
    "largest_alloc_size": "largest allocation",
    "bytes_limit": "limit of the allocator",
}


class Profile:
    """A step that traces some of its calls, to be given to `fit` in its place.

    profile = jf.Profile(step, "10:13", "profile")
    state = jf.fit(profile, state, batches, steps=100)
    print(profile.table)

    Args:
      step: from `make_step`, or compiled from it; any function (state, batch) -> (state, metrics)
          is traced, but without a table of its scopes.
      steps: "10:13" traces the steps 10, 11 and 12, counted from 1 as `fit` counts, "10" one.
      directory: gets the trace (`plugins/profile/`, which xprof opens), `table.md` and
          `memory.prof` (which pprof opens).
      scopes: names of `jax.named_scope` to count time by; an operation counts for the innermost.
      program: the compiled step that the next call runs, where `step` does not give it.

    The devices are waited for before the first traced step and after the last one; no other step is
    slower. An evaluation or a save between traced steps counts as time in which they waited. The
    table is that of the devices of this process. Raises ConfigError for other `steps`.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        steps: str,
        directory: str | Path,
        *,
        scopes: Sequence[str] = SCOPES,
        program: Callable[[], Any] | None = None,
    ) -> None:
        self.steps = step_range(steps, "steps")
        self.directory, self.table = Path(directory), ""
        self._step, self._scopes, self._program = step, tuple(scopes), program
        # The number of the last step that was begun; -1 before the first.
        self._number = -1
        self._programs: dict[int, Any] = {}
        self._began: float | None = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """The step's new state and metrics."""
        if self._number < 0:
            self._number = int(state.step)
        self._number += 1
        if self._number not in self.steps:
            return self._step(state, batch)
        if self._began is None:
            self._start(state)
        self._note_program(state, batch)
        sizes = _bytes_by_kind(state, batch)
        with jax.profiler.StepTraceAnnotation("train", step_num=self._number):
            state, metrics = self._step(state, batch)
        if self._number == self.steps[-1]:
            jax.block_until_ready((state, metrics))
            self.close(sizes)
        return state, metrics

    def _start(self, state: TrainState) -> None:
        jax.block_until_ready(state)
        self.directory.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        # The tracer of Python code would slow the steps down.
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self.directory), profiler_options=options)
        self._first, self._began = self._number, time.perf_counter()

    def _note_program(self, state: TrainState, batch: Any) -> None:
        """Keeps the compiled program of a step, for its scopes; a step may have none."""
        program = self._step if self._program is None else self._program()
        if not hasattr(program, "as_text"):
            program = program.lower(state, batch).compile() if hasattr(program, "lower") else None
        if program is not None:
            self._programs[id(program)] = program

    def close(self, sizes: dict[str, int] | None = None) -> None:
        """Ends a trace that is running, and writes its table. After `fit` a call is needed only if
        that ended or failed before the last step to trace."""
        if self._began is None:
            return
        seconds, self._began = time.perf_counter() - self._began, None
        jax.profiler.stop_trace()
        with replacing(self.directory / MEMORY, follow=False) as file:
            file.write(jax.profiler.device_memory_profile())
        if sizes is None or jax.process_index():
            return
        trace = newest_trace(self.directory)
        devices = operations(trace) if trace else []
        programs = [places_of(program.as_text(), self._scopes) for program in self.programs]
        times = time_table(devices, programs, self._number - self._first + 1, seconds)
        first, last = self._first, self._number
        self.table = f"Steps {first} to {last}\n\n{times}\n\n{_memory(sizes, self.programs)}"
        write_text(self.directory / TABLE, self.table + "\n", follow=False)

    @property
    def programs(self) -> list[Any]:
        """The compiled programs of the traced steps."""
        return list(self._programs.values())


def _bytes_by_kind(state: TrainState, batch: Any) -> dict[str, int]:
    """The bytes on one device of the arguments of a step, by kind."""
    groups = {"parameters": state.params, "optimizer state": state.optimizer, "batch": batch}
    return {name: sum(map(_bytes, jax.tree.leaves(tree))) for name, tree in groups.items()}


def _bytes(array: Any) -> int:
    """The bytes of an array on one device."""
    shape = array.shape
    if isinstance(array, jax.Array):
        shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * int(array.dtype.itemsize)


def _memory(sizes: dict[str, int], programs: Sequence[Any]) -> str:
    """A Markdown table of the memory of a device while a step runs."""
    rows = dict(sizes)
    for program in programs:
        stats = program.memory_analysis()
        temporary = int(getattr(stats, "temp_size_in_bytes", 0))
        name = "activations, gradients and other temporaries"
        rows[name] = max(rows.get(name, 0), temporary)
        code = int(getattr(stats, "generated_code_size_in_bytes", 0))
        if code:
            rows["program"] = max(rows.get("program", 0), code)
    rows["together"] = sum(rows.values())
    stats = jax.local_devices()[0].memory_stats() or {}
    rows |= {words: stats[name] for name, words in ALLOCATOR.items() if name in stats}
    width = max(map(len, rows))
    lines = [f"| {'memory of a device':<{width}} |      bytes |", f"| {'-' * width} | ---------: |"]
    lines += [f"| {name:<{width}} | {human_bytes(size):>10} |" for name, size in rows.items()]
    return "\n".join(lines)
