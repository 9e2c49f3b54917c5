"""The training loop, for any step and any batches: steps, metrics that are read one step late,
evaluations and checkpoints; and the totals of an evaluation over batches."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from signal import SIGINT
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxformer.arrays.mesh import AnyMesh, place_batch
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cluster.processes import StopAgreement
from jaxformer.cluster.signals import Stopped, StopRequest, current, watched
from jaxformer.files import ConfigError
from jaxformer.training.program import Metrics
from jaxformer.training.state import TrainState, learning, mesh_of, on_mesh
from jaxformer.training.step import Batch, Loss, checked_sums

Advance = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Evaluate = Callable[[Any], Mapping[str, float]]


class IndexedBatches(Protocol):
    """A sequence of batches, which may have no end."""

    def __getitem__(self, step: int, /) -> Batch: ...


class StateBatches(Protocol):
    """Batches that see the state, such as texts that the model writes itself."""

    def rows(self, step: int, state: TrainState, /) -> Batch: ...


class Hook(Protocol):
    """What `fit` calls with the metrics of a step, and with those of an evaluation."""

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any], /) -> None: ...


class Diverged(RuntimeError):
    """A loss, a gradient or a parameter is no longer a finite number; checkpoints are from before.

    `step` is the step after which it was seen. `state` is the newest state: its parameters are from
    before that step, or, where the next step was running already, from after the next step.
    """

    def __init__(self, message: str, step: int = 0, state: TrainState | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.state = state


class Interrupted(RuntimeError):
    """A signal, whose number is `signal`, asked the run to stop; its state is saved and the same
    command continues it."""

    def __init__(self, message: str, signal: int = SIGINT) -> None:
        super().__init__(message)
        self.signal = signal


def fit(
    step: Advance,
    state: TrainState,
    batches: IndexedBatches | StateBatches | Iterable[Batch],
    *,
    steps: int,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    checkpoints: Checkpoints | None = None,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Train until `steps` optimizer steps are done, and return the last state; the state given is
    donated.

    Args:
      step: (state, batch) -> (state, metrics), from `make_step`; any function of that form that
          donates its state.
      state: from `init_state`.
      batches: `batches[k]` is the batch of step k, counted from 0: a pytree of arrays whose first
          axis is the rows of this process. An `iterate(start)` method, where there is one, gives
          them in order, prepared ahead. An object that has a method `rows(step, state)`
          instead is asked between two steps for the batch of the next one, counted from 0, and may
          read the state, whose arrays it must not keep. A plain iterable is taken too, where
          nothing has to be resumed.
      steps: optimizer steps of the whole run, those before a resume counted in.
      evaluate: params -> {name: number}, called at the end and each `evaluate_every` steps (0: at
          the end alone), with the average of the weights where the optimizer keeps one
          (`evaluation_weights`).
      checkpoints: where the state is saved: each `checkpoints.every` steps, at the end, and when
          SIGINT, SIGTERM, SIGUSR1 or SIGHUP asks the run to stop, which abandons an evaluation.
          The newest one there that is beyond `state` is continued from, bitwise.
      hooks: called as hook(step, state, metrics) once for each step, one step late, so that the
          device never waits: `metrics` are those of `step` (device scalars, ready) and
          `step_seconds`, the time since the step before without evaluations and saves; `state` is
          the newest one, while the next step is running already. Called with the numbers of an
          evaluation too. One with a method `skips(step, state, metrics)`, such as `jf.SkipSteps`,
          is asked whether training goes on after a step that is not finite.

    Raises:
      ConfigError: if batches run out, cannot be resumed, or do not divide among the devices.
      Diverged: if the loss, the norm of the gradient or a parameter is not finite; no such state is
          saved or returned.
      Interrupted: after a signal, with the state saved.
    """
    if checkpoints is not None:
        state = checkpoints.newest(state)
    first = int(state.step)
    mesh = mesh_of(state)
    # Also where a finished run is started again: nothing is evaluated or saved twice.
    if first >= steps:
        return state
    batch_of = _placed(batches, first, steps, mesh)
    reader = _Reader(first, hooks)
    metrics: Metrics = {}
    # Without checkpoints there is nothing to save, and a signal ends the run at once.
    request = StopRequest()
    with contextlib.ExitStack() as stack:
        if checkpoints is not None:
            # Signals are only noted until the last save is on the disk.
            request = stack.enter_context(watched())
            stack.enter_context(request.hold())
            if jax.process_count() > 1:
                request.agree = StopAgreement(steps)
                stack.callback(setattr, request, "agree", None)
            stack.callback(checkpoints.wait)
        batch = batch_of(first, state)
        for number in range(first + 1, steps + 1):
            previous = metrics
            state, metrics = step(state, batch)
            # While the device computes this step, the host reads the one before and prepares the
            # batch of the next: metrics come one step late, and the device does not wait.
            reader.read(number - 1, state, previous)
            last = number == steps
            if not last:
                batch = batch_of(number, state)
            result: Mapping[str, float] = {}
            stop = request.asked(number)
            is_evaluated = last or _due(number, evaluate_every)
            if evaluate and is_evaluated and not stop:
                reader.read(number, state, metrics)
                with reader.paused():
                    try:
                        result = evaluate(evaluation_weights(state.params, state.optimizer))
                        reader.tell(number, state, result)
                    except Stopped:
                        if checkpoints is None:
                            raise
                        # Between two batches: the state is saved, and the evaluation is not.
                        stop = True
            is_saved = last or stop
            if checkpoints is not None:
                is_saved |= _due(number, checkpoints.every)
            if is_saved:
                reader.read(number, state, metrics)
                # Reads all parameters once a save, which is cheap beside the save itself. A
                # gradient can be finite and its update overflow, and such a checkpoint could not be
                # continued.
                require_finite_params(state, number)
                if checkpoints is not None:
                    with reader.paused():
                        checkpoints.save(state, number, result)
            if stop:
                assert checkpoints is not None  # without them no signal is noted
                raise Interrupted(
                    f"stopped by {request.name} after step {number} and saved; the same command"
                    f" continues {checkpoints.directory}.",
                    request.signal or SIGINT,
                )
        if checkpoints is not None:
            checkpoints.wait()
            request.heed()  # a signal may have come meanwhile
    return state


