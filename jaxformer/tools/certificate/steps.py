"""Steps of a run that are done again, and compared with what the run logged.

On the devices, mesh and versions of the run each figure is equal to the bit. Elsewhere sums are
made in another order: a sum of n products then differs by about sqrt(n) roundings of its dtype, for
float32 and n = 4096 by 4e-6 of its value, and each step in between adds as much. `ROUNDING` allows
some hundred times that.
"""

import json
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves, saved_steps
from jaxformer.cluster.processes import exchange
from jaxformer.config.settings import Log
from jaxformer.files import located
from jaxformer.models.stack import compute_dtype
from jaxformer.report import read_metrics
from jaxformer.report.metrics import STATE
from jaxformer.runs.metric_logger import as_logged
from jaxformer.runs.rollback import batches_of
from jaxformer.runs.setup import RunSetup
from jaxformer.tools.certificate.chain import Verdict
from jaxformer.tools.certificate.record import ReplayEntry
from jaxformer.tools.step_replay import state_before
from jaxformer.training.state import TrainState, on_mesh

# Steps are chosen that lie so near to a checkpoint, as a fraction of the steps of the run, that
# doing three of them again takes less than 2 % of its time.
REACH = 1 / 200
# The largest difference of a figure, relative to the logged one, that is called rounding, by the
# dtype of the products.
ROUNDING = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}


class DoneAgain(NamedTuple):
    """Step `step` of a run, counted from 1, done again from the state after step `begun`.

    `metrics` are under the names of metrics.jsonl, `logged` is its line of the step; `state` is the
    fingerprint of the state after the step, 16 hexadecimal digits.
    """

    step: int
    begun: int
    metrics: dict[str, float]
    state: str
    logged: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        """The metrics and the state."""
        return {**self.metrics, STATE: self.state}


def state_digest(state: TrainState, unsaved: Collection[str]) -> str:
    """The fingerprint of what checkpoints hold of a state, 16 hexadecimal digits, whatever its
    mesh; `unsaved` are the paths that they leave out."""
    left_out = frozenset(unsaved)
    leaves = {path: leaf for path, leaf in flat_leaves(state).items() if path not in left_out}
    return fingerprint(leaves)


def logged_steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl with a training loss, by their steps."""
    return {line["step"]: line for line in read_metrics(run_dir) if "loss" in line}


def distances(run_dir: Path) -> dict[int, int]:
    """The logged steps of a run by how many steps they lie behind the newest earlier checkpoint or
    the beginning, the nearest first."""
    starts = [0, *saved_steps(run_dir)]
    behind = {
        step: min(step - start for start in starts if start < step)
        for step in logged_steps(run_dir)
        if step >= 1
    }
    return dict(sorted(behind.items(), key=lambda entry: (entry[1], entry[0])))


def chosen_steps(run_dir: Path, steps: int, count: int) -> list[int]:
    """`count` logged steps of a run of so many steps, ascending, drawn at random from those near
    behind a checkpoint or the beginning. Where there are fewer, those that are nearest. All
    processes choose the same."""
    behind = distances(run_dir)
    reach = max(int(steps * REACH), 1)
    near = [step for step, distance in behind.items() if distance <= reach]
    candidates = near if len(near) > count else [*behind][:count]
    drawn = random.SystemRandom().sample(candidates, min(count, len(candidates)))
    chosen: list[int] = json.loads(exchange(json.dumps(sorted(drawn)))[0])
    return chosen


@dataclass(frozen=True)
class StepsAgain:
    """A run whose steps can be done again, by its compiled step `program`. Writes nothing."""

    setup: RunSetup
    program: Any
    log: Log

    @property
    def bound(self) -> float:
        """The largest relative difference of a figure of this run that is called rounding."""
        with on_mesh(self.setup.mesh):
            return ROUNDING[str(compute_dtype(self.setup.model))]

    def do(self, steps: Sequence[int]) -> Iterator[DoneAgain]:
        """Does logged steps of the run again, in ascending order, each from its newest earlier
        checkpoint, or from the step before it where that is newer."""
        folder = located(self.setup.run.run.dir)
        logged, batches = logged_steps(folder), batches_of(str(folder), self.setup.batches)
        starts, begun, done = [0, *saved_steps(folder)], 0, -1
        state: TrainState | None = None
        for step in steps:
            if state is None or done < max(start for start in starts if start < step):
                state = None  # frees its memory
                state = state_before(self.setup, step, self.log)
                begun = done = int(state.step)
            for number in range(done, step):
                state, metrics = self.program(state, self.setup.placed(batches[number]))
            done = step
            figures = as_logged(jax.device_get(metrics))
            digest = state_digest(state, self.setup.unsaved)
            yield DoneAgain(step, begun, figures, digest, logged[step])


class Difference(NamedTuple):
    """A figure, as it is computed now and as it was logged: |now - then| / |then|, and whether that
    is nothing ("equal"), "rounding", or more ("no")."""

    name: str
    now: Any
    then: Any
    relative: float
    verdict: Verdict


def differences(
    now: Mapping[str, Any], logged: Mapping[str, Any], bound: float
) -> Iterator[Difference]:
    """The figures that are both in `now` and in a logged line. Differences of up to `bound` are
    rounding, but where the state is that of the log to the bit every figure has to be."""
    same_state = STATE in now and now[STATE] == logged.get(STATE)
    for name in now:
        if name not in logged:
            continue
        relative = _relative(now[name], logged[name])
        verdict: Verdict = "rounding"
        if not relative:
            verdict = "equal"
        elif name != STATE and (same_state or relative > bound):
            verdict = "no"
        yield Difference(name, now[name], logged[name], relative, verdict)


def compared(replay: DoneAgain, bound: float) -> ReplayEntry:
    """How a step that was done again compares with the log.

    "bitwise": every figure and the state are those of the log. "rounding": the largest relative
    difference of a figure is at most `bound`. "no": it is larger, or the state is that of the log
    and a figure is not, as in a line that was altered.
    """
    figures = [*differences(replay.figures, replay.logged, bound)]
    verdicts = {figure.verdict for figure in figures} or {"no"}
    equal = "bitwise" if verdicts == {"equal"} else "no" if "no" in verdicts else "rounding"
    largest = max((one.relative for one in figures if one.name != STATE), default=math.inf)
    shown = min(largest, 1e300)  # JSON has no infinity
    return {"step": replay.step, "from": replay.begun, "equal": equal, "largest_difference": shown}


def _relative(now: float | str, then: float | str) -> float:
    """|now - then| / |then|; 0 where both are equal or no number, infinity between texts."""
    if now == then:
        return 0.0
    if isinstance(now, str) or isinstance(then, str):
        return math.inf
    if math.isnan(now) and math.isnan(then):
        return 0.0
    difference = abs(now - then) / max(abs(then), 1e-12)
    return difference if math.isfinite(difference) else math.inf
