"""`jaxformer doctor CONFIG`: checks of what a run needs before it runs: versions, devices,
directories, data, the attention kernel, memory, and one step. Nothing is written in its directory.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import math
import os
import platform as machine
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jaxformer.arrays.out_of_memory import OutOfMemory, memory_of
from jaxformer.checkpoints.buckets import require_savable
from jaxformer.cli.arguments import DoctorArguments
from jaxformer.config.run import RunConfig, RunSettings
from jaxformer.files import ConfigError, located, store_of
from jaxformer.report import human_bytes, human_time, printable
from jaxformer.report.banner import WIDTH
from jaxformer.report.trackers import chosen_tracker
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.kernel_check import with_proven_kernel
from jaxformer.runs.objectives import with_chats
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.runs.states import first_state
from jaxformer.runs.train_run import as_logged, compile_step
from jaxformer.training.state import TrainState

VERSIONED = ("jaxformer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
# Device files of accelerators, and the extra of jaxformer that brings what drives them.
DRIVERS = {"/dev/nvidia[0-9]*": "cuda12 or cuda13", "/dev/accel[0-9]*": "tpu"}


class Finding(NamedTuple):
    """What one check found. A problem keeps a run from starting or from saving; a note does not."""

    kind: Literal["ok", "note", "problem"]
    check: str
    text: str


def run(args: DoctorArguments, config: RunConfig) -> int:
    notes: list[Finding] = []
    if config.train.eval_tasks and args.config.endswith(".json"):
        # A run directory may come from somebody else, and a file of tasks is code.
        notes.append(Finding("note", "train.eval_tasks", "not read: of a run they may be code."))
        train = dataclasses.replace(config.train, eval_tasks="", eval_tasks_every=0)
        config = dataclasses.replace(config, train=train)
    problems = 0
    for finding in itertools.chain(notes, examine(config)):
        problems += finding.kind == "problem"
        text = printable(f"{finding.kind:<8}{finding.check}: {finding.text}")
        indent = ""
        for paragraph in text.splitlines():
            lines = textwrap.wrap(
                paragraph.strip(),
                WIDTH,
                initial_indent=indent,
                subsequent_indent=" " * 8,
                break_long_words=False,
                break_on_hyphens=False,
            )
            print("\n".join(lines), flush=True)
            indent = " " * 8
    if not problems:
        print("No problem was found.")
        return 0
    print("1 problem." if problems == 1 else f"{problems} problems.")
    return 1


def examine(run: RunConfig) -> Iterator[Finding]:
    """Yield the findings of all checks of a run, in order. Checks that need what failed are left
    out."""
    yield versions()
    yield devices()
    yield from directories(run.run, run.data.cache_dir)
    run = dataclasses.replace(run, data=with_chats(run.model, run.data))
    try:
        # What a start would refuse, before the data is read.
        RunDirectory(run.run.dir).check_config(run)
        setup = make_setup(run, lambda line: None)
        target = setup.target
    except ConfigError as error:
        yield Finding("problem", "settings and data", str(error))
        return
    tokens, steps = setup.corpus.train.tokens, setup.run.train.steps
    yield Finding(
        "ok",
        "settings and data",
        f"{setup.task.name}, {tokens:,} tokens to train on, {steps:,} steps of"
        f" {setup.tokens_per_step:,} tokens",
    )
    # On the shapes of the state: nothing is made.
    yield disk(target, setup.directory.path, run.train.keep_checkpoints + 1)
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
    yield from dry_run(proven)


def versions() -> Finding:
    """Return the versions of the libraries, and whether the plugins for GPUs have that of jax."""
    numbers = dict[str, str]()
    for name in (*VERSIONED, *PLUGINS):
        # A checkout has no metadata.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers[name] = importlib.metadata.version(name)
    installed = ", ".join(f"{name} {number}" for name, number in numbers.items())
    text = f"Python {machine.python_version()}, {installed}"
    for plugin in PLUGINS[:2]:
        if numbers.get(plugin, numbers["jax"]) != numbers["jax"]:
            remedy = f'pip install "{plugin}=={numbers["jax"]}", the version of jax'
            return Finding("problem", "versions", f"{text}: {remedy}.")
    return Finding("ok", "versions", text)


def devices() -> Finding:
    """Return the devices, and whether this machine has accelerators that JAX does not use."""
    first, count = jax.devices()[0], jax.device_count()
    text = f"{count} x {first.device_kind} ({first.platform})"
    if first.platform == "cpu":
        for pattern, extra in DRIVERS.items():
            # A slow run on the CPU beside an idle GPU is the most expensive mistake.
            if [*Path("/").glob(pattern.lstrip("/"))]:
                return Finding(
                    "problem",
                    "devices",
                    f"{text}, but this machine has {pattern}: JAX does not use it. Install"
                    f' "jaxformer[{extra}]", and check JAX_PLATFORMS'
                    f" ({os.environ.get('JAX_PLATFORMS', 'not set')}).",
                )
    return Finding("ok", "devices", text)


def directories(settings: RunSettings, cache_dir: str) -> Iterator[Finding]:
    """Tell whether the run can write where it has to, its tracker included."""
    try:
        chosen_tracker(settings.tracker)
    except ConfigError as error:
        yield Finding("problem", "run.tracker", str(error))
    try:
        require_savable(RunDirectory(settings.dir).path.absolute())
    except ConfigError as error:
        yield Finding("problem", "run.dir", str(error))
    for setting, value in (
        ("run.dir", settings.dir),
        ("data.cache_dir", cache_dir),
        ("run.compilation_cache", settings.compilation_cache),
    ):
        if not value:
            yield Finding("problem" if setting == "run.dir" else "note", setting, "is empty.")
            continue
        try:
            folder = located(value)
            store_of(folder).require_writable()
        except ConfigError as error:
            yield Finding("problem", setting, str(error))
        else:
            yield Finding("ok", setting, f"{value} can be written")


def disk(target: TrainState, run_dir: Path, count: int) -> Finding:
    """Tell whether `count` checkpoints of a state, those that are kept and the one that is being
    written, fit the disk of a run directory."""
    leaves = jax.tree.leaves(target)
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    text = f"{count} checkpoints of {human_bytes(state_bytes)}"
    space = store_of(run_dir).free_space()
    if space is None:
        return Finding("ok", "disk space", f"{text}, in a store")
    folder, free = space
    # Orbax deletes an old checkpoint once the new one is complete, so one more has to fit.
    needed = count * state_bytes
    text += f" need {human_bytes(needed)}, and {folder} has {human_bytes(free)} free"
    if needed <= free:
        return Finding("ok", "disk space", text)
    remedy = "make room, choose another run.dir, or lower train.keep_checkpoints"
    return Finding("problem", "disk space", f"{text}: {remedy}.")


def dry_run(setup: RunSetup) -> Iterator[Finding]:
    """Compile the first step and run it twice."""
    lines: list[str] = []
    try:
        program = compile_step(setup.step, setup.target, setup.first_batch, lines.append)
        # The first state of the run as it would start, with what it takes from its base.
        state = first_state(setup, lines.append)
        batch = setup.placed(setup.batches[0])
        with memory_of("the first step"):
            state, metrics = program(state, batch)
            first = as_logged(jax.device_get(metrics))
            # The second call: the first one loads the program.
            start = time.perf_counter()
            _, metrics = program(state, batch)
            jax.block_until_ready(metrics)
            seconds = time.perf_counter() - start
    except (OutOfMemory, ConfigError) as error:
        yield Finding("problem", "one step", str(error))
        return
    for line in lines:
        yield Finding("ok", "one step", line)
    pace = (
        f"loss {first['loss']:.4f}, gradient norm {first['grad_norm']:.4g}; a step takes about"
        f" {human_time(seconds)}, and {setup.run.train.steps:,} steps"
        f" {human_time(seconds * setup.run.train.steps)}"
    )
    # A loss that is not finite in the first step will not become so.
    finite = math.isfinite(first["loss"]) and math.isfinite(first["grad_norm"])
    yield Finding("ok" if finite else "problem", "one step", pace)
