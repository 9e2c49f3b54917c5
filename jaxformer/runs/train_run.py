"""A whole run: turns its settings into a step, batches and hooks, and passes them to `fit`."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from jaxformer.arrays.out_of_memory import OutOfMemory, memory_of
from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import platform
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.checkpoints.digests import as_texts, combined, digests
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cluster.launch import finish, joined
from jaxformer.cluster.processes import exchange, require_same, together
from jaxformer.cluster.signals import doing
from jaxformer.config.format import escaped
from jaxformer.config.run import RunConfig, flat
from jaxformer.config.settings import Log
from jaxformer.config.train import LaunchConfig, TrainConfig
from jaxformer.files import store_of
from jaxformer.report import MetricsLog, ProgressBar, banner, human_bytes, human_time, read_metrics
from jaxformer.report.metrics import STATE
from jaxformer.report.trackers import chosen_tracker
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.evaluation import (
    Evaluation,
    Watch,
    bytes_of_targets,
    make_evaluation,
    unwatched,
)
from jaxformer.runs.kernel_check import with_proven_kernel
from jaxformer.runs.objectives import with_chats
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.runs.states import batch_text, batches_of, checkpoints_of, first_state, recovered
from jaxformer.runs.summary import summary
from jaxformer.training.loop import (
    BAD_STEPS,
    Advance,
    Diverged,
    Hook,
    Interrupted,
    SkipSteps,
    fit,
    is_finite,
)
from jaxformer.training.program import Metrics, Profile, Step
from jaxformer.training.spikes import SUCCESSIVE_SPIKES, SpikeLimit, is_spike, spike_text
from jaxformer.training.state import TrainState
from jaxformer.training.step import Batch

# Settings that may differ between the processes of a run, which compare the texts themselves.
PROCESS_SETTINGS = {
    "run.progress",
    "run.compilation_cache",
    "data.cache_dir",
    "data.train",
    "data.validation",
    "tokenizer.path",
    "tokenizer.chat_template",
}
# What is said where a signal ends a command that has nothing to save.
PREPARING = "before a step was made, so nothing was to be saved; the same command starts again."
SKIPPED_STEPS = "skipped_steps"
SPIKE_LIMITS = ("loss_limit", "grad_norm_limit")
# How the names of what an evaluation gives begin in metrics.jsonl.
EVALUATION_NAMES = ("val_loss", "tasks/")


@dataclass(frozen=True)
class Result:
    """A finished run: its final parameters, every line of metrics.jsonl, and its directory. Where
    the run keeps an average of its weights, `params` is the average."""

    params: Params
    metrics: list[dict[str, Any]]
    run_dir: Path


class RunOutOfMemory(OutOfMemory):
    """A device has not enough memory for a run. `jaxformer.cli.train.advice(error)` is the
    text of what to change.

    `setup` is the run, `saved` the step of its newest checkpoint, None without one. `begun` says
    whether the directory belongs to the settings of an earlier command.
    """

    def __init__(self, error: OutOfMemory, setup: RunSetup, saved: int | None, begun: bool) -> None:
        super().__init__(error.place, error.text)
        self.setup = setup
        self.saved = saved
        self.begun = begun


def train(run: RunConfig) -> Result:
    """Trains as `run` says, as train.py does, and continues what its run directory holds.

    Of several processes, which join as run.launch or their launcher says, only the first one prints
    and writes files besides checkpoints.

    Raises ConfigError for a setting or input that cannot work, LostProcess where another process
    does not come or has ended, Diverged if the loss is not a number, OutOfMemory if a device has
    not enough memory for the run, and Interrupted after a signal that asks the run to stop, with
    the state saved.
    """
    begin = time.monotonic()
    log: Log = _print
    if run.run.progress == "none":
        log = _ignore
    with joined(run.launch, log, expected=(Diverged, OutOfMemory), agreed=(Interrupted,)):
        # Without run.launch, which differs from process to process: `agreed` compares all settings,
        # and config.json would say how one of the processes was started.
        return _train(dataclasses.replace(run, launch=LaunchConfig()), begin, log)


def _train(run: RunConfig, begin: float, log: Log) -> Result:
    """Trains, in each of the processes that have joined, in the order of docs/training.md."""
    if jax.process_index():
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, progress="none"))
        log = _ignore
    directory = RunDirectory(run.run.dir)
    with contextlib.ExitStack() as stack, doing(PREPARING):
        run = dataclasses.replace(run, data=with_chats(run.model, run.data, log=log))

        # The directory, which one run at a time holds. Nothing is written before its settings fit.
        def open_directory() -> bool:
            chosen_tracker(run.run.tracker)
            stack.enter_context(directory.lock(run.run.restart))
            directory.check_config(run)
            return directory.config.is_file()

        begun = together(open_directory)
        # The base, the tokenizer, the data, and every setting as the value that it is.
        setup = agreed(together(lambda: make_setup(run, log)))
        if run.run.export_every:
            # Imported here, because it takes the reader of Hugging Face's formats.
            from jaxformer.runs.exports import check_export

            check_export(setup)
        log(banner(summary(setup)))
        with checkpoints_of(setup, log) as checkpoints:
            try:
                # The state and the step.
                setup, state, program = _begin(setup, checkpoints, log)
                # Only now: a run that is refused until here, or whose step does not compile, leaves
                # no config.json, and the next command may change any setting.
                directory.claim(setup.config_json, setup.corpus.tokenizer, setup.record)
                if setup.reference and program is not None:
                    setup.reference.keep()
                # The loop, which goes on from a checkpoint after a bad step.
                with doing("between two steps; the same command continues."):
                    while True:
                        try:
                            state, last = _steps(setup, state, program, checkpoints, begin)
                            break
                        except Diverged as error:
                            state = recovered(setup, error, checkpoints, log)
            except OutOfMemory as error:
                # A save that is running decides whether the run can be continued.
                checkpoints.wait()
                saved = max(checkpoints.steps(), default=None)
                if saved is None and not begun:
                    # This command began the directory: any setting may change.
                    directory.release()
                raise RunOutOfMemory(error, setup, saved, begun) from error.__cause__
        # The end: its loss curve, its last evaluation and a sample.
        with doing("after the last step, which is saved; the same command shows the sample."):
            weights = evaluation_weights(state.params, state.optimizer)

            def close() -> None:
                # Only the first process has the evaluation. `finish` raises its error in the others
                # too.
                if not math.isfinite(last.get("val_loss", 0.0)):
                    raise Diverged(
                        f"all {run.train.steps} steps are done and saved, but the validation loss"
                        f" is {last['val_loss']}: the model or its validation data is of no use."
                    )
                if jax.process_index() == 0:
                    # Imported here, because no step needs plots and samples.
                    from jaxformer.runs.closing import close_run

                    log(close_run(setup, weights, last, time.monotonic() - begin))

            finish(close, Diverged)
    return Result(weights, read_metrics(directory.path), directory.path)


def agreed(setup: RunSetup) -> RunSetup:
    """The setup of this process with the id of the run that process 0 has drawn. Raises ConfigError
    where the settings or the data of two processes differ."""
    compared = {f"data.json: {name}": str(value) for name, value in setup.record.items()}
    for name, value in flat(setup.run).items():
        if name not in PROCESS_SETTINGS:
            compared[name] = repr(value)
    # Each process has drawn an id, and that of the first one counts.
    run_id = exchange(compared.pop("data.json: run_id"))[0]
    require_same(compared | {"the version of jax": jax.__version__})
    return dataclasses.replace(setup, record=setup.record | {"run_id": run_id})


def _begin(setup: RunSetup, checkpoints: Checkpoints, log: Log) -> tuple[RunSetup, TrainState, Any]:
    """The run with its kernel checked, the state to start from, and the compiled step; None for
    that where all steps are done.

    On a CPU the step compiles while the state is made; on another device before that, and after a
    check of its kernels, because its compiler may refuse one, and measures others on the device.
    """
    run = setup.run
    saved = checkpoints.steps() or [0]
    # Processes that see other checkpoints would continue from other steps.
    require_same({f"the checkpoints in {checkpoints.folder}": str(saved)})
    with ThreadPoolExecutor(1) as thread:

        def submitted(setup: RunSetup) -> Future[Any]:
            # What the thread compiles is made before it starts: both threads would make it twice.
            return thread.submit(compile_step, setup.step, setup.target, setup.first_batch, log)

        def compiling() -> tuple[RunSetup, Future[Any]]:
            if platform(setup.mesh) == "cpu":
                return setup, submitted(setup)
            proven = with_proven_kernel(setup, log)
            kernels: dict[str, str] = {
                "the attention kernel": proven.model.attention.kernel,
                "the kernel of experts": proven.model.experts.kernel,
            }
            require_same(kernels)
            program = submitted(proven)
            program.result()
            return proven, program

        # The newest checkpoint may prove unreadable, and then there are steps left.
        program = None
        if saved[-1] < run.train.steps:
            setup, program = compiling()
        with memory_of("reading the newest checkpoint"):
            state = checkpoints.restore(setup.target_over_base, log)
        if state is None:
            state = first_state(setup, log)
        elif int(state.step) < run.train.steps:
            log(f"Continuing {run.run.dir} from step {int(state.step)}.")
        else:
            log(
                f"{run.run.dir} has completed all {int(state.step)} steps; raise train.steps to"
                " continue."
            )
            return setup, state, None
        if program is None:
            setup, program = compiling()
        if setup.reference:
            with memory_of("reading the reference"):
                setup.reference.load()
        return setup, state, program.result()


def compile_step(step: Step, target: TrainState, batch: Any, log: Log) -> Any:
    """The step compiled ahead of time for a state as shapes and a batch, so that the memory that it
    needs is logged before it runs."""
    begin = time.perf_counter()
    with memory_of("compiling the step"):
        compiled = step.lower(target, batch).compile()
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    log(
        f"Compiled the step in {human_time(time.perf_counter() - begin)}; it needs"
        f" {human_bytes(temporary)} per device besides its state."
    )
    return compiled


class CountedStep:
    """The compiled step, which counts the steps that are done; `fit` calls it.

    The metrics of a step that is logged or evaluated have the digests of the state after it. Their
    program is started before the next step, which donates that state, and nothing waits for it.
    """

    def __init__(
        self,
        program: Any,
        train: TrainConfig,
        evaluate_every: int,
        unsaved: Collection[str],
        done: int,
    ) -> None:
        self.program = program
        self.train = train
        self.evaluate_every = evaluate_every
        self.unsaved = frozenset(unsaved)
        self.done = done

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # Before the program runs, so that `memory_of` names this step where memory runs out.
        self.done += 1
        state, metrics = self.program(state, batch)
        evaluated = is_due(self.done, self.evaluate_every, self.train.steps)
        if evaluated or is_logged(self.done, self.train):
            metrics = {**metrics, STATE: self.sums(state)}
        return state, metrics

    def sums(self, state: TrainState) -> Metrics:
        """The digests of the leaves of a state that its checkpoints hold."""
        return digests(flat_leaves(state, without=self.unsaved))


@contextlib.contextmanager
def traced(steps: str, folder: Path, step: CountedStep) -> Iterator[Advance]:
    """The step, which traces the `steps` that run.profile names into a folder."""
    if not steps:
        yield step
        return
    # JAX writes traces to a disk alone.
    local = store_of(folder).output_folder()
    profile = Profile(step, steps, local.path)
    try:
        yield profile
    finally:
        profile.close()
        local.close()


def _steps(
    setup: RunSetup, state: TrainState, program: Any, checkpoints: Checkpoints, began: float
) -> tuple[TrainState, Evaluation]:
    """Runs the remaining steps; the final state and its evaluation, which the first process logs.

    `began` is the `time.monotonic()` from which the log counts its seconds. The evaluation of the
    first state, where it is due and was not made because a signal cut it short, is made first.
    """
    settings = setup.run.train
    run = setup.run.run
    first = int(state.step)
    directory = setup.directory
    heldout = setup.heldout
    tasks = setup.tasks
    before = logged_before(directory, first)
    evaluate_every = settings.eval_every
    if not heldout:
        evaluate_every = settings.eval_tasks_every
    step = CountedStep(program, settings, evaluate_every, setup.unsaved, first)
    evaluation = make_evaluation(
        setup.task.name, setup.model, bytes_of_targets(setup.corpus), setup.evaluation_options
    )
    hooks = list[Hook]()
    limit = 0
    if settings.on_bad_step == "skip":
        limit = BAD_STEPS
        hooks.append(SkipSteps(limit, before.skipped))
    if settings.spike_factor:
        hooks.append(SpikeLimit(limit))
    watch: Watch = unwatched
    logger = None

    def evaluate(params: Params) -> Evaluation:
        """Reads all batches at the end, and train.eval_batches of them before. The tasks are asked
        at some of these steps."""
        result: Evaluation = {}
        with memory_of(f"the evaluation after step {step.done}"):
            if heldout:
                count = len(heldout)
                if settings.eval_batches and step.done < settings.steps:
                    count = min(settings.eval_batches, count)
                read = watch(itertools.islice(heldout, count), count)
                result = evaluation(params, (setup.placed(batch, params) for batch in read))
            if tasks and asked(step.done):
                result |= tasks(params)
        return result

    def asked(number: int) -> bool:
        return tasks is not None and is_due(number, settings.eval_tasks_every, settings.steps)

    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            named = flat(setup.run) | {"run_id": setup.record["run_id"]}
            tracker = chosen_tracker(run.tracker)(directory.path, first, named)
            progress = stack.enter_context(ProgressBar(settings.steps, first, run.progress))
            metrics_log = MetricsLog(directory.path, first, began, tracker, setup.identity)
            stack.enter_context(metrics_log)
            logger = MetricLogger(setup, first, metrics_log, progress, before)
            hooks.append(logger)
            watch = progress.evaluation
        read_now = heldout and is_due(first, settings.eval_every, settings.steps)
        if not before.evaluation and (read_now or asked(first)):
            with doing(f"in the evaluation after step {first}; the same command makes it."):
                weights = evaluation_weights(state.params, state.optimizer)
                first_evaluation = {**evaluate(weights), STATE: step.sums(state)}
            for hook in hooks:
                hook(first, state, first_evaluation)
        stack.enter_context(memory_of(lambda: f"step {step.done}"))
        advance = stack.enter_context(traced(run.profile, directory.profile, step))
        prompts = batches_of(setup)
        batches: Any = prompts
        if setup.rollouts:
            batches = SimpleNamespace(
                rows=lambda step, state: setup.placed(prompts[step], state.params, step)
            )
        state = fit(
            advance,
            state,
            batches,
            steps=settings.steps,
            evaluate=evaluate if heldout or tasks else None,
            evaluate_every=evaluate_every,
            checkpoints=checkpoints,
            hooks=hooks,
        )
    if logger is None:
        return state, {}
    return state, logger.evaluation


class Logged(NamedTuple):
    """What a run logged up to a step: the last evaluation after that step ({} without one), and
    the number of steps that it skipped."""

    evaluation: Evaluation
    skipped: int


def logged_before(directory: RunDirectory, step: int) -> Logged:
    """What metrics.jsonl says of a run that continues after `step`."""
    evaluation: Evaluation = {}
    skipped = 0
    # A run that begins anew may have lines of one that was killed before its first checkpoint.
    if step == 0 or not directory.metrics.is_file():
        return Logged(evaluation, skipped)
    for line in read_metrics(directory.path):
        if line["step"] <= step:
            skipped = max(skipped, line.get(SKIPPED_STEPS, 0))
        if line["step"] == step and any(name.startswith(EVALUATION_NAMES) for name in line):
            evaluation = line
    return Logged(evaluation, skipped)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether a run of `steps` is evaluated after a step: each `every` steps, and at the end."""
    if step == steps:
        return True
    return 0 < every <= step and step % every == 0


