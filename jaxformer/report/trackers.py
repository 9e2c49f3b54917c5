"""Trackers, to which metrics go beside metrics.jsonl: the rows of `run.tracker`."""

import functools
import importlib.util
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxformer.config.run import TrackerName
from jaxformer.config.settings import Table
from jaxformer.files import ConfigError, store_of

PROJECT = "jaxformer"


class Tracker(Protocol):
    """Receives the finite numbers of each logged step, and is closed at the end of a run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """Discards the numbers."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes event files into `tensorboard/` of a run directory, of a URL when it is closed. Events
    of steps after `resume_step`, which are logged again, are marked as purged. After an error of
    writing, as on a full disk, there is one warning and no further event."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        self._local = store_of(run_dir / "tensorboard").output_folder()
        self._purged = resume_step and resume_step + 1
        self._board: Any = None
        self._failed = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._failed:
            return
        try:
            # Not before the first number, so that a start imports nothing for it.
            if self._board is None:
                # Nobody can put a symbolic link at an unpredictable name.
                suffix = f".{uuid.uuid4().hex}"
                self._board = _summary_writer()(
                    str(self._local.path), purge_step=self._purged, filename_suffix=suffix
                )
            if self._is_written():
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, step)
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _is_written(self) -> bool:
        """Tell whether the thread of tensorboardX that writes the events is alive: a full disk ends
        it, and then closing the board would wait for ever."""
        worker = getattr(self._board.file_writer.event_writer, "_worker", None)
        if worker is None or worker.is_alive():
            return True
        self._fail("its writer has ended, as on a full disk")
        return False

    def _fail(self, reason: str) -> None:
        self._failed = True
        if self._board is not None:
            # The writer is closed when the process ends, and would fail again.
            self._board.file_writer.event_writer.close = lambda: None
        warnings.warn(
            f"{self._local.folder} cannot be written ({reason}): the run goes on without it, and"
            " metrics.jsonl has its numbers.",
            stacklevel=3,
        )

    def close(self) -> None:
        if self._board is None or self._failed:
            return
        try:
            if self._is_written():
                self._board.close()
                self._local.close()
        except OSError as error:
            self._fail(error.strerror or str(error))
        except ConfigError as error:
            warnings.warn(str(error), stacklevel=2)


class HostedTracker:
    """Logs to Weights & Biases (`wandb`) or to `trackio`, which take the same calls, in the project
    that WANDB_PROJECT or TRACKIO_PROJECT names, or in "jaxformer".

    A run that resumes continues the one that it began there, by its `run_id`. The failure of a
    service never ends a run: there is one warning, and metrics.jsonl has every number. Raises
    ConfigError only where a run begins and the service refuses it, as without a login.
    """

    def __init__(
        self, name: str, run_dir: Path, resume_step: int, settings: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._run: Any = None
        self._local = store_of(run_dir).output_folder()
        identity = settings["run_id"]
        title = run_dir.resolve().name
        arguments: dict[str, Any] = {
            "project": os.environ.get(f"{name.upper()}_PROJECT") or PROJECT,
            "config": {
                field: value if isinstance(value, (str, int, float, type(None))) else str(value)
                for field, value in settings.items()
            },
            # A new run of the service where it does not know the id.
            "resume": "allow",
        }
        # Weights & Biases takes an id, and would put its files where the process runs.
        if name == "wandb":
            arguments |= {"id": identity, "name": title, "dir": str(self._local.path)}
        else:  # Trackio finds a run by its name
            arguments["name"] = f"{title}-{identity}"
        try:
            # Whatever the service raises: its package is not ours, and a run is worth more than its
            # page.
            self._run = importlib.import_module(name).init(**arguments)
        except Exception as error:
            problem = (
                f"run.tracker={name!r} cannot be started ({type(error).__name__}: {error}). Log in"
                " to the service, or choose run.tracker=none."
            )
            # A mistake is told before hours of training, but ends no run that has them behind it.
            if not resume_step:
                raise ConfigError(problem) from error
            warnings.warn(f"{problem} The run goes on without it.", stacklevel=2)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._try(lambda run: run.log(dict(numbers), step=step))

    def close(self) -> None:
        self._try(lambda run: run.finish())
        self._run = None
        try:
            self._local.close()
        except ConfigError as error:
            warnings.warn(str(error), stacklevel=2)

    def _try(self, call: Callable[[Any], None]) -> None:
        """Make a call; after the first one that fails, no more are made."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            self._run = None
            warnings.warn(
                f"run.tracker={self.name!r} failed ({type(error).__name__}: {error}) and gets no"
                " further numbers from this process; metrics.jsonl has them all.",
                stacklevel=2,
            )


# Starts a tracker from the run directory, the step after which the run continues, and the settings
# of the run by dotted names, with its `run_id`. Raises ConfigError where it cannot be started.
Start = Callable[[Path, int, Mapping[str, Any]], Tracker]


# The rows of `run.tracker`; a new tracker is a new row.
TRACKERS: Table[Start] = Table(
    TrackerName,
    {
        "none": lambda run_dir, resume_step, settings: NoTracker(),
        "tensorboard": lambda run_dir, resume_step, settings: TensorBoard(run_dir, resume_step),
        "wandb": functools.partial(HostedTracker, "wandb"),
        "trackio": functools.partial(HostedTracker, "trackio"),
    },
    besides=("auto",),
)
TRACKER_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def chosen_tracker(name: str) -> Start:
    """Return the row that `run.tracker` selects: for "auto", TensorBoard where it is installed,
    else none.

    Raises ConfigError where the package of a tracker is not installed.
    """
    if name == "auto":
        name = "tensorboard" if importlib.util.find_spec("tensorboardX") else "none"
    package = TRACKER_PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"run.tracker={name!r} needs {package}, which is not installed: pip install"
            f' "jaxformer[{name}]", or choose run.tracker=none.'
        )
    return TRACKERS[name]


def _summary_writer() -> Any:
    """Return the SummaryWriter of tensorboardX, which is imported as if PyTorch were not installed:
    it would import PyTorch only for names of types, which takes seconds."""
    hides_torch = "torch" not in sys.modules
    if hides_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hides_torch:
            del sys.modules["torch"]
    return SummaryWriter
