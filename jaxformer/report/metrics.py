"""`metrics.jsonl`: what a run measured, one JSON line a logged step, mirrored to TensorBoard where
that is installed."""

import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxformer.config import ConfigError

FILE = "metrics.jsonl"


def has_tensorboard() -> bool:
    """Whether metrics will be mirrored to TensorBoard."""
    return importlib.util.find_spec("tensorboardX") is not None


class MetricsLog:
    """Appends metrics to a run directory, each line on disk as soon as it is logged.

    A run that continues after `resume_step` steps forgets the lines of later steps, which it will
    log again, and a last line that a kill tore; so its file ends up with the steps of a run never
    interrupted. `resume_step=0` starts anew.

    Every line has `seconds`, the wall time of the run up to it, evaluations and saving included. It
    counts from `began`, a value of `time.monotonic()` (default: now), and a run that continues goes
    on from the last line that is kept.
    """

    def __init__(
        self, run_dir: str | Path, resume_step: int = 0, began: float | None = None
    ) -> None:
        began = time.monotonic() if began is None else began
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = _rewrite(self.path, resume_step) if self.path.exists() else 0.0
        self._zero = began - before
        self._file = self.path.open("a", encoding="ascii", newline="\n")
        self._resume_step = resume_step
        self._board: Any = None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line; `values` are numbers or scalar arrays.

        JSON has no NaN: a value that is not finite is written as null, and its name under
        "non_finite" with "nan", "inf" or "-inf", from which `read_metrics` restores it.
        """
        numbers = {name: _number(value) for name, value in values.items()}
        odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": int(step)} | {
            n: None if n in odd else v for n, v in numbers.items()
        }
        line["seconds"] = round(time.monotonic() - self._zero, 3)
        self._file.write(
            json.dumps(line | ({"non_finite": odd} if odd else {}), allow_nan=False) + "\n"
        )
        self._file.flush()
        if has_tensorboard():
            self._mirror(
                int(step), {name: value for name, value in numbers.items() if name not in odd}
            )

    def _mirror(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._board is None:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(
                str(self.path.parent / "tensorboard"),
                purge_step=self._resume_step and self._resume_step + 1,
            )
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl, oldest first; a last line that is still being written is
    left out."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: {run_dir} is not a run directory, or nothing was logged in it"
            " yet."
        )
    return [_restored(line) for line in _lines(path)]


def _number(value: Any) -> float:
    """A Python int or float out of a number, a NumPy scalar or an array of one element, without
    losing a bit."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, (int, float)) else float(value)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="ascii", errors="replace").splitlines()
    for number, line in enumerate(text, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(text):
                return
            raise ConfigError(
                f"{path}, line {number}, is not JSON ({error}): mend or delete that line."
            ) from error
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            if number == len(text):
                return
            raise ConfigError(
                f"{path}, line {number}, is not an object with an integer step: mend or delete that"
                " line."
            )
        yield entry


def _restored(line: dict[str, Any]) -> dict[str, Any]:
    return line | {name: float(text) for name, text in line.pop("non_finite", {}).items()}


def _rewrite(path: Path, resume_step: int) -> float:
    """Keeps the lines up to `resume_step`; the seconds of the last of them, 0 where it has none."""
    kept = [line for line in _lines(path) if resume_step > 0 and line["step"] <= resume_step]
    replacement = path.with_name(f".{path.name}.new")
    with replacement.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(replacement, path)
    return max((line.get("seconds", 0.0) for line in kept), default=0.0)
