"""`metrics.jsonl`: the metrics of a run, one line of JSON for each logged step. A tracker gets the
same numbers."""

import contextlib
import json
import math
import os
import reprlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from jaxformer.files import ConfigError, append_to, read_file, replacing
from jaxformer.report.trackers import Tracker, chosen_tracker

FILE = "metrics.jsonl"
LARGEST_STEP = 2**53  # up to here a float64 holds every integer
LARGEST_NUMBER = sys.float_info.max
NON_FINITE = ("nan", "inf", "-inf")


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Appends metrics to a run directory, each line on disk as soon as it is logged.

    A run that resumes after `resume_step` steps removes the lines of later steps, which it will log
    again, and a last line that a kill left incomplete, so that its file has the steps of an
    uninterrupted run. `resume_step=0` starts anew.

    Every line has `seconds`, the wall time of the run up to it, with evaluations and saving. It
    counts from `began`, a value of `time.monotonic()` (default: now). A run that resumes adds the
    seconds of the last line that remains.

    A line that cannot be written, as on a full disk, gives one warning and is written with a later
    line. If it is still unwritten when the log is closed, a warning names the missing steps.

    `tracker` gets the finite numbers of each line that is written, and is closed with the log; by
    default it is TensorBoard, where tensorboardX is installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int = 0,
        began: float | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        began = time.monotonic() if began is None else began
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begun = os.path.lexists(self.path)
        before = _remove_later_lines(self.path, resume_step) if begun else 0.0
        self._zero = began - before
        try:
            self._file = append_to(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error.strerror}).") from error
        self._unwritten, self._missing = bytearray(), list[int]()
        if tracker is None:
            tracker = chosen_tracker("auto")(Path(run_dir), resume_step, {})
        self._tracker = tracker

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Writes one line; `values` are numbers or scalar arrays.

        JSON has no NaN: a value that is not finite is written as null, and its name under
        "non_finite" with "nan", "inf" or "-inf", from which `read_metrics` restores it.
        """
        numbers = {name: _number(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        odd = {name: str(value) for name, value in numbers.items() if name not in finite}
        line: dict[str, Any] = {"step": int(step)} | numbers | dict.fromkeys(odd)
        line["seconds"] = round(time.monotonic() - self._zero, 3)
        line |= {"non_finite": odd} if odd else {}
        self._unwritten += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._missing.append(int(step))
        if (error := self._write()) and len(self._missing) == 1:
            warnings.warn(
                f"{self.path} cannot be written from step {step} on ({error}): the run goes on, and"
                " lines are kept until they can be.",
                stacklevel=2,
            )
        if not self._unwritten:
            self._tracker.log(int(step), finite)

    def _write(self) -> str:
        """Writes all lines that are not written yet. Returns the reason where that fails, else an
        empty string."""
        try:
            while self._unwritten:  # a full disk may take only a prefix
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            return error.strerror or str(error)
        self._missing.clear()
        return ""

    def close(self) -> None:
        if error := self._write():
            warnings.warn(
                f"{self.path} lacks {len(self._missing)} lines, of steps {self._missing[0]} to"
                f" {self._missing[-1]} ({error}).",
                stacklevel=2,
            )
        self._file.close()
        self._tracker.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl, oldest first, without a last line that is still being
    written. Raises ConfigError for a file that is missing, and for a line that `MetricsLog` does
    not write."""
    path = Path(run_dir) / FILE
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: {run_dir} is not a run directory, or nothing was logged in it"
            " yet."
        )
    return [
        line | {name: float(text) for name, text in line.pop("non_finite", {}).items()}
        for line in _lines(path)
    ]


def _number(value: SupportsFloat) -> float:
    """The exact Python int or float of a number, a NumPy scalar or an array of one element."""
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, (int, float)) else float(number)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = read_file(path).decode("ascii", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                return  # it is still being written
            entry = None
        if fault := _fault(entry):
            raise ConfigError(
                f"{path}, line {number}, is not a JSON object with an integer step and numbers:"
                f" {fault}. Correct or delete that line."
            )
        yield entry


def _fault(entry: Any) -> str:
    """What is wrong with a line of metrics.jsonl; empty for one that `MetricsLog` writes."""
    if not isinstance(entry, dict):
        return "it is no object"
    step, odd = entry.get("step"), entry.get("non_finite", {})
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        return f"step is {_shown(step)}, not a whole number from 0 to {LARGEST_STEP}"
    if not isinstance(odd, dict) or not all(map(_is_non_finite, odd.values())):
        return f"non_finite is {_shown(odd)}, not names with one of {', '.join(NON_FINITE)} each"
    for name, value in entry.items():
        if name == "non_finite" or (value is None and name in odd):
            continue
        if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
            return f"{_shown(name)} is {_shown(value)}, not a finite number"
    return ""


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, str) and value in NON_FINITE


def _shown(value: Any) -> str:
    text = reprlib.repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text


def _remove_later_lines(path: Path, resume_step: int) -> float:
    """Removes the lines after `resume_step`, all if that is 0. Returns the seconds of the last line
    that remains, 0 without one."""
    lines = _lines(path) if path.exists() else ()  # a symbolic link may lead nowhere
    remaining = [line for line in lines if resume_step > 0 and line["step"] <= resume_step]
    with replacing(path, follow=False) as file:
        file.writelines(json.dumps(line, allow_nan=False).encode() + b"\n" for line in remaining)
    return max((line.get("seconds", 0.0) for line in remaining), default=0.0)
