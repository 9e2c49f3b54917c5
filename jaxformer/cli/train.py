"""`jaxformer train CONFIG`: the main job."""

import sys
from collections.abc import Sequence

from jaxformer.config_file import read_config
from jaxformer.runs.config import parse_arguments

USAGE = (
    "usage: python train.py CONFIG [--section.field value ...]   (CONFIG --help lists every field)"
)


def run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(
            f"{USAGE}\nConfigs are Python files: see configs/, and begin with"
            " configs/quickstart.py.",
            file=sys.stderr,
        )
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    config = parse_arguments(
        read_config(arguments[0]), arguments[1:], program=f"train.py {arguments[0]}"
    )
    from jaxformer.runs.run import train
    from jaxformer.training.loop import Diverged, Interrupted

    try:
        train(config)
    except (Diverged, Interrupted) as stop:
        print(f"{type(stop).__name__.lower()}: {stop}", file=sys.stderr)
        return 1 if isinstance(stop, Diverged) else 130
    return 0
