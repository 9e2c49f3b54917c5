"""Verifies a run: what its files say of each other, some of its steps, done again, and what its
masks, its kernels and its mesh compute on this machine."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxformer.arrays.mesh import mesh_of
from jaxformer.arrays.out_of_memory import OutOfMemory
from jaxformer.arrays.sharding import platform
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError
from jaxformer.report.metrics import LARGEST_STEP
from jaxformer.runs.directory import OtherData
from jaxformer.runs.kernel_check import PROOFS, with_proven_kernel
from jaxformer.tools.verify.probes import Evidence, probed
from jaxformer.tools.verify.run_files import Statement, compared_files, read_run
from jaxformer.tools.verify.steps import StepsAgain, setup_of_run

REST = "steps done again"


def verify(
    path: Path,
    log: Log,
    *,
    steps: int = 5,
    mesh: Mapping[str, int] | None = None,
    cache_dir: str | Path = "",
    train: str = "",
    validation: str = "",
    init_from: str = "",
) -> Iterator[Statement]:
    """What is found of the run directory `path`, in the order in which it is found out: its files;
    then `steps` of its steps, done again; then the probes. Writes nothing there.

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
    for statement in compared_files(files):
        if statement.verdict == "NO":
            obstacle = "files are not those of the run."
        yield statement
    if not steps:
        return
    if obstacle:
        yield Statement(REST, "unknown", f"none: {obstacle}")
        return
    try:
        setup = setup_of_run(files.folder, log, mesh, cache_dir, train, validation, init_from)
        if setup.reference:
            setup.reference.load()
    except OtherData as error:
        yield Statement("data", "NO", str(error))
        return
    except ConfigError as error:
        yield Statement(REST, "unknown", f"none, since the run cannot be set up: {error}")
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
    again = StepsAgain(setup, log)
    drawn = again.drawn(steps)
    yield from again.statements(drawn)
    if again.starts[-1] and again.starts[-1] not in drawn:
        text = "the steps that lead to it were not done again: they are many, or it was not logged."
        yield Statement(f"checkpoint {again.starts[-1]}", "unknown", text)
    state = again.newest(LARGEST_STEP)
    yield from probed(Evidence(again, state, again.batches[int(state.step)]))


__all__ = ["Statement", "verify"]
