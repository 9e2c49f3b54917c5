"""The states of a run: the first one, those of its checkpoints, and what stays below an adapter."""

import jax

from jaxformer.arrays.out_of_memory import memory_of
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.settings import Log
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
        without=unsaved(setup),
    )
    if steps := checkpoints.steps():
        from jaxformer.runs.schedule_change import check_schedule

        check_schedule(setup.run, steps[-1], log)
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
            from jaxformer.runs.adapter_base import first_params

            params = first_params(setup.specs, setup.base.params, target, seed)
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
    state: TrainState | None = checkpoints.restore(with_base_of(setup, setup.target), log)
    return state


def with_base_of(setup: RunSetup, target: TrainState) -> TrainState:
    """A state as shapes, in which the leaves below an adapter are arrays; `target` without one."""
    if setup.base is None:
        return target
    from jaxformer.runs.adapter_base import with_base

    return with_base(setup.specs, target, setup.base.params)


def unsaved(setup: RunSetup) -> list[str]:
    """The paths of the leaves of a state that its checkpoints do not hold: those below an
    adapter."""
    if setup.base is None:
        return []
    from jaxformer.adapters.adapted_params import base_paths

    return [f"params.{path}" for path in base_paths(setup.specs)]
