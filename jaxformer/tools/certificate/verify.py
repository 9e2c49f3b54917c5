"""Verifies a run: what its files say of each other, and some of its steps, done again.

On the devices, mesh and versions of the run each figure is equal to the bit. Elsewhere sums are
made in another order: a sum of n products then differs by about sqrt(n) roundings of its dtype, for
float32 and n = 4096 by 4e-6 of its value, and each step in between adds as much. `ROUNDING` allows
some hundred times that, and is far below what a changed figure has to differ by to matter.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.arrays.mesh import mesh_of
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves, saved_steps
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError
from jaxformer.models.stack import compute_dtype
from jaxformer.report.metrics import STATE
from jaxformer.runs.directory import OtherData
from jaxformer.runs.evaluation import bytes_of_targets, make_evaluation
from jaxformer.runs.metric_logger import as_logged
from jaxformer.runs.rollback import batches_of
from jaxformer.runs.setup import RunSetup
from jaxformer.runs.train_run import compile_step
from jaxformer.tools.certificate.chain import RunFiles, Statement, Verdict, compared_files, read_run
from jaxformer.tools.step_replay import setup_of_run, state_before
from jaxformer.training.state import TrainState, on_mesh

# The largest difference of a figure, relative to the logged one, that is rounding, by the dtype of
# the products.
ROUNDING = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
REPLAYS = "steps done again"


def verify(
    path: str | Path,
    log: Log,
    *,
    steps: int = 5,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
    cache_dir: str | Path = "",
    public_key: str = "",
) -> Iterator[Statement]:
    """What is found of the run directory `path`, in the order in which it is found out: its files
    first, then `steps` of its steps, done again, which `seed` draws. Writes nothing.

    Steps are done again only where no file was altered. `mesh` are sizes of axes of the mesh in
    place of those of the run; tokenized text is stored in `cache_dir`, by default that of this
    user. `public_key`, 64 hexadecimal digits, is the key by which the certificate has to be signed.
    Raises ConfigError where `path` is no run directory, is still being written, has no chain, or
    the mesh does not fit the devices.
    """
    files, sound, obstacle = read_run(path), True, ""
    try:
        mesh_of(dataclasses.replace(files.config.mesh, **(mesh or {})).sizes)
    except ConfigError as error:
        if mesh:
            raise
        obstacle = f"{error} State sizes that fit these devices, as in --mesh.fsdp 1."
    for statement in compared_files(files, public_key):
        sound = sound and statement.verdict != "no"
        yield statement
    if not steps:
        return
    if not sound:
        obstacle = "files are not those of the run."
    if obstacle:
        yield Statement(REPLAYS, "not checked", f"none: {obstacle}")
        return
    try:
        setup = setup_of_run(files.folder, log, mesh, cache_dir)
        if setup.reference:
            setup.reference.load()
    except OtherData as error:
        yield Statement("data", "no", str(error))
        return
    except ConfigError as error:
        yield Statement(REPLAYS, "not checked", f"none, since the run cannot be set up: {error}")
        return
    yield Statement("data", "equal", "its fingerprints are those of data.json.")
    yield from _done_again(setup, files, drawn_steps(files, steps, seed), log)
    yield from _evaluated_again(setup, files, log)


def drawn_steps(files: RunFiles, count: int, seed: int) -> list[int]:
    """So many logged steps, ascending, which `seed` draws from twice as many: those nearest behind
    a checkpoint or the beginning, since all steps in between have to be done again."""
    starts = [0, *saved_steps(files.folder)]
    distances = {
        entry["step"]: min(entry["step"] - start for start in starts if start < entry["step"])
        for _, entry in files.lines
        if "loss" in entry and entry["step"] > 0
    }
    nearest = sorted(distances, key=lambda step: (distances[step], step))[: 2 * count]
    return sorted(random.Random(seed).sample(nearest, min(count, len(nearest))))


def _done_again(
    setup: RunSetup, files: RunFiles, steps: Sequence[int], log: Log
) -> Iterator[Statement]:
    """Does steps again, each from the newest earlier checkpoint, or from the step before where that
    is newer."""
    program, batches = compile_step(setup, log), batches_of(str(files.folder), setup.batches)
    bound, starts = rounding_of(setup), [0, *saved_steps(files.folder)]
    state: TrainState | None = None
    done = begun = 0
    for step in steps:
        subject, newest = f"step {step}", max(start for start in starts if start < step)
        try:
            if state is None or done < newest:
                state = None  # frees its memory
                state = state_before(setup, step, log)
                done = begun = int(state.step)
        except ConfigError as error:
            verdict: Verdict = "no" if newest else "not checked"
            yield Statement(subject, verdict, f"the state before it cannot be made: {error}")
            continue
        for number in range(done, step):
            state, metrics = program(state, setup.placed(batches[number]))
        done = step
        figures: dict[str, Any] = as_logged(jax.device_get(metrics))
        figures[STATE] = state_of(setup, state)
        logged = files.logged(step, "loss")
        start = f"the checkpoint of step {begun}" if begun else "the beginning"
        verdict, text = compared_figures(figures, logged, bound)
        yield Statement(subject, verdict, f"from {start}: {text}.")


def _evaluated_again(setup: RunSetup, files: RunFiles, log: Log) -> Iterator[Statement]:
    """Makes the evaluation after the newest checkpoint again, where it was logged."""
    saved, run = saved_steps(files.folder), setup.run
    evaluated = [step for step in saved if files.logged(step, "val_loss")]
    if not evaluated or not setup.heldout:
        return
    step = evaluated[-1]
    state = state_before(setup, step + 1, log)
    evaluation = make_evaluation(
        setup.task.name, setup.model, bytes_of_targets(setup.corpus), setup.loss_options
    )
    limit = 0 if step == run.train.steps else run.train.eval_batches
    batches = itertools.islice(setup.heldout, limit or None)
    with on_mesh(setup.mesh):
        figures = evaluation(state.params, map(setup.placed, batches))
    verdict, text = compared_figures(figures, files.logged(step, "val_loss"), rounding_of(setup))
    yield Statement(f"evaluation after step {step}", verdict, f"{text}.")


def state_of(setup: RunSetup, state: TrainState) -> str:
    """The fingerprint of what checkpoints hold of a state, 16 hexadecimal digits."""
    unsaved = frozenset(setup.unsaved)
    leaves = {path: leaf for path, leaf in flat_leaves(state).items() if path not in unsaved}
    return fingerprint(leaves)


def rounding_of(setup: RunSetup) -> float:
    """The largest relative difference of a figure of this run that is rounding."""
    with on_mesh(setup.mesh):
        return ROUNDING[str(compute_dtype(setup.model))]


def compared_figures(
    now: Mapping[str, Any], logged: Mapping[str, Any], bound: float
) -> tuple[Verdict, str]:
    """How figures compare with those of a line that has them, and a phrase about each.

    Where the state is that of the line to the bit, every figure has to be.
    """
    common = {name: (now[name], logged[name]) for name in now if name in logged}
    same_state = STATE in common and common[STATE][0] == common[STATE][1]
    names: dict[str, list[str]] = {"equal": [], "rounding": [], "no": []}
    for name, (current, then) in common.items():
        difference = _difference(current, then)
        if not difference:
            names["equal"].append(name)
        elif name == STATE:
            names["rounding"].append("state, another one")
        elif same_state or difference > bound:
            names["no"].append(f"{name} {current!r}, logged {then!r}")
        else:
            names["rounding"].append(f"{name} by {difference:.1e}")
    phrases = {
        "equal": "equal to the bit: {}",
        "rounding": f"equal to rounding (at most {bound:g} of the figure): {{}}",
        "no": "not equal: {}",
    }
    verdicts: list[Verdict] = [verdict for verdict in ("no", "rounding", "equal") if names[verdict]]
    texts = [phrases[verdict].format(", ".join(names[verdict])) for verdict in reversed(verdicts)]
    return verdicts[0], "; ".join(texts)


def _difference(now: float | str, then: float | str) -> float:
    """|now - then| / |then|; 0 where both are equal or no number, infinity between texts."""
    if now == then:
        return 0.0
    if isinstance(now, str) or isinstance(then, str):
        return math.inf
    if math.isnan(now) and math.isnan(then):
        return 0.0
    difference = abs(now - then) / max(abs(then), 1e-12)
    return difference if math.isfinite(difference) else math.inf
