"""`jaxformer doctor CONFIG`: checks of what a run needs before it runs: versions, devices,
directories, data, the attention kernel, memory, and one step. Nothing is written in its directory.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform as machine
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxformer.arrays.hardware import bfloat16_note
from jaxformer.arrays.out_of_memory import memory_of
from jaxformer.checkpoints.buckets import require_savable
from jaxformer.cli.arguments import DoctorArguments
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError, located, store_of
from jaxformer.report import human_bytes, human_time, printable
from jaxformer.report.trackers import chosen_tracker
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.kernel_check import with_proven_kernel
from jaxformer.runs.objectives import with_chats
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.runs.states import first_state
from jaxformer.runs.train_run import as_logged, compile_step

VERSIONED = (
    "jaxformer",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
# Device files of accelerators, and the extra of jaxformer that brings what drives them.
DRIVERS = {"dev/nvidia[0-9]*": "cuda12 or cuda13", "dev/accel[0-9]*": "tpu"}


class Finding(NamedTuple):
    """What one check found. A problem keeps a run from starting or from saving; a note does not."""

    kind: Literal["ok", "note", "problem"]
    check: str
    text: str


def run(args: DoctorArguments, config: RunConfig) -> int:
    problems = 0
    for finding in examine(args, config):
        problems += finding.kind == "problem"
        text = printable(f"{finding.kind:<8}{finding.check}: {finding.text}")
        # What follows stays in the column of the text.
        print(text.replace("\n", "\n" + 8 * " "), flush=True)
    if not problems:
        print("No problem was found.")
        return 0
    print("1 problem." if problems == 1 else f"{problems} problems.")
    return 1


def examine(args: DoctorArguments, run: RunConfig) -> Iterator[Finding]:
    """Yield the findings of all checks of a run, in order. Checks that need what failed are left
    out."""
    if run.train.eval_tasks and args.config.endswith(".json"):
        # A run directory may come from somebody else, and a file of tasks is code.
        yield Finding("note", "train.eval_tasks", "not read: of a run they may be code.")
        train = dataclasses.replace(run.train, eval_tasks="", eval_tasks_every=0)
        run = dataclasses.replace(run, train=train)
    yield checked("versions", versions)
    yield checked("devices", devices)
    yield checked("run.tracker", tracker, run.run.tracker)
    yield checked("run.dir", run_directory, run.run.dir)
    for setting, folder in (
        ("data.cache_dir", run.data.cache_dir),
        ("run.compilation_cache", run.run.compilation_cache),
    ):
        if folder:
            yield checked(setting, writable, folder)
    run = dataclasses.replace(run, data=with_chats(run.model, run.data))
    try:
        # What a start would refuse, before the data is read.
        RunDirectory(run.run.dir).check_config(run)
        setup = make_setup(run, lambda line: None)
        leaves = jax.tree.leaves(setup.target)
    except ConfigError as error:
        yield Finding("problem", "settings and data", str(error))
        return
    text = f"{setup.task.name}, {setup.corpus.train.tokens:,} tokens to train on,"
    text += f" {run.train.steps:,} steps of {setup.tokens_per_step:,} tokens"
    yield Finding("ok", "settings and data", text)
    # By the shapes of the state.
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    yield checked("disk space", disk, setup, state_bytes)
    # The attention kernel, with its errors against float32, or the next one that is right.
    lines: list[str] = []
    try:
        proven = with_proven_kernel(setup, lines.append)
    except (RuntimeError, ConfigError) as error:
        yield Finding("problem", "attention", str(error))
        proven = setup
    else:
        if proven is setup:
            yield Finding("ok", "attention", " ".join([setup.kernel, *lines]))
        else:
            yield Finding("note", "attention", " ".join(lines))
    yield checked("one step", dry_run, proven)


def checked(name: str, check: Callable[..., str], *given: Any) -> Finding:
    """Return what a check says, which raises an error where it finds a problem."""
    try:
        return Finding("ok", name, check(*given))
    except (ConfigError, RuntimeError) as error:
        return Finding("problem", name, str(error))


def versions() -> str:
    """Return the versions of the libraries. JAX itself warns of a plugin that does not fit it."""
    numbers = [f"Python {machine.python_version()}"]
    for name in VERSIONED:
        # A checkout has no metadata.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(numbers)


def devices() -> str:
    """Return the devices. Accelerators of this machine that JAX does not use are a problem."""
    first = jax.devices()[0]
    text = f"{jax.device_count()} x {first.device_kind} ({first.platform})"
    for pattern, extra in DRIVERS.items():
        # A slow run on the CPU beside an idle GPU is the most expensive mistake.
        if first.platform == "cpu" and any(Path("/").glob(pattern)):
            raise ConfigError(
                f"{text}, but this machine has /{pattern}: JAX does not use it. Install"
                f' "jaxformer[{extra}]", and check JAX_PLATFORMS'
                f" ({os.environ.get('JAX_PLATFORMS', 'not set')})."
            )
    if first.platform == "cpu" and (note := bfloat16_note()):
        return f"{text}; {note}"
    return text


def tracker(name: str) -> str:
    """Tell whether a tracker is installed."""
    chosen_tracker(name)
    return f"{name} is installed"


def run_directory(folder: str) -> str:
    """Tell whether checkpoints can be saved in the directory of a run."""
    if not folder:
        raise ConfigError("is empty.")
    require_savable(RunDirectory(folder).path.absolute())
    return writable(folder)


def writable(folder: str) -> str:
    """Tell whether a directory can be written."""
    store_of(located(folder)).require_writable()
    return f"{folder} can be written"


def disk(setup: RunSetup, state_bytes: int) -> str:
    """Tell whether the checkpoints that a run keeps fit its disk."""
    # Orbax deletes an old checkpoint once the new one is complete, so one more has to fit.
    count = setup.run.train.keep_checkpoints + 1
    text = f"{count} checkpoints of {human_bytes(state_bytes)}"
    space = store_of(setup.directory.path).free_space()
    if space is None:
        return f"{text}, in a store"
    folder, free = space
    needed = count * state_bytes
    text += f" need {human_bytes(needed)}, and {folder} has {human_bytes(free)} free"
    if needed > free:
        remedy = "make room, choose another run.dir, or lower train.keep_checkpoints"
        raise ConfigError(f"{text}: {remedy}.")
    return text


def dry_run(setup: RunSetup) -> str:
    """Compile the first step and run it twice."""
    lines: list[str] = []
    program = compile_step(setup.step, setup.target, setup.first_batch, lines.append)
    # The first state of the run as it would start, with what it takes from its base.
    state = first_state(setup, lines.append)
    batch = setup.placed(setup.batches[0], state.params)
    with memory_of("the first step"):
        state, metrics = program(state, batch)
        first = as_logged(metrics)
        # The second call: the first one loads the program.
        start = time.perf_counter()
        _, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start
    steps = setup.run.train.steps
    pace = (
        f"loss {first['loss']:.4f}, gradient norm {first['grad_norm']:.4g}; a step takes about"
        f" {human_time(seconds)}, and {steps:,} steps {human_time(seconds * steps)}"
    )
    # A loss that is not finite in the first step will not become so.
    if not all(map(math.isfinite, (first["loss"], first["grad_norm"]))):
        raise ConfigError(pace)
    return "\n".join([*lines, pace])
