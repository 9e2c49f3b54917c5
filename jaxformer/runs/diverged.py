"""What a run does after a step that is not finite, as train.on_nan says."""

from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.settings import Log
from jaxformer.runs.diagnosis import diagnosis
from jaxformer.runs.rollback import read_rollbacks, roll_back
from jaxformer.runs.setup import RunSetup
from jaxformer.training.loop import Diverged
from jaxformer.training.state import TrainState


def recovered(setup: RunSetup, error: Diverged, checkpoints: Checkpoints, log: Log) -> TrainState:
    """The state to train on from where train.on_nan is "rollback" and train.nan_limit permits it.
    Raises Diverged otherwise, with a diagnosis of the step."""
    settings, why = setup.run.train, ""
    if settings.on_nan == "rollback":
        done = len(read_rollbacks(setup.run.run.dir))
        if done < settings.nan_limit:
            return roll_back(setup, error, checkpoints, log)
        why = f"\n  the run was rolled back {done} times before, which is train.nan_limit"
    raise Diverged(f"{error}{diagnosis(setup, error)}{why}", error.step) from None