def is_logged(step: int, train: TrainConfig) -> bool:
    """Whether a finite step gets a line of metrics.jsonl."""
    return step == 1 or step % train.log_every == 0 or step == train.steps


class MetricLogger:
    """Called with the metrics of each step and of each evaluation; `evaluation` is the last one.

    The metrics of some steps have the digests of the state after it under `STATE`.
    """

    def __init__(
        self, setup: RunSetup, first: int, log: MetricsLog, progress: ProgressBar, before: Logged
    ) -> None:
        self.setup = setup
        self.log = log
        self.progress = progress
        self.evaluation = before.evaluation
        self._skipped = before.skipped
        # The step of the last line, and the seconds of the steps since.
        self._logged_to = first
        self._seconds = 0.0
        # The fingerprint of the newest state that metrics came with; empty without digests.
        self._state = ""

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        metrics = dict(metrics)
        is_step = "step_seconds" in metrics
        if STATE in metrics:
            self._state = combined(as_texts(metrics.pop(STATE)))
        elif is_step:
            # An evaluation without digests is of the same state as the step before it.
            self._state = ""
        if not is_step:
            self.evaluation = metrics
            self.log.log(step, metrics, self._state)
            self.progress.update(step, metrics)
            return
        self._seconds += metrics.pop("step_seconds")
        skipped = not is_finite(metrics)
        if skipped:
            self._skipped += 1
            self.progress.log(
                f"WARNING: step {step} is not finite and was skipped ({self._skipped} of at most"
                f" {BAD_STEPS}): loss {float(metrics['loss'])}, gradient norm"
                f" {float(metrics['grad_norm'])}; {batch_text(self.setup, step)}."
            )
        if is_spike(metrics):
            self.progress.log(
                f"WARNING: step {step} is a spike and was skipped"
                f" ({int(metrics[SUCCESSIVE_SPIKES])} in a row, at most {BAD_STEPS}):"
                f" {spike_text(metrics)}; {batch_text(self.setup, step)}."
            )
        if not (skipped or is_spike(metrics) or is_logged(step, self.setup.run.train)):
            self.progress.update(step)
            return
        values = as_logged(metrics)
        # Without a limit, as before half of the first window, there is nothing to log.
        for name in SPIKE_LIMITS:
            if values.get(name) == math.inf:
                del values[name]
        seconds = max(self._seconds, 1e-9)  # the clock may not have moved
        tokens = (step - self._logged_to) * self.setup.tokens_per_step
        values["tokens"] = step * self.setup.tokens_per_step
        values["tokens_per_second"] = tokens / seconds
        if self._skipped:
            values[SKIPPED_STEPS] = self._skipped
        if self.setup.peak is not None:
            flops = tokens * self.setup.flops_per_token
            values["mfu"] = flops / seconds / (self.setup.peak * self.setup.mesh.size)
        self._logged_to = step
        self._seconds = 0.0
        self.log.log(step, values, self._state)
        self.progress.update(step, values)


def as_logged(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step under the names of metrics.jsonl, where "loss" is in nats, and
    "objective" is what is minimized, if that is another quantity."""
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    for name, value in [*values.items()]:
        if name.startswith("share/") and value == 0:
            # No row of the batch is of this source.
            del values[name.replace("share/", "loss/", 1)]
    if "nats" in values:
        values |= {"loss": values.pop("nats"), "objective": values["loss"]}
    return values


def _print(text: str) -> None:
    print(escaped(text), flush=True)


def _ignore(text: str) -> None:
    pass
