"""A run directory whose run is begun anew, and one whose checkpoints have gone."""

import os
from pathlib import Path

from jaxformer.config_file import read_config
from jaxformer.report import read_metrics
from jaxformer.runs.directory import DIRECTORIES, ROLLBACKS
from jaxformer.settings import ConfigError
from jaxformer.tokenizer.files import TOKENIZER_FILES

# What a run writes into its directory.
FILES_OF_A_RUN = (
    *("config.json", "data.json", *TOKENIZER_FILES, "metrics.jsonl"),
    *(ROLLBACKS, "reference.json", "loss.png", "tracker.json", *DIRECTORIES),
)


def move_away(folder: Path) -> None:
    """Moves what a run has written in a directory into a directory there, `before-1` or the next
    free number. Nothing is removed, and a link is moved itself."""
    found = [name for name in FILES_OF_A_RUN if os.path.lexists(folder / name)]
    number = 1
    while os.path.lexists(folder / f"before-{number}"):
        number += 1
    for name in found:
        (folder / f"before-{number}").mkdir(exist_ok=True)
        (folder / name).rename(folder / f"before-{number}" / name)


def require_checkpoints(folder: Path) -> None:
    """Raises ConfigError where metrics.jsonl shows steps after which there must have been a
    checkpoint; for a directory that holds none.

    A run that was killed before its first save was complete has none by right, and begins anew.
    """
    steps = [line["step"] for line in read_metrics(folder) if line.get("step", 0) > 0]
    saved, config = folder / "checkpoints", folder / "config.json"
    if not steps:
        return
    if not saved.exists():
        state = "is missing"
    elif not saved.is_dir():
        state = "is not a directory"
    else:
        if not config.is_file():
            return
        train = read_config(config).train
        # The second save waits for the first one.
        second = 2 * train.checkpoint_every if train.checkpoint_every else train.steps
        if max(steps) < min(second + 1, train.steps):
            return
        state = "is empty"
    raise ConfigError(
        f"run.dir={str(folder)!r} has metrics up to step {max(steps)}, and {saved} {state}; nothing"
        " was changed. Put the checkpoints back, or begin anew with --run.restart True, which keeps"
        " what is there under another name."
    )
