"""Steps of a run that are done again, and compared with what the run logged."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves, saved_steps
from jaxformer.cluster.processes import exchange
from jaxformer.config.settings import Log
from jaxformer.models.stack import compute_dtype
from jaxformer.report import read_metrics
from jaxformer.report.metrics import STATE
from jaxformer.runs.metric_logger import as_logged
from jaxformer.runs.rollback import batches_of
from jaxformer.runs.setup import RunSetup
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


def state_digest(setup: RunSetup, state: TrainState) -> str:
    """The fingerprint of what checkpoints hold of a state, 16 hexadecimal digits, whatever its
    mesh."""
    unsaved = frozenset(setup.unsaved)
    leaves = {path: leaf for path, leaf in flat_leaves(state).items() if path not in unsaved}
    return fingerprint(leaves)


def logged_steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl with a training loss, by their steps."""
    return {line["step"]: line for line in read_metrics(run_dir) if "loss" in line}


def chosen_steps(setup: RunSetup, count: int) -> list[int]:
    """So many logged steps, ascending, drawn at random from those near behind a checkpoint or the
    beginning. Where there are fewer, those that are nearest. All processes choose the same."""
    folder = Path(setup.run.run.dir)
    starts = [0, *saved_steps(folder)]
    distances = {
        step: min(step - start for start in starts if start < step)
        for step in logged_steps(folder)
        if step >= 1
    }
    by_distance = sorted(distances, key=lambda step: (distances[step], step))
    reach = max(int(setup.run.train.steps * REACH), 1)
    near = [step for step in by_distance if distances[step] <= reach]
    steps = near if len(near) <= count else random.SystemRandom().sample(near, count)
    steps = steps if len(steps) == count else by_distance[:count]
    chosen: list[int] = json.loads(exchange(json.dumps(sorted(steps)))[0])
    return chosen


def do_again(setup: RunSetup, program: Any, steps: Sequence[int], log: Log) -> list[DoneAgain]:
    """Does logged steps of a run again, each from its newest earlier checkpoint, by the compiled
    step `program`. Writes nothing."""
    folder = Path(setup.run.run.dir)
    logged, batches = logged_steps(folder), batches_of(str(folder), setup.batches)
    replays = []
    for step in steps:
        state = state_before(setup, step, log)
        begun = int(state.step)
        for number in range(begun, step):
            state, metrics = program(state, setup.placed(batches[number]))
        figures = as_logged(jax.device_get(metrics))
        replays.append(DoneAgain(step, begun, figures, state_digest(setup, state), logged[step]))
    return replays


def rounding_of(setup: RunSetup) -> float:
    """The largest relative difference of a figure of this run that is called rounding."""
    with on_mesh(setup.mesh):
        return ROUNDING[str(compute_dtype(setup.model))]


def compared(replay: DoneAgain, bound: float) -> ReplayEntry:
    """How a step that was done again compares with the log.

    "bitwise": every figure and the state are those of the log. "rounding": the largest relative
    difference of a figure is at most `bound`. "no": it is larger, or the state is that of the log
    and a figure is not, as in a line that was altered.
    """
    largest = max(
        (
            _difference(now, float(replay.logged[name]))
            for name, now in replay.metrics.items()
            if name in replay.logged
        ),
        default=math.inf,
    )
    logged_state = replay.logged.get(STATE)
    same_state = logged_state in (None, replay.state)
    equal = "rounding" if largest <= bound else "no"
    if largest == 0 and same_state:
        equal = "bitwise"
    elif logged_state == replay.state:
        equal = "no"
    shown = min(largest, 1e300)  # JSON has no infinity
    return {"step": replay.step, "from": replay.begun, "equal": equal, "largest_difference": shown}


def _difference(now: float, then: float) -> float:
    """|now - then| / |then|; 0 where both are no number."""
    if now == then or (math.isnan(now) and math.isnan(then)):
        return 0.0
    difference = abs(now - then) / max(abs(then), 1e-12)
    return difference if math.isfinite(difference) else math.inf