def _placed(
    batches: IndexedBatches | StateBatches | Iterable[Batch],
    first: int,
    steps: int,
    mesh: AnyMesh | None,
) -> Callable[[int, TrainState], Batch]:
    """Return a function of a step and the state before it to the batch of that step, placed on the
    devices. It is called for the steps from `first` on in their order."""
    iterator: Iterator[Batch]
    if hasattr(batches, "iterate"):
        iterator = batches.iterate(first)
    elif hasattr(batches, "__getitem__"):
        # Not an iterator over the object: the batch of a step depends on the step alone, so a
        # resumed run reads the one that it would have read.
        iterator = (batches[step] for step in itertools.count(first))
    elif hasattr(batches, "rows"):
        return lambda step, state: place_batch(batches.rows(step, state), mesh)
    elif not isinstance(batches, Iterable):
        raise ConfigError(
            f"batches of type {type(batches).__name__} give no batch: let batches[k] be that of"
            " step k."
        )
    elif first:
        raise ConfigError(
            f"the run continues after step {first}, and batches is a plain iterable, which begins"
            " anew: give an object whose batches[k] is the batch of step k, or another checkpoint"
            " directory."
        )
    else:
        iterator = iter(batches)

    def following(step: int, state: TrainState) -> Batch:
        try:
            batch = next(iterator)
        except (StopIteration, IndexError) as error:
            raise ConfigError(
                f"batches end before step {step} (counted from 0), and the run has steps={steps}:"
                " give more of them, or fewer steps."
            ) from error
        return place_batch(batch, mesh)

    return following


