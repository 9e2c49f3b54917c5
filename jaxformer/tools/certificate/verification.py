"""Verifies a run: what its files say of each other, and some of its steps, done again."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.arrays.mesh import mesh_of
from jaxformer.arrays.sharding import platform
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.checkpoints.reading import saved_steps
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError, located
from jaxformer.report.metrics import STATE
from jaxformer.runs.device import with_proven_kernel
from jaxformer.runs.directory import OtherData
from jaxformer.runs.evaluation import bytes_of_targets, make_evaluation
from jaxformer.runs.setup import RunSetup
from jaxformer.runs.train_run import compile_step
from jaxformer.tools.certificate.chain import RunFiles, Statement, Verdict, compared_files, read_run
from jaxformer.tools.certificate.steps import StepsAgain, differences, distances
from jaxformer.tools.step_replay import setup_of_run, state_before
from jaxformer.training.state import on_mesh

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
        setup = _set_up(files.folder, log, mesh, cache_dir)
    except OtherData as error:
        yield Statement("data", "no", str(error))
    except ConfigError as error:
        yield Statement(REPLAYS, "not checked", f"none, since the run cannot be set up: {error}")
    else:
        yield Statement("data", "equal", "its fingerprints are those of data.json.")
        again = StepsAgain(setup, compile_step(setup, log), log)
        yield from _done_again(again, drawn_steps(files.folder, steps, seed))
        yield from _evaluated_again(again, files)


def _set_up(
    folder: Path, log: Log, mesh: Mapping[str, int] | None, cache_dir: str | Path
) -> RunSetup:
    """A run with its kernel and its reference. Raises OtherData where its data or reference is not
    the one that it was begun with, ConfigError where something is missing here."""
    setup = setup_of_run(folder, log, mesh, cache_dir)
    if platform(setup.mesh) != "cpu":
        # As a run does at its start: another kernel where the compiler refuses that of "auto".
        setup = with_proven_kernel(setup, log)
    if setup.reference:
        setup.reference.load()
    return setup


def drawn_steps(folder: Path, count: int, seed: int) -> list[int]:
    """So many logged steps, ascending, which `seed` draws from twice as many: those nearest behind
    a checkpoint or the beginning, since all steps in between have to be done again."""
    nearest = [*distances(folder)][: 2 * count]
    return sorted(random.Random(seed).sample(nearest, min(count, len(nearest))))


def _done_again(again: StepsAgain, steps: Sequence[int]) -> Iterator[Statement]:
    """Does steps again, each from the newest earlier checkpoint, or from the step before it."""
    saved, bound = saved_steps(located(again.setup.run.run.dir)), again.bound
    groups = itertools.groupby(steps, lambda step: sum(start < step for start in saved))
    for count, group in groups:
        start = f"the checkpoint of step {saved[count - 1]}" if count else "the beginning"
        try:
            for replay in again.do([*group]):
                text = f"from step {replay.begun}" if replay.begun else "from the beginning"
                verdict, figures = _in_words(replay.figures, replay.logged, bound)
                yield Statement(f"step {replay.step}", verdict, f"{text}: {figures}.")
        except ConfigError as error:
            verdict = "no" if count else "not checked"
            yield Statement(f"steps after {start}", verdict, f"not done again: {error}")


def _evaluated_again(again: StepsAgain, files: RunFiles) -> Iterator[Statement]:
    """Makes the evaluation after the newest checkpoint again, where it was logged."""
    setup, saved = again.setup, saved_steps(files.folder)
    evaluated = [step for step in saved if files.logged(step, "val_loss")]
    if not evaluated or not setup.heldout:
        return
    step = evaluated[-1]
    state = state_before(setup, step + 1, again.log)
    evaluation = make_evaluation(
        setup.task.name, setup.model, bytes_of_targets(setup.corpus), setup.evaluation_options
    )
    train = setup.run.train
    limit = 0 if step == train.steps else train.eval_batches
    batches = itertools.islice(setup.heldout, limit or None)
    with on_mesh(setup.mesh):
        weights = evaluation_weights(state.params, state.optimizer)
        figures = evaluation(weights, map(setup.placed, batches))
    verdict, text = _in_words(figures, files.logged(step, "val_loss"), again.bound)
    yield Statement(f"evaluation after step {step}", verdict, f"{text}.")


def _in_words(
    now: Mapping[str, Any], logged: Mapping[str, Any], bound: float
) -> tuple[Verdict, str]:
    """How figures compare with those of a line that has them, and a phrase about each."""
    names: dict[Verdict, list[str]] = {"equal": [], "rounding": [], "no": []}
    for figure in differences(now, logged, bound):
        text = {
            "equal": figure.name,
            "rounding": f"{figure.name} by {figure.relative:.1e}",
            "no": f"{figure.name} {figure.now!r}, logged {figure.then!r}",
        }[figure.verdict]
        if figure.name == STATE and figure.verdict == "rounding":
            text = "state, another one"
        names[figure.verdict].append(text)
    phrases: dict[Verdict, str] = {
        "equal": "equal to the bit",
        "rounding": f"equal to rounding (at most {bound:g} of the figure)",
        "no": "not equal",
    }
    texts = [f"{phrases[verdict]}: {', '.join(named)}" for verdict, named in names.items() if named]
    worst = [verdict for verdict, named in names.items() if named][-1]
    return worst, "; ".join(texts)
