"""A whole run: the composer turns its settings into a step, batches and hooks, and hands them to
`fit`."""

import dataclasses
import itertools
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoints import Checkpoints
from jaxformer.config import RunConfig
from jaxformer.data import gzip_bits_per_byte
from jaxformer.evaluation import Evaluation, bytes_of_targets, make_evaluation
from jaxformer.generation.decode import generate
from jaxformer.mesh import place_batch
from jaxformer.params import Params
from jaxformer.report import (
    MetricsLog,
    ProgressBar,
    banner,
    closing,
    human_bytes,
    human_time,
    plot_losses,
    read_metrics,
)
from jaxformer.runs.device import prove_kernel
from jaxformer.runs.directory import lock
from jaxformer.runs.init_from import warm_start
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.settings import Log
from jaxformer.training.loop import fit
from jaxformer.training.state import TrainState, init_state
from jaxformer.training.step import Batch, Metrics

Programs = dict[int, Any]  # by the length of the rows: (state, batch) -> (state, metrics), compiled
PROMPTS = {
    "masked": "Once [MASK] a time"
}  # for the command named at the end, where the head wants more than a word


@dataclass(frozen=True)
class Result:
    """A finished run: its final parameters, every line of metrics.jsonl, and where it lies."""

    params: Params
    metrics: list[dict[str, Any]]
    run_dir: Path


def train(run: RunConfig) -> Result:
    """Trains as `run` says, continuing what its run directory holds; the same job as train.py.

    With several processes the first one alone writes the run directory's records and speaks.

    Raises ConfigError for a setting or input that cannot work, Diverged where the loss is no
    number, and Interrupted after a SIGINT or SIGTERM, with the state saved.
    """
    begin = time.monotonic()
    if jax.process_index():
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, progress="none"))
    log: Log = _print if run.run.progress != "none" else lambda text: None
    with lock(run):
        setup = make_setup(run, log)
        log(banner(setup.summary))
        settings = run.train
        with Checkpoints(
            run.run.dir, settings.keep_checkpoints, settings.checkpoint_every
        ) as checkpoints:
            state, programs = _begin(setup, checkpoints, log)
            state, last = _steps(setup, state, programs, checkpoints, begin)
        if jax.process_index() == 0:
            plot = plot_losses(run.run.dir)
            log(_closing(setup, state.params, last, time.monotonic() - begin, plot))
    return Result(state.params, read_metrics(run.run.dir), Path(run.run.dir))


def _begin(setup: RunSetup, checkpoints: Checkpoints, log: Log) -> tuple[TrainState, Programs]:
    """The state to start from and the compiled step for each length of rows that is left, its
    kernel checked.

    On a CPU the step compiles while the rest is made; on another device first, since its compiler
    times kernels there.
    """
    run, saved = setup.run, checkpoints.steps() or [0]
    with ThreadPoolExecutor(1) as behind:

        def start(first: int) -> Future[Programs]:
            lengths = setup.lengths(first)
            programs = behind.submit(
                lambda: {length: compile_step(setup, length, log) for length in lengths}
            )
            if jax.default_backend() != "cpu":
                programs.result()
            for length in lengths:
                if proof := prove_kernel(setup.runs[length], setup.packed):
                    log(proof)
            return programs

        programs = (
            start(saved[0]) if saved[-1] < run.train.steps else None
        )  # the newest may prove torn
        state = checkpoints.restore(setup.target, log)
        if state is None:
            state = init_state(setup.specs, setup.optimizer, mesh=setup.mesh, seed=run.run.seed)
            if run.run.init_from:
                params, sentence = warm_start(run, state.params, setup.mesh, setup.corpus.labels)
                state = state.replace(params=params)  # type: ignore[attr-defined]
                log(sentence)
        elif int(state.step) < run.train.steps:
            log(f"Continuing {run.run.dir} from step {int(state.step)}.")
        else:
            log(
                f"{run.run.dir} has all its {int(state.step)} steps; raise train.steps to train on."
            )
            return state, {}
        programs = programs or start(int(state.step))
        return state, programs.result()


def _steps(
    setup: RunSetup, state: TrainState, programs: Programs, checkpoints: Checkpoints, began: float
) -> tuple[TrainState, Evaluation]:
    """Runs the steps that are left; the final state and its evaluation.

    `began` is the `time.monotonic()` from which the log counts its seconds.
    """
    settings, first = setup.run.train, int(state.step)
    if jax.process_index():
        return (
            _fit(
                setup, state, _ByLength(setup, first, programs, lambda text: None), checkpoints, ()
            ),
            {},
        )
    with (
        ProgressBar(settings.steps, first, setup.run.run.progress) as progress,
        MetricsLog(setup.run.run.dir, first, began) as metrics_log,
    ):
        if first >= settings.steps:
            done = [
                line
                for line in read_metrics(setup.run.run.dir)
                if "val_loss" in line and line["step"] == first
            ]
            return state, done[-1] if done else {}
        log: Log = (lambda text: None) if setup.run.run.progress == "none" else progress.log
        logger = MetricLogger(setup, first, metrics_log, progress)
        state = _fit(setup, state, _ByLength(setup, first, programs, log), checkpoints, (logger,))
    return state, logger.evaluation