class _Reader:
    """Waits for steps and hands their metrics to the hooks, with the time that each took."""

    def __init__(self, first: int, hooks: Sequence[Hook]) -> None:
        self._read_to = first
        self._hooks = hooks
        self._since = time.perf_counter()

    def read(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Wait for a step, once. Raises Diverged where it is not finite and no hook skips it."""
        if step <= self._read_to:
            return
        self._read_to = step
        # In the loop the next step is running already, so that the device does not wait.
        jax.block_until_ready(metrics)
        if not is_finite(metrics):
            skipping = [hook for hook in self._hooks if hasattr(hook, "skips")]
            if not any(hook.skips(step, state, metrics) for hook in skipping):
                raise diverged(step, state, metrics)
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        self.tell(step, state, {**metrics, "step_seconds": seconds})

    def tell(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            hook(step, state, metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time in this context out of that of a step."""
        begin = time.perf_counter()
        yield
        # Steps would look slower by the time of an evaluation or of a save, and so would the tokens
        # per second.
        self._since += time.perf_counter() - begin


# The metrics that have to be finite, and their names in messages.
FINITE_METRICS = {"loss": "loss", "grad_norm": "gradient norm"}


def is_finite(metrics: Mapping[str, Any]) -> bool:
    """Return whether the loss and the norm of the gradient are finite numbers."""
    return all(math.isfinite(float(metrics.get(name, 0))) for name in FINITE_METRICS)


def diverged(step: int, state: TrainState, metrics: Mapping[str, Any], why: str = "") -> Diverged:
    """Return the error of a step that is not finite; `why` is added to the message as a further
    reason."""
    values = []
    for name, label in FINITE_METRICS.items():
        if name in metrics:
            values.append(f"{label} {float(metrics[name])}")
    return Diverged(f"step {step}: {', '.join(values)}{why}. {DIVERGED_ADVICE}", step, state)


DIVERGED_ADVICE = (
    "The checkpoints are from before. Begin another run directory with a lower learning rate, more"
    " warm-up steps, or a z-loss (optimizer.learning_rate, optimizer.warmup_steps, train.z_loss)."
)


def require_finite_params(state: TrainState, step: int) -> None:
    """Raise Diverged where a parameter that learns is not finite."""
    if not _all_finite(learning(state.params, state.frozen)):
        raise Diverged(
            f"step {step}: its parameters are not finite. {DIVERGED_ADVICE}", step, state
        )


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    # Integers are finite too.
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# Steps that are skipped, or rollbacks that are made, before the next bad step ends a run.
BAD_STEPS = 10


class SkipSteps:
    """A hook of `fit` with which training goes on after a step that is not finite, whose update
    `make_step` has left out.

    state = jf.fit(step, state, batches, steps=100, hooks=[jf.SkipSteps(limit=10)])

    `skipped` counts these steps, from its initial value on. Raises Diverged at the first one beyond
    `limit`.
    """

    def __init__(self, limit: int = BAD_STEPS, skipped: int = 0) -> None:
        self.limit = limit
        self.skipped = skipped

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        """Do nothing: only steps that are not finite matter."""

    def skips(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> bool:
        """Count a step that is not finite."""
        if self.skipped >= self.limit:
            raise diverged(
                step,
                state,
                metrics,
                f", and {self.skipped} steps were skipped before, which is the limit",
            )
        self.skipped += 1
        return True


Totals = dict[str, tuple[float, float]]
# The number of batches that are started before the sums of an earlier one are waited for.
STARTED_BATCHES = 2


def make_totals(sums: Loss) -> Callable[[Any, Iterable[Batch]], Totals]:
    """Return a function of params and batches to the total (sum, weight) of each entry of `sums`,
    added in float64.

    Both are summed on the devices, so that with several processes each counts the rows of all.
    """
    program = jax.jit(lambda params, batch: checked_sums(sums(params, batch, None)))

    def totals(params: Any, batches: Iterable[Batch]) -> Totals:
        mesh = mesh_of(params)
        sums_of_batches: list[Any] = []
        for number, batch in enumerate(batches):
            request = current()
            if request:
                request.heed(number)
            placed = place_batch(batch, mesh)
            with on_mesh(mesh):
                sums_of_batches.append(program(params, placed))
            # Started batches hold their activations: without a bound an evaluation could run out of
            # memory, and with 0 the device would wait for the host.
            if len(sums_of_batches) > STARTED_BATCHES:
                jax.block_until_ready(sums_of_batches[-STARTED_BATCHES - 1])
        if not sums_of_batches:
            return {}
        result = {}
        for name in sums_of_batches[0]:
            entries = zip(*(batch_sums[name] for batch_sums in sums_of_batches), strict=True)
            total, weight = (math.fsum(map(float, numbers)) for numbers in entries)
            result[name] = (total, weight)
        return result

    return totals


def make_evaluate(sums: Loss, batches: Iterable[Batch]) -> Callable[[Any], dict[str, float]]:
    """Return the `evaluate` of `fit`: the means of `sums` over held-out batches, {"val_loss": ...,
    ...}.

    `sums` is a loss, or another function (params, batch, None) -> {name: (sum, weight)} with a
    "loss". `batches` is iterated over at each call, so it must be a list or another object that can
    be iterated over repeatedly.
    """
    totals = make_totals(sums)

    def evaluate(params: Any) -> dict[str, float]:
        sums_by_name = totals(params, batches)
        return {
            f"val_{name}": total / (weight or 1) for name, (total, weight) in sums_by_name.items()
        }

    return evaluate
