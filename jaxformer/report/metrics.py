"""`metrics.jsonl`: the metrics of a run, one line of JSON for each logged step. A tracker gets the
same numbers.

The lines are a chain: each has a digest of the line before it, so that none can be altered, removed
or inserted without a change of all lines after it.
"""

import contextlib
import hashlib
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from jaxformer.files import ConfigError, lexists, read_file, replacing, store_of
from jaxformer.report.trackers import Tracker, chosen_tracker

FILE = "metrics.jsonl"
LARGEST_STEP = 2**53  # up to here a float64 holds every integer
LARGEST_NUMBER = sys.float_info.max
NON_FINITE = ("nan", "inf", "-inf")
# The two texts of a line.
STATE = "state"
BEFORE = "before"
DIGITS = {STATE: 16, BEFORE: 32}  # hexadecimal


class LoggedLine(NamedTuple):
    """A line of metrics.jsonl: its bytes, without the line feed, and the object that they hold."""

    raw: bytes
    entry: dict[str, Any]


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

    Every line ends with `before`, the digest of the line before it; in the first line it is that of
    `identity`, which says as JSON which run this is. `jaxformer verify` compares them.

    `tracker` gets the finite numbers of each line that is written, and is closed with the log; by
    default it is TensorBoard, where tensorboardX is installed.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int = 0,
        began: float | None = None,
        tracker: Tracker | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        if began is None:
            began = time.monotonic()
        self.path = run_dir / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remaining: list[LoggedLine] = []
        if resume_step and self.path.exists():
            lines = logged_lines(self.path)
            remaining = [line for line in lines if line.entry["step"] <= resume_step]
        # A symbolic link may lead nowhere.
        if lexists(self.path):
            # All or nothing: a kill here leaves the former lines.
            with replacing(self.path, follow=False) as file:
                file.writelines(line.raw + b"\n" for line in remaining)
        self._before = first_digest(identity or {})
        self._zero = began
        if remaining:
            self._before = line_digest(remaining[-1].raw)
            self._zero -= remaining[-1].entry.get("seconds", 0.0)
        try:
            self._file = store_of(self.path).append()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error.strerror}).") from error
        self._unwritten = bytearray()
        self._missing: list[int] = []
        if tracker is None:
            tracker = chosen_tracker("auto")(run_dir, resume_step, {})
        self._tracker = tracker

    def log(self, step: int, values: Mapping[str, SupportsFloat], state: str = "") -> None:
        """Write one line; `values` are numbers or scalar arrays. `state` is the fingerprint of the
        state after the step, 16 hexadecimal digits, if the line has one.

        JSON has no NaN: a value that is not finite is written as null, and its name under
        "non_finite" with "nan", "inf" or "-inf", from which `read_metrics` restores it.
        """
        line: dict[str, Any] = {"step": int(step)}
        finite: dict[str, float] = {}
        odd: dict[str, str] = {}
        for name, value in values.items():
            number: Any = value
            if hasattr(value, "item"):
                number = value.item()
            if not isinstance(number, int):  # bfloat16 is no float of Python
                number = float(number)
            if math.isfinite(number):
                finite[name] = line[name] = number
            else:
                odd[name] = str(number)
                line[name] = None
        line["seconds"] = round(time.monotonic() - self._zero, 3)
        if odd:
            line["non_finite"] = odd
        if state:
            line[STATE] = state
        line[BEFORE] = self._before
        # Kept in memory until the disk takes it, so that no line is lost to a full disk.
        raw = json.dumps(line, allow_nan=False).encode()
        self._before = line_digest(raw)
        self._unwritten += raw + b"\n"
        self._missing.append(int(step))
        if (error := self._write()) and len(self._missing) == 1:
            warnings.warn(
                f"{self.path} cannot be written from step {step} on ({error}): the run goes on, and"
                " lines are kept until they can be.",
                stacklevel=2,
            )
        # The tracker never has a number that the file lacks.
        if not self._unwritten:
            self._tracker.log(int(step), finite)

    def _write(self) -> str:
        """Write all lines that are not written yet. Return the reason where that fails, else an
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


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return every line of a run's metrics.jsonl, oldest first, without a last line that is still
    being written. Raises ConfigError for a file that is missing, and for a line that `MetricsLog`
    does not write."""
    path = run_dir / FILE
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: {run_dir} is not a run directory, or nothing was logged in it"
            " yet."
        )
    entries = []
    for _, entry in logged_lines(path):
        for name, text in entry.pop("non_finite", {}).items():
            entry[name] = float(text)
        entries.append(entry)
    return entries


def line_digest(raw: bytes) -> str:
    """Return 32 hexadecimal digits of the SHA-256 of a line, without its line feed."""
    return hashlib.sha256(raw).hexdigest()[: DIGITS[BEFORE]]


def first_digest(identity: Mapping[str, Any]) -> str:
    """Return what stands for the digest of a line before the first one."""
    return line_digest(json.dumps(dict(identity), sort_keys=True).encode())


def logged_lines(path: Path) -> Iterator[LoggedLine]:
    """Yield the lines of a metrics.jsonl, without a last one that is still being written. Raises
    ConfigError for a line that `MetricsLog` does not write."""
    # By bytes: the digest of a line is that of its bytes.
    lines = read_file(path).removesuffix(b"\n").split(b"\n")
    for number, raw in enumerate(lines, start=1):
        try:
            entry = json.loads(raw.decode("ascii", "replace"))
        except (ValueError, RecursionError):
            # A kill may cut the last line alone, since each is written behind the one before.
            if number == len(lines):
                return  # it is still being written
            entry = None
        if not _is_line(entry):
            raise ConfigError(
                f"{path}, line {number}, is not a JSON object with an integer step and numbers, as"
                " a run logs it. Correct or delete that line."
            )
        yield LoggedLine(raw, entry)


def _is_line(entry: Any) -> bool:
    """Tell whether `MetricsLog` may have written a line."""
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return False
    odd = entry.get("non_finite", {})
    if not isinstance(odd, dict) or not all(str(text) in NON_FINITE for text in odd.values()):
        return False
    for name, value in entry.items():
        if name in DIGITS:
            digits = f"[0-9a-f]{{{DIGITS[name]}}}"
            is_right = isinstance(value, str) and bool(re.fullmatch(digits, value))
        elif value is None:
            # JSON has no NaN: null stands for it, and non_finite says which.
            is_right = name in odd
        elif type(value) in (int, float):
            is_right = abs(value) <= LARGEST_NUMBER  # not of a NaN
        else:
            is_right = name == "non_finite"
        if not is_right:
            return False
    return 0 <= entry["step"] <= LARGEST_STEP
