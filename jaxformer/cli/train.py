"""`jaxformer train CONFIG`: trains a model, or continues its run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxformer.cli.arguments import ConfigArguments, parse_with_config


@dataclass(frozen=True, kw_only=True)
class TrainArguments(ConfigArguments):
    """Trains the model of a config. The same command continues an interrupted run."""


def run(arguments: Sequence[str]) -> int:
    _, config = parse_with_config(TrainArguments, "train.py", arguments)
    from jaxformer.runs.out_of_memory import OutOfMemory
    from jaxformer.runs.run import train
    from jaxformer.training.loop import Diverged, Interrupted

    named = {Diverged: "diverged", OutOfMemory: "out of memory", Interrupted: "interrupted"}
    try:
        train(config)
    except tuple(named) as stop:
        print(f"{named[type(stop)]}: {stop}", file=sys.stderr)
        return 130 if isinstance(stop, Interrupted) else 1
    return 0
