"""The loop: steps, metrics read one step late, evaluations and checkpoints on the way, and the end of a run."""

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoints import Checkpoints
from jaxformer.config import RunConfig
from jaxformer.data import gzip_bits_per_byte
from jaxformer.evaluation import Evaluation, bytes_of_targets, make_evaluate, place_batch
from jaxformer.generation.decode import generate
from jaxformer.params import Params
from jaxformer.report import MetricsLog, Progress, banner, closing, human_bytes, human_time, plot_losses, read_metrics
from jaxformer.runs.device import prove_kernel
from jaxformer.runs.directory import lock
from jaxformer.runs.init_from import carried
from jaxformer.runs.setup import Job, Say, make_job
from jaxformer.training.state import TrainState, init_state
from jaxformer.training.step import Batch, Metrics, make_step

Steps = dict[int, Any]  # by the length of the rows: (state, batch) -> (state, metrics), compiled
PROMPTS = {"masked": "Once [MASK] a time"}  # for the command named at the end, where the head wants more than a word


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number; checkpoints from before are untouched."""


class Interrupted(RuntimeError):
    """A signal asked the run to stop; its state is saved and the same command continues it."""


@dataclass(frozen=True)
class Result:
    """A finished run: its final parameters, every line of metrics.jsonl, and where it lies."""

    params: Params
    metrics: list[dict[str, Any]]
    run_dir: Path


def train(run: RunConfig) -> Result:
    """Trains as `run` says, continuing what its run directory holds; the same job as train.py.

    Raises ConfigError for a setting or input that cannot work, Diverged where the loss is no number, and Interrupted
    after a SIGINT or SIGTERM, with the state saved.
    """
    begin, began = time.perf_counter(), time.monotonic()
    say: Say = _print if run.run.progress != "none" else lambda text: None
    with lock(run):
        job = make_job(run, say)
        say(banner(job.facts))
        with Checkpoints(run.run.dir, run.train.keep_checkpoints) as checkpoints:
            state, advance = _begin(job, checkpoints, say)
            with jax.set_mesh(job.mesh):
                state, last = _steps(job, state, advance, checkpoints, began)
    plot = plot_losses(run.run.dir)
    say(_closing(job, state.params, last, time.perf_counter() - begin, plot))
    return Result(state.params, read_metrics(run.run.dir), Path(run.run.dir))


def _begin(job: Job, checkpoints: Checkpoints, say: Say) -> tuple[TrainState, Steps]:
    """The state to start from and the compiled step for each length of rows that is left, its kernel checked.

    On a CPU the step compiles while the rest is made; on another device first, since its compiler times kernels there.
    """
    run, saved = job.run, checkpoints.steps() or [0]
    with ThreadPoolExecutor(1) as behind:

        def start(first: int) -> Future[Steps]:
            lengths = job.lengths(first)
            steps = behind.submit(lambda: {length: compile_step(job, length, say) for length in lengths})
            if jax.default_backend() != "cpu":
                steps.result()
            for length in lengths:
                if proof := prove_kernel(job.runs[length], "segment_ids" in job.batches[0]):
                    say(proof)
            return steps

        steps = start(saved[0]) if saved[-1] < run.train.steps else None  # the newest may prove torn
        state = checkpoints.restore(job.target, say)
        if state is None:
            state = init_state(job.specs, job.optimizer, job.mesh, run.run.seed)
            if run.run.init_from:
                params, sentence = carried(run, state.params, job.mesh, job.corpus.labels)
                state = state.replace(params=params)  # type: ignore[attr-defined]
                say(sentence)
        elif int(state.step) < run.train.steps:
            say(f"Continuing {run.run.dir} from step {int(state.step)}.")
        else:
            say(f"{run.run.dir} has all its {int(state.step)} steps; raise train.steps to train on.")
            return state, {}
        return state, (steps or start(int(state.step))).result()


def _print(text: str) -> None:
    print(text, flush=True)


class Watch:
    """What is seen of a run: its log, its bar, and a clock that stops while evaluating and saving."""

    def __init__(self, job: Job, first: int, log: MetricsLog, progress: Progress) -> None:
        self.job, self.log, self.progress = job, log, progress
        self.read_to = self.logged_to = first
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.since += time.perf_counter() - begin

    def length(self, step: int) -> int:
        """The tokens of a row of this step's batch, said where they change."""
        before, now = self.job.length(max(0, step - 2)), self.job.length(step - 1)
        if before != now and self.job.run.run.progress != "none":
            self.progress.say(f"step {step}: rows of {now} tokens from here on, {before} until now")
        return now

    def read(self, step: int, metrics: Metrics) -> None:
        """Waits for a step and logs it if it is due. The loop reads a step late, so that the device never waits."""
        if step <= self.read_to:
            return
        self.read_to = step
        metrics["loss"].block_until_ready()
        settings = self.job.run.train
        if step == 1 or step % settings.log_every == 0 or step == settings.steps:
            self._log(step, metrics)
        else:
            self.progress.update(step)

    def _log(self, step: int, metrics: Metrics) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        require_finite(self.job, step, values)
        now = time.perf_counter()
        tokens = self.job.tokens_per_step
        seconds = max(now - self.since, 1e-9)
        rate = (step - self.logged_to) * tokens / seconds
        mfu = self.job.flops(self.logged_to, step) / seconds / (self.job.peak * self.job.mesh.size)
        values |= {"tokens": step * tokens, "tokens_per_second": rate, "mfu": mfu}
        self.since, self.logged_to = now, step
        self.log.log(step, values)
        self.progress.update(step, values)


