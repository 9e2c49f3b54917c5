"""`jaxformer verify RUN`: what the files of a run say of each other, whether some of its steps,
done again, are those that it logged, and what its masks, its kernels and its mesh compute here."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxformer.arrays.mesh import mesh_of
from jaxformer.arrays.out_of_memory import OutOfMemory
from jaxformer.arrays.sharding import platform
from jaxformer.cli.arguments import VerifyArguments
from jaxformer.config.format import escaped
from jaxformer.files import ConfigError
from jaxformer.report.metrics import LARGEST_STEP
from jaxformer.runs.directory import OtherData
from jaxformer.runs.kernel_check import PROOFS, with_proven_kernel
from jaxformer.tools.probes import Evidence, probed
from jaxformer.tools.verify import RepeatedSteps, Statement, compared_files, read_run, setup_of_run

LIMITS = (
    "Not known: who computed the run, the figures of evaluations and of steps that were not done"
    " again, and times: whoever trains all of it again with another program can write another"
    " chain."
)
STEPS_SUBJECT = "steps done again"


def run(args: VerifyArguments) -> int:
    """Print each statement as soon as there is one. The exit status is 1 if something is not as it
    was."""
    if args.steps < 0:
        raise ConfigError(f"--steps {args.steps}: give a number of steps, at least 0.")
    mesh = {}
    for axis, size in vars(args.mesh).items():
        if size is not None:
            mesh[axis] = size
    verdicts: Counter[str] = Counter()
    for subject, verdict, text in verify(
        args.path,
        steps=args.steps,
        mesh=mesh,
        cache_dir=args.cache_dir,
        train=args.train,
        validation=args.validation,
        init_from=args.init_from,
    ):
        verdicts[verdict] += 1
        print(f"{verdict:<17}  {subject}: {escaped(text)}", flush=True)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    print(f"\n{LIMITS}\n{args.path}: {counts}.")
    return int(verdicts["NO"] > 0)


def verify(
    path: Path, *, steps: int = 5, mesh: Mapping[str, int] | None = None, **named: Any
) -> Iterator[Statement]:
    """Yield what is found of the run directory `path`, in the order in which it is found out: its
    files; then `steps` of its steps, done again; then the probes. Writes nothing there.

    With 0 steps, or where a file was altered, only the files are read. `mesh` are sizes of axes of
    the mesh in place of those of the run; `cache_dir`, `train`, `validation` and `init_from` are
    those of `looked_at`. Raises ConfigError where `path` is no run directory, is still being
    written, has no chain, or the mesh does not fit the devices.
    """
    files = read_run(path)
    obstacle = ""
    try:
        mesh_of(dataclasses.replace(files.config.mesh, **(mesh or {})).sizes)
    except ConfigError as error:
        if mesh:
            raise
        obstacle = f"{error} State sizes that fit these devices, as in --mesh.fsdp 1."
    # Files first, which takes seconds; a step that is done again from an altered checkpoint would
    # say nothing.
    for statement in compared_files(files):
        if statement.verdict == "NO":
            obstacle = "files are not those of the run."
        yield statement
    if not steps:
        return
    if obstacle:
        yield Statement(STEPS_SUBJECT, "unknown", f"none: {obstacle}")
        return
    try:
        setup = setup_of_run(files.directory.path, mesh, **named)
        if setup.reference:
            # The reference is read from the run's own start, as at a start of the run.
            setup.reference.load()
    except OtherData as error:
        yield Statement("data", "NO", str(error))
        return
    except ConfigError as error:
        yield Statement(STEPS_SUBJECT, "unknown", f"none, since the run cannot be set up: {error}")
        return
    yield Statement("data", "equal", "its fingerprints are those of data.json.")
    lines: list[str] = []
    try:
        if platform(setup.mesh) == "cpu":
            lines = [prove(setup) for prove in PROOFS.values()]
        else:
            # As a run does at its start: another kernel where the compiler refuses that of "auto".
            setup = with_proven_kernel(setup, lines.append)
    except OutOfMemory as error:
        yield Statement("kernels", "unknown", f"{str(error).splitlines()[0]}.")
    except RuntimeError as error:
        yield Statement("kernels", "NO", str(error))
        return
    if text := " ".join(filter(None, lines)):
        yield Statement("kernels", "equal to rounding", text)
    repeated = RepeatedSteps(setup)
    drawn = repeated.drawn(steps)
    yield from repeated.statements(drawn)
    if repeated.starts[-1] and repeated.starts[-1] not in drawn:
        text = "the steps that lead to it were not done again: they are many, or it was not logged."
        yield Statement(f"checkpoint {repeated.starts[-1]}", "unknown", text)
    # Probes look at the weights that somebody would use, the newest.
    state = repeated.newest(LARGEST_STEP)
    yield from probed(Evidence(repeated, state, repeated.batches[int(state.step)]))
