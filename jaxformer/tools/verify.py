"""What the files of a run say of each other: the chain of metrics.jsonl, the tokenizer, and the
digests of checkpoints; and its steps, which are done again and compared with what it logged.

The files need neither the data nor a device of the run. On the devices, mesh and versions of the
run each figure and the state are equal to the bit, but for GPUs, which add up in no fixed order.
Elsewhere sums are made in another order: a sum of n products then differs by about sqrt(n)
roundings of its dtype, for float32 and n = 4096 by 4e-6 of its value, and each step in between adds
as much. `ROUNDING` allows some hundred times that.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.arrays.sharding import platform
from jaxformer.checkpoints.digests import (
    Altered,
    altered_files,
    combined,
    digest_on_host,
    fingerprint,
)
from jaxformer.checkpoints.reading import (
    Damaged,
    flat_leaves,
    read_back,
    read_manifest,
    read_state,
    saved_steps,
    versions,
)
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError, first_of, read_object
from jaxformer.models.stack import compute_dtype
from jaxformer.report import read_metrics
from jaxformer.report.metrics import (
    BEFORE,
    FILE,
    STATE,
    LoggedLine,
    first_digest,
    line_digest,
    logged_lines,
)
from jaxformer.runs.config import looked_at
from jaxformer.runs.directory import RunDirectory, identity_of
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.runs.states import batches_of, first_state
from jaxformer.runs.train_run import as_logged, compile_step
from jaxformer.tokenizer import Tokenizer
from jaxformer.training.state import TrainState, on_mesh

# "equal" is to the bit; "unknown" is what could not be compared here.
Verdict = Literal["equal", "equal to rounding", "NO", "unknown"]
# Files of a run that nothing in it has a digest of.
UNRECORDED_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
SHOWN_PROBLEMS = 5  # problems of one kind
MOST_STEPS = 200  # steps that are done again for the newest checkpoint
# The largest difference of a figure, relative to the logged one, that is called rounding, by the
# dtype of the products.
ROUNDING = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}


class Statement(NamedTuple):
    """What `verify` says of one subject: a verdict, and a sentence about it."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class RunFiles:
    """A finished or stopped run: its directory, config.json, data.json (`record`), and the lines of
    metrics.jsonl, whose last one `is_cut` where it has no end."""

    directory: RunDirectory
    config: RunConfig
    record: dict[str, Any]
    lines: list[LoggedLine]
    is_cut: bool

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifests of its checkpoints say of the run."""
        return identity_of(self.record, self.config.run.seed)

    @property
    def states(self) -> dict[int, str]:
        """The fingerprint of the state after a step, by step, of the lines that have one."""
        states = {}
        for line in self.lines:
            if STATE in line.entry:
                states[line.entry["step"]] = line.entry[STATE]
        return states


def read_run(path: Path) -> RunFiles:
    """Return the files of a run. Raises ConfigError for a folder that is no run, for a run that a
    process is still writing, and for one whose lines are no chain."""
    # Orbax takes no relative path.
    directory = RunDirectory(path.absolute())
    needed = (directory.config, directory.data, directory.metrics)
    missing = [file.name for file in needed if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{directory} has no {' and no '.join(missing)}, so it is no run directory, or a run"
            " that logged nothing yet: give the directory that a run was trained in (run.dir)."
        )
    if directory.is_in_use():
        raise ConfigError(
            f"{directory} is still being written by a run: verify it when the run has ended, or a"
            " copy of it now."
        )
    # The last line counts only with its line feed: a kill may have cut it.
    content = directory.metrics.read_bytes()
    lines = list(logged_lines(directory.metrics))
    if not any(BEFORE in line.entry for line in lines):
        raise ConfigError(
            f"{directory.metrics} has {len(lines)} lines, none with `{BEFORE}`, so that nothing"
            " chains them: give a run whose metrics.jsonl is as train.py wrote it."
        )
    return RunFiles(
        directory=directory,
        config=read_config(directory.config),
        record=read_object(directory.data),
        lines=lines,
        is_cut=content.count(b"\n") != len(lines),
    )


def compared_files(files: RunFiles) -> Iterator[Statement]:
    """Yield all that can be said without the data of the run: whether each line has the digest of
    the one before it, the first that of the run; whether tokenizer.json holds the tokenizer that
    the run was begun with; and the checkpoints."""
    # A line that was altered breaks the chain behind it too: `broken` has each line that does not
    # follow from the one before as it is now.
    before = first_digest(files.identity)
    broken = []
    for number, line in enumerate(files.lines, start=1):
        if line.entry.get(BEFORE) != before:
            broken.append(number)
        before = line_digest(line.raw)
    if broken:
        numbers = first_of([str(number) for number in broken], SHOWN_PROBLEMS, ", ")
        what = "the line before"
        if broken == [1]:
            what = "what data.json and the seed say"
        text = f"lines that do not follow from {what}: {numbers} (counted from 1)."
        yield Statement(FILE, "NO", text)
    elif files.is_cut:
        yield Statement(FILE, "NO", f"the line after line {len(files.lines)} is incomplete.")
    else:
        text = f"each of {len(files.lines)} lines follows from the one before."
        yield Statement(FILE, "equal", text)
    path = files.directory.tokenizer
    recorded = files.record.get("tokenizer")
    try:
        actual = Tokenizer.load(path).fingerprint()
    except ConfigError as error:
        yield Statement(path.name, "NO", str(error))
    else:
        verdict: Verdict = "NO"
        if actual == recorded:
            verdict = "equal"
        text = f"its fingerprint is {actual}, and that in data.json {recorded}."
        yield Statement(path.name, verdict, text)
    unknown = [name for name in UNRECORDED_FILES if (files.directory.path / name).exists()]
    if unknown:
        text = "they decide what the model writes, and the run has no digest of them."
        yield Statement(", ".join(unknown), "unknown", text)
    for step in saved_steps(files.directory.path):
        yield compared_checkpoint(files, step)


def compared_checkpoint(files: RunFiles, step: int) -> Statement:
    """Tell whether a checkpoint has the bytes that were saved, is of this run and step, and holds
    the state that its line in metrics.jsonl has."""
    subject = f"checkpoint {step}"
    folder = files.directory.checkpoints / str(step)
    try:
        if altered := altered_files(folder):
            names = first_of(altered, SHOWN_PROBLEMS, ", ")
            return Statement(subject, "NO", f"files are not as they were saved: {names}.")
        manifest = read_manifest(folder)
        other = [key for key, one in files.identity.items() if manifest["run"].get(key) != one]
        if other:
            names = first_of(other, SHOWN_PROBLEMS, ", ")
            return Statement(subject, "NO", f"it is of another run ({names} differ).")
        # A folder may have been renamed: the state counts its steps itself.
        counter = manifest["leaves"].get("step", ["", "", ""])[2]
        if counter != digest_on_host(np.array(step, np.int32)):
            return Statement(subject, "NO", "it is of another step.")
        # The digests of files say that the bytes are those that were written; this, that they are
        # the arrays of the manifest.
        read_back(folder)
    except Altered as error:
        return Statement(subject, "NO", f"{error}.")
    except Exception as error:  # Orbax and TensorStore raise many kinds
        return Statement(subject, "NO", f"it cannot be read ({type(error).__name__}: {error}).")
    state = combined({path: row[2] for path, row in manifest["leaves"].items()})
    logged = files.states.get(step)
    if logged is None:
        text = f"its files are as they were saved; metrics.jsonl has no state of step {step}."
        return Statement(subject, "equal", text)
    if logged != state:
        text = f"its state is {state}, and that of step {step} in metrics.jsonl {logged}."
        return Statement(subject, "NO", text)
    return Statement(subject, "equal", f"its state is that of its line in metrics.jsonl, {state}.")


def quiet(line: str) -> None:
    """Drop a line that a run would print: here everything is said in statements."""


def setup_of_run(path: Path, mesh: Mapping[str, int] | None = None, **named: Any) -> RunSetup:
    """Return the setup of the run directory `path`, which is only read.

    `mesh` are sizes of axes of the mesh in place of those of the run; `cache_dir`, `train`,
    `validation` and `init_from` are those of `looked_at`. Raises ConfigError where `path` is no run
    directory, its data has changed, or the mesh does not fit the devices.
    """
    run = looked_at(ModelFiles(path.absolute()), **named)
    run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, **(mesh or {})))
    return make_setup(run, quiet)


class RepeatedSteps:
    """A run whose steps are done again by its compiled step `program`. Writes nothing."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.directory = setup.directory
        self.mesh_of_run = read_config(self.directory.config).mesh
        self.starts = [0, *saved_steps(self.directory.path)]
        self.batches = batches_of(setup)
        self.program = compile_step(setup.step, setup.target, setup.first_batch, quiet)
        with on_mesh(setup.mesh):
            self.bound = ROUNDING[str(compute_dtype(setup.model))]
        # The lines of metrics.jsonl with a training loss, by their steps.
        lines = read_metrics(self.directory.path)
        self.logged = {line["step"]: line for line in lines if "loss" in line}

    def is_of_this_machine(self, step: int) -> bool:
        """Tell whether the process that logged a step ran on the devices, mesh and versions of this
        one, by the next checkpoint, which it saved."""
        if self.mesh_of_run != self.setup.run.mesh or platform(self.setup.mesh) == "gpu":
            return False
        for saved in self.starts:
            # A line has no versions: the process that logged it saved the next checkpoint.
            if saved >= step:
                manifest = read_manifest(self.directory.checkpoints / str(saved))
                return manifest["versions"] == versions()
        return False

    def start_of(self, step: int) -> int:
        """Return the newest saved step before a step; 0 is the beginning of the run."""
        return max(start for start in self.starts if start < step)

    def newest(self, step: int) -> TrainState:
        """Return the newest saved state from before a step, or the first state of the run. Raises
        ConfigError for a checkpoint that cannot be read."""
        setup = self.setup
        saved = self.start_of(step)
        if not saved:
            return first_state(setup, quiet)
        try:
            return read_state(
                self.directory.checkpoints,
                saved,
                setup.target_over_base,
                run=setup.identity,
                without=setup.unsaved,
            )
        except Damaged as error:
            raise ConfigError(f"the checkpoint of step {saved} cannot be read: {error}") from error

    def advance(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Return the state after the next step, and its figures; `state` is donated."""
        batch = self.setup.placed(self.batches[int(state.step)])
        state, metrics = self.program(state, batch)
        return state, as_logged(metrics)

    def figures_of(self, state: TrainState, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the figures of a step, with the fingerprint of what checkpoints hold of its
        state."""
        leaves = flat_leaves(state, without=self.setup.unsaved)
        return {**metrics, STATE: fingerprint(leaves)}

    def drawn(self, count: int) -> list[int]:
        """Draw so many logged steps, ascending: that of the newest checkpoint, where at most
        `MOST_STEPS` steps lead to it, and others that are drawn from twice as many, those nearest
        behind a checkpoint or the beginning, since all steps in between have to be done again."""
        distances = {step: step - self.start_of(step) for step in self.logged if step}
        nearest = sorted(distances, key=lambda step: distances[step])[: 2 * count]
        drawn = random.SystemRandom().sample(nearest, min(count, len(nearest)))
        # The newest checkpoint is what somebody would use.
        newest = self.starts[-1]
        if drawn and newest not in drawn and distances.get(newest, MOST_STEPS + 1) <= MOST_STEPS:
            drawn[0] = newest
        return sorted(drawn)

    def statements(self, steps: Sequence[int]) -> Iterator[Statement]:
        """Do logged steps again, in ascending order, each from its newest earlier checkpoint, or
        from the step before it where that is newer."""
        state: TrainState | None = None
        begun = 0
        for step in steps:
            start = self.start_of(step)
            # A checkpoint is nearer than the state at hand: reading is faster than doing steps.
            if state is not None and int(state.step) < start:
                state = None  # frees its memory
            if state is None:
                try:
                    state = self.newest(step)
                except ConfigError as error:
                    verdict: Verdict = "unknown"
                    if start:
                        verdict = "NO"
                    yield Statement(f"step {step}", verdict, f"not done again: {error}")
                    continue
                begun = int(state.step)
            metrics: dict[str, float] = {}
            # From a checkpoint on every step has to be done, at the cost of training.
            while int(state.step) < step:
                state, metrics = self.advance(state)
            figures = self.figures_of(state, metrics)
            exact = self.is_of_this_machine(step)
            verdict, text = compared(figures, self.logged[step], self.bound, exact)
            source = "from the beginning"
            if begun:
                source = f"from step {begun}"
            yield Statement(f"step {step}", verdict, f"{source}: {text}.")


def compared(
    now: Mapping[str, Any], logged: Mapping[str, Any], bound: float, exact: bool = False
) -> tuple[Verdict, str]:
    """Return how figures compare with those of a line that has them, and a phrase about each.
    Differences of up to `bound` are rounding, but where the state is that of the log to the bit
    every figure has to be. Where `exact`, another state is NO."""
    names: dict[Verdict, list[str]] = {"equal": [], "equal to rounding": [], "NO": []}
    # The same state to the bit, and another loss: that is no rounding.
    has_same_state = STATE in now and now[STATE] == logged.get(STATE)
    for name in now:
        if name not in logged:
            continue
        if repr(now[name]) == repr(logged[name]):  # nan too
            names["equal"].append(name)
            continue
        if name == STATE:
            verdict: Verdict = "equal to rounding"
            if exact:
                verdict = "NO"
            names[verdict].append("state, another one")
            continue
        # Relative, since a loss and a number of tokens have other sizes.
        difference = abs(now[name] - logged[name]) / max(abs(logged[name]), 1e-12)
        if has_same_state or not difference <= bound:
            names["NO"].append(f"{name} {now[name]!r}, logged {logged[name]!r}")
        else:
            names["equal to rounding"].append(f"{name} by {difference:.1e}")
    phrases: dict[Verdict, str] = {
        "equal": "equal to the bit",
        "equal to rounding": f"equal to rounding (at most {bound:g} of the figure)",
        "NO": "not equal",
    }
    texts = []
    for each, named in names.items():
        if named:
            verdict = each
            texts.append(f"{phrases[each]}: {', '.join(named)}")
    return verdict, "; ".join(texts)