def require_finite(job: Job, step: int, values: Mapping[str, float]) -> None:
    if not math.isfinite(values["loss"] + values["grad_norm"]):
        raise Diverged(
            f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}. The checkpoints in {job.run.run.dir} "
            "are from before. Begin another run.dir with a lower optimizer.learning_rate, more optimizer.warmup_steps, or "
            "train.z_loss."
        )


def _steps(
    job: Job, state: TrainState, advance: Steps, checkpoints: Checkpoints, began: float
) -> tuple[TrainState, Evaluation]:
    """Runs the steps that are left by those compiled; the final state and its evaluation.

    `began` is the `time.monotonic()` from which the log counts its seconds.
    """
    settings, first = job.run.train, int(state.step)
    evaluate = make_evaluate(job.run.model, job.mesh, bytes_of_targets(job.corpus))
    heldout = job.heldout
    with (
        Progress(settings.steps, first, job.run.run.progress) as progress,
        MetricsLog(job.run.run.dir, first, began) as log,
        _stop_signals() as stopped,
    ):
        if first >= settings.steps:
            done = [line for line in read_metrics(job.run.run.dir) if "val_loss" in line and line["step"] == first]
            return state, done[-1] if done else {}
        batches = job.batches.iterate(first)
        batch = place_batch(next(batches), job.mesh)
        watch = Watch(job, first, log, progress)
        metrics: Metrics = {}
        result: Evaluation = {}
        for step in range(first + 1, settings.steps + 1):
            previous = metrics
            state, metrics = advance[watch.length(step)](state, batch)
            watch.read(step - 1, previous)
            last, stop = step == settings.steps, stopped.is_set()
            if not last:
                batch = place_batch(next(batches), job.mesh)
            if heldout and (last or _due(step, settings.eval_every)):
                watch.read(step, metrics)
                with watch.paused():
                    result = evaluate(state.params, heldout if last else _some(heldout, settings.eval_batches))
                log.log(step, result)
                progress.update(step, result)
            if last or stop or _due(step, settings.checkpoint_every):
                watch.read(step, metrics)
                with watch.paused():
                    require_finite(job, step, jax.device_get(metrics))
                    checkpoints.save(state, step)
            if stop and not last:
                raise Interrupted(f"stopped after step {step} and saved; the same command continues {job.run.run.dir}.")
    return state, result


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _some(batches: Iterable[Batch], limit: int) -> Iterable[Batch]:
    return itertools.islice(batches, limit or None)


def compile_step(job: Job, length: int, say: Say) -> Any:
    """The step for rows of a length, compiled ahead of time, so that what it needs is known, and said, before it runs."""
    begin = time.perf_counter()
    first = next(first for first, tokens in job.batches.lengths if tokens == length)
    with jax.set_mesh(job.mesh):
        step = make_step(job.runs[length], job.optimizer, job.schedule, job.mesh)
        compiled = step.lower(job.target, place_batch(job.batches[first], job.mesh)).compile()
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    took = human_time(time.perf_counter() - begin)
    rows = f" for rows of {length} tokens" if len(job.runs) > 1 else ""
    say(f"The step was compiled{rows} in {took}; it needs {human_bytes(temporary)} a device besides its state.")
    return compiled


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that a step in flight is finished and saved; a second signal ends at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def ask(number: int, _: object) -> None:
        stopped.set()
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _closing(job: Job, params: Params, last: Evaluation, seconds: float, plot: Path) -> str:
    run, output, bits = job.run, job.run.model.output, last.get("val_bits_per_byte")
    return closing(
        seconds=seconds,
        val_loss=last.get("val_loss"),
        bits_per_byte=bits,
        accuracy=last.get("val_accuracy"),
        gzip_bits_per_byte=gzip_bits_per_byte(job.corpus.validation_text()) if bits else None,
        sample=_sample(job, params),
        run_dir=f"{run.run.dir} (loss curve: {plot})",
        next_command=f'jaxformer sample {run.run.dir} --prompt "{run.run.sample_prompt or PROMPTS.get(output, "Once")}"',
    )


def _sample(job: Job, params: Params) -> tuple[str, str] | None:
    """A prompt and what the model makes of it; None for a model that does not write, or has nothing to write from."""
    run, tokenizer = job.run, job.corpus.tokenizer
    if not run.run.sample_tokens:
        return None
    ids, source = tokenizer.encode(run.run.sample_prompt), {}
    prompt = tokenizer.as_prompt(ids) or [tokenizer.end_token]
    if run.model.family == "encoder_decoder":
        prompt, source = tokenizer.as_target([]), {"source": [tokenizer.as_source(ids)]} if ids else {}
    room = min(run.run.sample_tokens, run.model.max_length - len(prompt))
    if room < 1 or run.model.output != "language" or (run.model.family == "encoder_decoder" and not source):
        return None
    rules = {"temperature": 0.8, "top_k": 50, "vocab_size": tokenizer.vocab_size, "end_token": tokenizer.end_tokens}
    made = generate(params, run.model, [prompt], room, key=jax.random.key(run.run.seed), **source, **rules)
    between = " => " if source else ""
    text = tokenizer.decode([*prompt, *made[0].tolist()])
    return run.run.sample_prompt + between, text[len(tokenizer.decode(prompt)) :]
