"""The states from which a run goes on: the first one and those of its checkpoints, and how its
schedule has changed since."""

import jax

from jaxformer.arrays.out_of_memory import memory_of
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.config_file import read_config
from jaxformer.config.settings import Log
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError, located
from jaxformer.files.appended import flush_appended
from jaxformer.runs.setup import RunSetup
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.state import TrainState, init_state, state_of

# Above this relative change of the learning rate, a setting has to ask for it.
JUMP = 0.01


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
    # The lines before a checkpoint are in the store when it is.
    checkpoints.before_save = flush_appended
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


def changed_schedule(run_dir: str, optimizer: OptimizerConfig, steps: int, step: int) -> str:
    """A sentence about the learning rate of a run that continues after `step` of its `steps` with
    another schedule than its directory was last started with; empty where it is the same."""
    path = located(run_dir) / "config.json"
    if not path.is_file() or step >= steps:
        return ""
    planned = read_config(path)
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
