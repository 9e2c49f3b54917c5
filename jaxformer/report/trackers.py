"""Where metrics go beside metrics.jsonl: the rows of `run.tracker`."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxformer.config import TrackerName
from jaxformer.settings import ConfigError, Table


class Tracker(Protocol):
    """Gets the finite numbers of each logged step, and is closed at the end of a run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """Keeps nothing."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes event files into `tensorboard/` of a run directory. Events of steps after
    `resume_step`, which are logged again, are marked as purged."""

    def __init__(self, run_dir: str | Path, resume_step: int) -> None:
        self._folder = Path(run_dir) / "tensorboard"
        self._purged = resume_step and resume_step + 1
        self._board: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._board is None:
            self._board = _summary_writer()(str(self._folder), purge_step=self._purged)
        if self._is_written():
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)

    def _is_written(self) -> bool:
        """Whether TensorBoard's thread lives; a full disk ends it, and then no event is taken."""
        thread = getattr(self._board.file_writer.event_writer, "_worker", None)
        return thread is None or thread.is_alive()

    def close(self) -> None:
        if self._board is not None and self._is_written():
            with contextlib.suppress(OSError):  # the disk of metrics.jsonl
                self._board.close()


# Starts a tracker for a run directory whose run continues after a step; with the settings of the
# run, by dotted names. Raises ConfigError where it cannot be started.
Start = Callable[[Path, int, Mapping[str, Any]], Tracker]


def _hosted(name: str) -> Start:
    def start(run_dir: Path, resume_step: int, settings: Mapping[str, Any]) -> Tracker:
        from jaxformer.report.hosted import HostedTracker

        return HostedTracker(name, run_dir, resume_step, settings)

    return start


# The rows of `run.tracker`; to add one is to add a tracker.
TRACKERS: Table[Start] = Table(
    TrackerName,
    {
        "none": lambda run_dir, resume_step, settings: NoTracker(),
        "tensorboard": lambda run_dir, resume_step, settings: TensorBoard(run_dir, resume_step),
        "wandb": _hosted("wandb"),
        "trackio": _hosted("trackio"),
    },
    besides=("auto",),
)
TRACKER_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def chosen_tracker(name: str) -> Start:
    """The row that `run.tracker` selects: for "auto", TensorBoard where it is installed, else none.

    Raises ConfigError where the package of a tracker is not installed.
    """
    if name == "auto":
        name = "tensorboard" if _is_installed("tensorboard") else "none"
    if not _is_installed(name):
        raise ConfigError(
            f"run.tracker={name!r} needs {TRACKER_PACKAGES[name]}, which is not installed: pip"
            f' install "jaxformer[{name}]", or choose run.tracker=none.'
        )
    return TRACKERS[name]


def _is_installed(name: str) -> bool:
    return (
        name not in TRACKER_PACKAGES or importlib.util.find_spec(TRACKER_PACKAGES[name]) is not None
    )


def _summary_writer() -> Any:
    """The SummaryWriter of tensorboardX, which is imported as if PyTorch were not installed: else
    it would import PyTorch, for names of types alone, which takes seconds before the first line."""
    without = "torch" not in sys.modules
    if without:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if without:
            del sys.modules["torch"]
    return SummaryWriter
