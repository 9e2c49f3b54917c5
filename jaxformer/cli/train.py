"""`jaxformer train CONFIG`: trains a model, or continues its run."""

import sys

from jaxformer.checkpoints.saving import NotSaved
from jaxformer.cli.arguments import TrainArguments
from jaxformer.cli.streams import lasting, require_files
from jaxformer.cluster.processes import LOST, LostProcess
from jaxformer.config.run import RunConfig
from jaxformer.runs.train_run import RunOutOfMemory, train
from jaxformer.training.loop import Diverged, Interrupted


def run(_: TrainArguments, config: RunConfig) -> int:
    require_files()
    with lasting():
        try:
            train(config)
        except (Diverged, Interrupted) as stop:
            print(f"{type(stop).__name__.lower()}: {stop}", file=sys.stderr)
            return 1 if isinstance(stop, Diverged) else 128 + stop.signal
        except NotSaved as stop:
            print(f"error: {stop}", file=sys.stderr)
            return 1
        except LostProcess as stop:
            print(f"lost process: {stop}", file=sys.stderr)
            return LOST
        except RunOutOfMemory as stop:
            from jaxformer.tools.remedies import advice  # with the plan, which no other run needs

            print(f"out of memory: {stop}\n{advice(stop)}", file=sys.stderr)
            return 1
    return 0
