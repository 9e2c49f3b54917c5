"""Weights & Biases and Trackio, which take the same calls."""

import importlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxformer.files import ConfigError, read_object, write_text

TRACKED = "tracker.json"  # of a run directory: the ids of the run by service
PROJECT = "jaxformer"


class HostedRun(Protocol):
    """What is used here of the runs of both packages."""

    def log(self, data: dict[str, float], *, step: int) -> None: ...

    def finish(self) -> None: ...


class HostedTracker:
    """Logs to `wandb` or `trackio`, in the project that WANDB_PROJECT or TRACKIO_PROJECT names, or
    in "jaxformer".

    A run that resumes continues the one that it began there, by the id in tracker.json. The failure
    of a service never ends a run: there is one warning, and metrics.jsonl has every number. Raises
    ConfigError only where a run begins and the service refuses it, as without a login.
    """

    def __init__(
        self, name: str, run_dir: Path, resume_step: int, settings: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._run: HostedRun | None = None
        identity = _identity(run_dir, name)
        title = run_dir.resolve().name
        arguments: dict[str, Any] = {
            "project": os.environ.get(f"{name.upper()}_PROJECT") or PROJECT,
            "config": {field: _plain(value) for field, value in settings.items()},
            "resume": "allow",
        }
        if name == "wandb":
            arguments |= {"id": identity, "name": title, "dir": str(run_dir)}
        else:  # Trackio finds a run by its name
            arguments["name"] = f"{title}-{identity}"
        try:
            self._run = importlib.import_module(name).init(**arguments)
        except Exception as error:
            problem = (
                f"run.tracker={name!r} cannot be started ({type(error).__name__}: {error}). Log in"
                " to the service, or choose run.tracker=none."
            )
            if not resume_step:
                raise ConfigError(problem) from error
            warnings.warn(f"{problem} The run goes on without it.", stacklevel=2)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._try(lambda run: run.log(dict(numbers), step=step))

    def close(self) -> None:
        self._try(lambda run: run.finish())
        self._run = None

    def _try(self, call: Callable[[HostedRun], None]) -> None:
        """Makes a call; after the first one that fails, no more are made."""
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


def _identity(run_dir: Path, name: str) -> str:
    """The id of a run at a service, which is drawn at random for a new run."""
    path = run_dir / TRACKED
    identities = read_object(path) if path.exists() else {}
    if not isinstance(identities.get(name), str):
        identities[name] = secrets.token_hex(4)
        write_text(path, json.dumps(identities) + "\n", follow=False)
    return str(identities[name])


def _plain(value: Any) -> str | int | float | bool | None:
    """A setting as a value of JSON."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
