"""The loop: steps, metrics read one step late, evaluations and checkpoints on the way, for any step
over any batches."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from signal import SIGINT
from typing import Any, Protocol

import jax

from jaxformer.checkpoints import Checkpoints
from jaxformer.mesh import AnyMesh, place_batch
from jaxformer.settings import ConfigError
from jaxformer.training.signals import Stopped, watched
from jaxformer.training.state import TrainState, mesh_of
from jaxformer.training.step import Batch, Metrics

Advance = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Evaluate = Callable[[Any], Mapping[str, float]]


class Hook(Protocol):
    """What `fit` calls with the metrics of a step, and with those of an evaluation."""

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any], /) -> None: ...


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number; checkpoints from before are untouched."""


class Interrupted(RuntimeError):
    """A signal, whose number is `signal`, asked the run to stop; its state is saved and the same
    command continues it."""

    def __init__(self, message: str, signal: int = SIGINT) -> None:
        super().__init__(message)
        self.signal = signal


def fit(
    step: Advance,
    state: TrainState,
    batches: Any,
    *,
    steps: int,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    checkpoints: Checkpoints | None = None,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Trains until `steps` optimizer steps are done, and returns the last state; the state given is
    donated.

    Args:
      step: (state, batch) -> (state, metrics), from `make_step`; any function of that form that
          donates its state.
      state: from `init_state`.
      batches: `batches[k]` is the batch of step k, counted from 0: a pytree of arrays whose first
          axis is the rows of this process. An `iterate(start)` method, where there is one, gives
          them in order, prepared ahead. A plain iterable is taken too, where nothing has to be
          resumed.
      steps: optimizer steps of the whole run, those before a resume counted in.
      evaluate: params -> {name: number}, called at the end and each `evaluate_every` steps (0: at
          the end alone).
      checkpoints: where the state is saved: each `checkpoints.every` steps, at the end, and when
          SIGINT, SIGTERM, SIGUSR1 or SIGHUP asks the run to stop, which abandons an evaluation.
          The newest one there that is beyond `state` is continued from, bitwise.
      hooks: called as hook(step, state, metrics) once for each step, one step late, so that the
          device never waits: `metrics` are those of `step` (device scalars, ready) and
          `step_seconds`, the time since the step before without evaluations and saves; `state` is
          the newest one, while the next step is running already. Called with the numbers of an
          evaluation too.

    Raises:
      ConfigError: if batches run out, cannot be resumed, or do not divide among the devices.
      Diverged: if the loss or the norm of the gradient is no number; nothing of that step is saved.
      Interrupted: after a signal, with the state saved.
    """
    if checkpoints is not None:
        state = checkpoints.newest(state)
    first, mesh = int(state.step), mesh_of(state)
    if first >= steps:
        return state
    feed = _Feed(batches, first, steps, mesh)
    reader = _Reader(first, hooks)
    metrics: Metrics = {}
    with contextlib.ExitStack() as stack:
        request = stack.enter_context(watched()) if checkpoints is not None else None
        if checkpoints is not None and request is not None:
            stack.enter_context(request.hold())
            stack.callback(checkpoints.wait)
        batch = feed.next(first)
        for number in range(first + 1, steps + 1):
            previous = metrics
            state, metrics = step(state, batch)
            reader.read(number - 1, state, previous)
            last = number == steps
            if not last:
                batch = feed.next(number)
            stop = request is not None and request.asked(number)
            if evaluate and not stop and (last or _due(number, evaluate_every)):
                reader.read(number, state, metrics)
                try:
                    with reader.paused():
                        result = evaluate(state.params)
                    reader.tell(number, state, result)
                except Stopped:  # between two batches
                    stop = True
            if checkpoints is not None and (last or stop or _due(number, checkpoints.every)):
                reader.read(number, state, metrics)
                with reader.paused():
                    checkpoints.save(state, number)
            if checkpoints is not None and request is not None and stop:
                raise Interrupted(
                    f"stopped by {request.name} after step {number} and saved; the same command"
                    f" continues {checkpoints.directory}.",
                    request.signal or SIGINT,
                )
        reader.read(steps, state, metrics)
    return state


class _Feed:
    """The batches of a run in order, each placed on the devices."""

    def __init__(self, batches: Any, first: int, steps: int, mesh: AnyMesh | None) -> None:
        self._steps, self._mesh = steps, mesh
        self._iterator = _iterator(batches, first)

    def next(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        try:
            batch = next(self._iterator)
        except (StopIteration, IndexError) as error:
            raise ConfigError(
                f"batches end before step {step} (counted from 0), and the run has"
                f" steps={self._steps}: give more of them, or fewer steps."
            ) from error
        return place_batch(batch, self._mesh)


def _iterator(batches: Any, first: int) -> Iterator[Any]:
    """The batches from step `first` on."""
    if hasattr(batches, "iterate"):
        return batches.iterate(first)  # type: ignore[no-any-return]
    if hasattr(batches, "__getitem__"):
        return (batches[step] for step in _count(first))
    if not isinstance(batches, Iterable):
        raise ConfigError(
            f"batches of type {type(batches).__name__} give no batch: let batches[k] be that of"
            " step k."
        )
    if first:
        raise ConfigError(
            f"the run continues after step {first}, and batches is a plain iterable, which begins"
            " anew: give an object whose batches[k] is the batch of step k, or another checkpoint"
            " directory."
        )
    return iter(batches)


def _count(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


class _Reader:
    """Waits for steps and hands their metrics to the hooks, with the time that each took."""

    def __init__(self, first: int, hooks: Sequence[Hook]) -> None:
        self._read_to, self._hooks = first, hooks
        self._since = time.perf_counter()

    def read(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Waits for a step, once. Raises Diverged where its numbers are none."""
        if step <= self._read_to:
            return
        self._read_to = step
        jax.block_until_ready(metrics)
        require_finite(step, metrics)
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.tell(step, state, {**metrics, "step_seconds": seconds})

    def tell(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            hook(step, state, metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done here does not count as time of a step."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin


def require_finite(step: int, metrics: Mapping[str, Any]) -> None:
    """Raises Diverged where the loss or the norm of the gradient is not a finite number."""
    found = {name: float(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}
    if not all(map(math.isfinite, found.values())):
        values = ", ".join(
            f"{name.replace('grad_norm', 'gradient norm')} {value}" for name, value in found.items()
        )
        raise Diverged(
            f"step {step}: {values}. The checkpoints are from before. Begin another run directory"
            " with a lower learning rate, more warm-up steps, or a z-loss"
            " (optimizer.learning_rate, optimizer.warmup_steps, train.z_loss)."
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
