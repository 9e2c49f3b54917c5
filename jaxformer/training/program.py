"""The compiled program of a train step: its arguments, donated arrays and results, and a trace of
some of its calls by `jax.profiler`, which xprof opens."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import explicit_axes, platform
from jaxformer.config.settings import step_range
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import TrainState, merged, mesh_of, on_mesh, split_frozen

# Platforms by the names that lowering uses.
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}

Metrics = dict[str, jax.Array]
# (number of the step, counted from 0, gradient, update) -> metrics.
Observe = Callable[[jax.Array, Params, Params], Metrics]


class Step:
    """(state, batch) -> (state, metrics), compiled once for each placement of the state.
    `make_step` makes one.

    The program takes the leaves that do not learn beside the rest of the state. It only reads
    them: they are neither donated nor copied, and the new state has the arrays of the old one.
    """

    def __init__(
        self, advance: Callable[..., tuple[TrainState, Metrics]], deterministic: bool = False
    ) -> None:
        self._advance = advance
        self._deterministic = deterministic
        self._programs: dict[Any, Any] = {}

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Return the state after one more step, and its metrics. `state` is donated, except for the
        leaves that do not learn: use the returned one."""
        # Inside somebody's jit or grad: a program of its own cannot be called with tracers.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, batch))):
            return self._advance(state, batch)
        with on_mesh(mesh_of(state)):
            return StagedStep(self._program(state))(state, batch)

    def observing(self, observe: Observe) -> "Step":
        """Return the same step with further metrics, from its number (int32, counted from 0), its
        gradient before any clipping and its update, both with None for the leaves that do not
        learn."""
        return Step(functools.partial(self._advance, observe=observe), self._deterministic)

    def lower(self, state: TrainState, batch: Any, lowering_platforms: Any = None) -> "StagedStep":
        """Return the step lowered ahead of time, for arrays or `jax.ShapeDtypeStruct`s with their
        shardings; on an abstract mesh for the platform of its devices."""
        mesh = mesh_of(state)
        if isinstance(mesh, AbstractMesh):
            lowering_platforms = (PLATFORMS[platform(mesh)],)
        with on_mesh(mesh):
            traced = self._program(state).trace(*_moving_and_still(state), batch)
            return StagedStep(traced.lower(lowering_platforms=lowering_platforms))

    def _program(self, state: TrainState) -> Any:
        leaves, structure = jax.tree.flatten(state)
        key = (structure, tuple(getattr(leaf, "sharding", None) for leaf in leaves))
        if key not in self._programs:

            def advance(moving: TrainState, still: Params, batch: Any) -> Any:
                state, metrics = self._advance(_whole(moving, still), batch)
                return _moving_and_still(state)[0], metrics

            def on_automatic_axes(*arguments: Any) -> Any:
                # A loss need not say where each of its arrays is placed, and steps are those of a
                # mesh with automatic axes.
                if not explicit_axes():
                    return advance(*arguments)
                places = (moving, PartitionSpec())
                return jax.sharding.auto_axes(advance, out_sharding=places)(*arguments)

            # The new state has the shardings of the old one, and so can take its memory.
            moving, still = _moving_and_still(jax.tree.unflatten(structure, key[1]))
            self._programs[key] = jax.jit(
                on_automatic_axes,
                donate_argnums=0,
                in_shardings=(moving, still, None),
                out_shardings=(moving, None),
                compiler_options=compiler_options(mesh_of(state), self._deterministic),
            )
        return self._programs[key]


class StagedStep:
    """A step that was lowered or compiled for one shape of its arguments, with all methods of its
    `jax.stages.Lowered` or `Compiled`, such as `as_text`; compiled, it is called as a `Step` is."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "StagedStep":
        """Return the lowered step compiled, with these options of XLA besides those of a step."""
        return StagedStep(self._stage.compile(compiler_options))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Return what `Step` returns, by the compiled program."""
        moving, still = _moving_and_still(state)
        moving, metrics = self._stage(moving, still, batch)
        return _whole(moving, still), metrics


def _moving_and_still(state: TrainState) -> tuple[TrainState, Params]:
    """Return a state without the leaves that do not learn, and these leaves."""
    learned, still = split_frozen(state.params, state.frozen)
    return replace(state, params=learned), still


def _whole(moving: TrainState, still: Params) -> TrainState:
    params = merged(moving.params, still, moving.frozen)
    return replace(moving, params=params)


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
            # Or the trace would begin with the steps before it.
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
        """End a trace that is running. After `fit` a call is needed only if that ended or failed
        before the last step to trace."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
