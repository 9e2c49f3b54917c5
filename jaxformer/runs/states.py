"""The states of a run: the first one, those of its checkpoints, and what stays below an adapter."""

import jax

from jaxformer.arrays.out_of_memory import memory_of
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.settings import Log
from jaxformer.runs.schedule_change import changed_schedule
from jaxformer.runs.setup import RunSetup
from jaxformer.training.state import TrainState, init_state, state_of


def checkpoints_of(setup: RunSetup, log: Log) -> Checkpoints:
    """The checkpoints of a run, which refuse those of another one. Says how the schedule of a run
    that continues from them has changed; raises ConfigError where it would jump unasked."""
    train = setup.run.train
    checkpoints = Checkpoints(
        setup.run.run.dir,
        train.keep_checkpoints,
        train.checkpoint_every,
        keep_every=train.keep_every,
        keep_best=train.keep_best,
        run=setup.identity,
        without=setup.unsaved,
    )
    saved, run = checkpoints.steps(), setup.run
    if saved:
        change = changed_schedule(run.run.dir, run.optimizer, train.steps, saved[-1])
        if change:
            log(change)
    return checkpoints


def first_state(setup: RunSetup, log: Log) -> TrainState:
    """The state before the first step: drawn from the seed, or with run.init_from the parameters
    of that model."""
    run, seed, target = setup.run, setup.run.run.seed, setup.target
    with memory_of("the initial state"):
        if not run.run.init_from:
            state = init_state(setup.specs, setup.optimizer, mesh=setup.mesh, seed=seed)
            return jax.block_until_ready(state)  # type: ignore[no-any-return]
        if setup.base is not None:
            params = setup.base.first_params(setup.specs, target, seed)
            log(setup.base.sentence)
        else:
            from jaxformer.runs.init_from import warm_start

            start = warm_start(run, setup.mesh, setup.corpus.labels)
            params = start.params
            log(start.sentence(run.run.init_from))
        state = state_of(params, setup.optimizer, target)
        return jax.block_until_ready(state)  # type: ignore[no-any-return]


def restored(setup: RunSetup, checkpoints: Checkpoints, log: Log) -> TrainState | None:
    """The state of the newest checkpoint of a run that can be read; None if there are none. Raises
    ConfigError as `Checkpoints.restore` does."""
    state: TrainState | None = checkpoints.restore(setup.target_over_base, log)
    return state
