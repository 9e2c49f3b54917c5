"""Weights & Biases and Trackio, which take the same calls."""

import importlib
import json
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, read_object, write_text

TRACKED = "tracker.json"  # in a run directory: the id under which the service knows the run
PROJECT = "jaxformer"


class HostedTracker:
    """Logs to `wandb` or `trackio`, in the project that WANDB_PROJECT or TRACKIO_PROJECT names, or
    in "jaxformer".

    A run that resumes continues the one that it began there, by the id in tracker.json. A service
    that fails never ends a run: it is warned of once, and metrics.jsonl has every number. Only
    where a run begins is a refusal, such as a missing login, a ConfigError.
    """

    def __init__(
        self, name: str, run_dir: Path, resume_step: int, settings: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._run: Any = None
        identity = _identity(run_dir, name)
        title = run_dir.resolve().name
        where: dict[str, Any] = {
            "project": os.environ.get(f"{name.upper()}_PROJECT") or PROJECT,
            "config": {field: _plain(value) for field, value in settings.items()},
            "resume": "allow",
        }
        if name == "wandb":
            where |= {"id": identity, "name": title, "dir": str(run_dir)}
        else:  # which finds a run by its name
            where["name"] = f"{title}-{identity}"
        try:
            self._run = importlib.import_module(name).init(**where)
        except Exception as error:
            told = (
                f"run.tracker={name!r} cannot be started ({type(error).__name__}: {error}). Log in"
                " to the service, or choose run.tracker=none."
            )
            if not resume_step:
                raise ConfigError(told) from error
            warnings.warn(f"{told} The run goes on without it.", stacklevel=2)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._try(lambda run: run.log(dict(numbers), step=step))

    def close(self) -> None:
        self._try(lambda run: run.finish())
        self._run = None

    def _try(self, call: Any) -> None:
        """Makes a call; after one that fails none is made any more."""
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
    """The id of a run with a service, drawn where it has none yet."""
    path = run_dir / TRACKED
    known = read_object(path) if path.exists() else {}
    if not isinstance(known.get(name), str):
        known[name] = secrets.token_hex(4)
        write_text(path, json.dumps(known) + "\n", follow=False)
    return str(known[name])


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
