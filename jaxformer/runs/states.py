"""The states from which a run goes on: the first one, those of its checkpoints, and after
a bad step that of a rollback, with the batches after that of the step."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.arrays.out_of_memory import memory_of
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cluster.processes import require_same, together
from jaxformer.config.settings import Log
from jaxformer.config.train import OptimizerConfig
from jaxformer.data.batches import Batches
from jaxformer.data.rows import NumpyBatch
from jaxformer.files import ConfigError, read_object, store_of, write_text
from jaxformer.report.metrics import LARGEST_STEP
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.setup import RunSetup
from jaxformer.training.loop import BAD_STEPS, Diverged
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.state import TrainState, init_state, state_of

# Above this relative change of the learning rate, a setting has to ask for it.
JUMP = 0.01


def checkpoints_of(setup: RunSetup, log: Log) -> Checkpoints:
    """The checkpoints of a run, which refuse those of another one. Says how the schedule of a run
    that continues from them has changed; raises ConfigError where it would jump unasked."""
    run = setup.run
    train = run.train
    checkpoints = Checkpoints(
        setup.directory.path,
        train.keep_checkpoints,
        train.checkpoint_every,
        keep_every=train.keep_every,
        keep_best=train.keep_best,
        run=setup.identity,
        without=setup.unsaved,
    )

    def before_save(state: TrainState, step: int) -> None:
        # The lines before a checkpoint, which its manifest depends on.
        store_of(setup.directory.path).flush_appended()
        every = run.run.export_every
        if every and (step % every == 0 or step == train.steps):
            # Imported here, because it takes the reader of Hugging Face's formats.
            from jaxformer.runs.exports import export

            export(setup, state, step)

    checkpoints.before_save = before_save
    saved = checkpoints.steps()
    if saved:
        change = changed_schedule(setup.directory, run.optimizer, train.steps, saved[-1])
        if change:
            log(change)
    return checkpoints


def first_state(setup: RunSetup, log: Log) -> TrainState:
    """The state before the first step: drawn from the seed, or with run.init_from the parameters
    of that model."""
    seed = setup.run.run.seed
    target = setup.target
    with memory_of("the initial state"):
        if setup.init_from is None:
            state = init_state(setup.specs, setup.optimizer, mesh=setup.mesh, seed=seed)
        else:
            start = setup.base or setup.warm_start()
            log(start.sentence)
            params = start.params
            if setup.base is not None:
                params = start.adapted(setup.specs, target, seed)
            state = state_of(params, setup.optimizer, target)
        return jax.block_until_ready(state)  # type: ignore[no-any-return]


def changed_schedule(
    directory: RunDirectory, optimizer: OptimizerConfig, steps: int, step: int
) -> str:
    """A sentence about the learning rate of a run that continues after `step` of its `steps` with
    another schedule than its directory was last started with; empty where it is the same."""
    if not directory.config.is_file() or step >= steps:
        return ""
    planned = directory.read_run()
    if (planned.optimizer, planned.train.steps) == (optimizer, steps):
        return ""
    then = float(make_schedule(planned.optimizer, planned.train.steps)(step))
    rate = float(make_schedule(optimizer, steps)(step))
    if rate == then:
        return ""
    change = (
        f"the learning rate of step {step + 1} is {rate:.3g}, and was planned to be {then:.3g}"
        f" (train.steps={planned.train.steps} before, {steps} now)"
    )
    if abs(rate - then) <= JUMP * max(rate, then) or optimizer.decay_steps:
        return f"The schedule has changed: {change}."
    end = planned.optimizer.decay_steps or planned.train.steps
    raise ConfigError(
        f"the schedule follows train.steps, so {change}; nothing was changed. Choose one of these:"
        f"\n  --optimizer.decay_steps {end}: the schedule as it was planned, and its final rate"
        f" after that\n  --optimizer.decay_steps {steps}: the new schedule, with that jump"
    )


class Rollback(NamedTuple):
    """From step `at` on (steps that were done then), batches are taken `skip` later than before."""

    at: int
    skip: int


def read_rollbacks(directory: RunDirectory) -> list[Rollback]:
    """The rollbacks of a run in their order."""
    path = directory.rollbacks
    if not path.is_file():
        return []
    advice = "restore it: without it the run cannot be continued with the batches that it had"
    entries = read_object(path, advice).get("rollbacks")
    try:
        rollbacks = [Rollback(**entry) for entry in entries]  # type: ignore[union-attr]
        numbers = itertools.chain(*rollbacks)
        if all(type(number) is int and 0 <= number <= LARGEST_STEP for number in numbers):
            return rollbacks
    except TypeError:
        pass
    raise ConfigError(f"{path} holds no list of rollbacks: {advice}.")


def shift(rollbacks: list[Rollback], step: int) -> int:
    """How many batches were left out before the batch of a step, counted from 0."""
    total = 0
    for rollback in rollbacks:
        if rollback.at <= step:
            total += rollback.skip
    return total


class ShiftedBatches:
    """The batches of a run with rollbacks: `batches[step]` is batch step + `shift`, on the host,
    and `iterate` gives what `placed` makes of them."""

    def __init__(
        self, batches: Batches, rollbacks: list[Rollback], placed: Callable[[NumpyBatch], Any]
    ) -> None:
        self._batches = batches
        self._rollbacks = rollbacks
        self._placed = placed

    def __getitem__(self, step: int) -> NumpyBatch:
        return self._batches[step + shift(self._rollbacks, step)]

    def iterate(self, start: int = 0) -> Iterator[Any]:
        """The placed batches from step `start` on, prepared ahead between two rollbacks."""
        first = start
        for stop in sorted({rollback.at for rollback in self._rollbacks}):
            if stop > first:
                yield from itertools.islice(self._from(first), stop - first)
                first = stop
        yield from self._from(first)

    def _from(self, first: int) -> Iterator[Any]:
        """The batches with the shift of one step."""
        return map(self._placed, self._batches.iterate(first + shift(self._rollbacks, first)))


def batches_of(setup: RunSetup) -> ShiftedBatches:
    """The batches of a run by step, from which a rollback takes some."""
    return ShiftedBatches(setup.batches, read_rollbacks(setup.directory), setup.placed)


def batch_text(setup: RunSetup, step: int) -> str:
    """The rows of the batch of a step of a run, counted from 1."""
    moved = shift(read_rollbacks(setup.directory), step - 1)
    numbers = setup.batches.row_numbers(step - 1 + moved)
    return f"its batch: rows {', '.join(map(str, numbers))} of the training data"


def recovered(setup: RunSetup, error: Diverged, checkpoints: Checkpoints, log: Log) -> TrainState:
    """The state to train on from after a bad step, where train.on_bad_step is rollback: that of the
    newest checkpoint, or the first one, after the batch of the step was recorded as left out.
    `error.state` is freed. Otherwise, and after `BAD_STEPS` rollbacks, the error is raised."""
    directory = setup.directory
    rollbacks = read_rollbacks(directory)
    can_roll_back = setup.run.train.on_bad_step == "rollback"
    if not can_roll_back or len(rollbacks) >= BAD_STEPS:
        why = ""
        if can_roll_back:
            why = f"\n  the run was rolled back {BAD_STEPS} times before, which is the limit"
        message = f"{error}\n  {batch_text(setup, error.step)}{why}"
        raise Diverged(message, error.step) from None
    # A save may be running. Without its checkpoint a process would go back further than it has to,
    # or to another step than the others.
    checkpoints.wait()
    # Before it is written, and after the last save.
    name = directory.rollbacks.name
    require_same({name: str(rollbacks), "checkpoints": str(checkpoints.steps())})
    # A device may have no memory for two states.
    jax.tree.map(lambda leaf: leaf.delete(), error.state)
    state: TrainState | None = checkpoints.restore(setup.target_over_base, log)
    if state is None:
        state = first_state(setup, log)
    # Steps are counted from 0 here. The batch after the bad one is the next.
    at = int(state.step)
    bad = error.step - 1
    # The number of a batch is the sum of its step and the shift there, so that what earlier
    # rollbacks leave out is counted on both sides.
    skip = bad + shift(rollbacks, bad) + 1 - (at + shift(rollbacks, at))
    rollbacks.append(Rollback(at, skip))

    def write() -> None:
        if jax.process_index() == 0:
            table = {"rollbacks": [rollback._asdict() for rollback in rollbacks]}
            write_text(directory.rollbacks, json.dumps(table, indent=2) + "\n", follow=False)

    # Before any step is made, so that the same command leaves out the same batches after a kill.
    together(write)
    # Each process reads the file in `batches_of`. One that still sees the former file, as on a
    # network file system, would train on other batches than the rest.
    require_same({name: str(read_rollbacks(directory))})
    log(
        f"WARNING: {str(error).partition('. ')[0]}. Rolled back to step {at}, and the next {skip}"
        f" batches are left out (rollback {len(rollbacks)} of at most {BAD_STEPS})."
    )
    return state