def _fit(
    setup: RunSetup,
    state: TrainState,
    step: "_ByLength",
    checkpoints: Checkpoints,
    hooks: tuple[Any, ...],
) -> TrainState:
    settings, heldout = setup.run.train, setup.heldout
    evaluation = make_evaluation(
        setup.corpus.task.name, setup.run.model, bytes_of_targets(setup.corpus)
    )

    def evaluate(params: Params) -> Evaluation:
        """On all that is held out at the end, on as much as the settings say on the way."""
        limit = 0 if step.done == settings.steps else settings.eval_batches
        return evaluation(params, itertools.islice(heldout or (), limit or None))

    return fit(
        step,
        state,
        setup.batches,
        steps=settings.steps,
        evaluate=evaluate if heldout else None,
        evaluate_every=settings.eval_every,
        checkpoints=checkpoints,
        hooks=hooks,
    )


class _ByLength:
    """The step as `fit` calls it: the program for the rows of each step's length, of which there
    may be several."""

    def __init__(self, setup: RunSetup, first: int, programs: Programs, log: Log) -> None:
        self.setup, self.done, self._programs, self._log = setup, first, programs, log

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        before, now = self.setup.length(max(self.done - 1, 0)), self.setup.length(self.done)
        if before != now:
            self._log(
                f"step {self.done + 1}: rows of {now} tokens from here on, {before} until now"
            )
        self.done += 1
        return self._programs[now](state, batch)  # type: ignore[no-any-return]


class MetricLogger:
    """The hook that writes metrics.jsonl and moves the progress bar; `evaluation` is the last one
    seen."""

    def __init__(self, setup: RunSetup, first: int, log: MetricsLog, progress: ProgressBar) -> None:
        self.setup, self.log, self.progress = setup, log, progress
        self.evaluation: Evaluation = {}
        self._logged_to, self._seconds = first, 0.0

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        if "step_seconds" not in metrics:
            self.evaluation = dict(metrics)
            self.log.log(step, metrics)
            self.progress.update(step, metrics)
            return
        self._seconds += metrics["step_seconds"]
        settings = self.setup.run.train
        if step == 1 or step % settings.log_every == 0 or step == settings.steps:
            self._log(step, metrics)
        else:
            self.progress.update(step)

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = {
            name: float(value)
            for name, value in jax.device_get(dict(metrics)).items()
            if name != "step_seconds"
        }
        if (
            "nats" in values
        ):  # what is logged as the loss is nats a token, whatever else is minimized
            values |= {"loss": values.pop("nats"), "objective": values["loss"]}
        tokens, seconds = self.setup.tokens_per_step, max(self._seconds, 1e-9)
        rate = (step - self._logged_to) * tokens / seconds
        mfu = (
            self.setup.flops(self._logged_to, step)
            / seconds
            / (self.setup.peak * self.setup.mesh.size)
        )
        values |= {"tokens": step * tokens, "tokens_per_second": rate, "mfu": mfu}
        self._logged_to, self._seconds = step, 0.0
        self.log.log(step, values)
        self.progress.update(step, values)


def compile_step(setup: RunSetup, length: int, log: Log) -> Any:
    """The step for rows of a length, compiled ahead of time, so that what it needs is known, and
    said, before it runs."""
    begin = time.perf_counter()
    first = next(first for first, tokens in setup.batches.lengths if tokens == length)
    compiled = (
        setup.step(length)
        .lower(setup.target, place_batch(setup.batches[first], setup.mesh))
        .compile()
    )
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    took = human_time(time.perf_counter() - begin)
    rows = f" for rows of {length} tokens" if len(setup.runs) > 1 else ""
    log(
        f"The step was compiled{rows} in {took}; it needs {human_bytes(temporary)} a device besides"
        " its state."
    )
    return compiled


def _print(text: str) -> None:
    print(text, flush=True)


def _closing(setup: RunSetup, params: Params, last: Evaluation, seconds: float, plot: Path) -> str:
    run, output, bits = setup.run, setup.run.model.output, last.get("val_bits_per_byte")
    return closing(
        seconds=seconds,
        val_loss=last.get("val_loss"),
        bits_per_byte=bits,
        accuracy=last.get("val_accuracy"),
        gzip_bits_per_byte=gzip_bits_per_byte(setup.corpus.validation_text()) if bits else None,
        sample=_sample(setup, params),
        run_dir=f"{run.run.dir} (loss curve: {plot})",
        next_command=(
            f"jaxformer sample {run.run.dir} --prompt"
            f' "{run.run.sample_prompt or PROMPTS.get(output, "Once")}"'
        ),
    )


def _sample(setup: RunSetup, params: Params) -> tuple[str, str] | None:
    """A prompt and what the model makes of it; None for a model that does not write, or has nothing
    to write from."""
    run, tokenizer = setup.run, setup.corpus.tokenizer
    if not run.run.sample_tokens or jax.process_count() > 1:
        return None
    ids, source = tokenizer.encode(run.run.sample_prompt), {}
    prompt = tokenizer.as_prompt(ids) or [tokenizer.end_token]
    if run.model.family == "encoder_decoder":
        prompt, source = (
            tokenizer.as_target([]),
            ({"source": [tokenizer.as_source(ids)]} if ids else {}),
        )
    space = min(run.run.sample_tokens, run.model.max_length - len(prompt))
    if (
        space < 1
        or run.model.output != "language"
        or (run.model.family == "encoder_decoder" and not source)
    ):
        return None
    rules = {
        "temperature": 0.8,
        "top_k": 50,
        "vocab_size": tokenizer.vocab_size,
        "end_token": tokenizer.end_tokens,
    }
    made = generate(
        params, run.model, [prompt], space, key=jax.random.key(run.run.seed), **source, **rules
    )
    between = " => " if source else ""
    text = tokenizer.decode([*prompt, *made[0].tolist()])
    return run.run.sample_prompt + between, text[len(tokenizer.decode(prompt)) :]
