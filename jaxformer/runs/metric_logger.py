"""The hook of a run that writes metrics.jsonl and moves the progress bar."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxformer.checkpoints.digests import as_texts, combined
from jaxformer.config.train import TrainConfig
from jaxformer.report import MetricsLog, ProgressBar, read_metrics
from jaxformer.report.metrics import STATE
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.evaluation import Evaluation
from jaxformer.runs.setup import RunSetup
from jaxformer.runs.states import batch_text
from jaxformer.training.loop import BAD_STEPS, is_finite
from jaxformer.training.spikes import SUCCESSIVE_SPIKES, is_spike, spike_text
from jaxformer.training.state import TrainState

SKIPPED_STEPS = "skipped_steps"
SPIKE_LIMITS = ("loss_limit", "grad_norm_limit")


class Logged(NamedTuple):
    """What a run logged up to a step: the last evaluation after that step ({} without one), and
    the number of steps that it skipped."""

    evaluation: Evaluation
    skipped: int


def logged_before(directory: RunDirectory, step: int) -> Logged:
    """What metrics.jsonl says of a run that continues after `step`."""
    evaluation: Evaluation = {}
    skipped = 0
    if not step or not directory.metrics.is_file():
        return Logged(evaluation, skipped)
    for line in read_metrics(directory.path):
        if line["step"] <= step:
            skipped = max(skipped, line.get(SKIPPED_STEPS, 0))
        has_results = "val_loss" in line or any(name.startswith("tasks/") for name in line)
        if has_results and line["step"] == step:
            evaluation = line
    return Logged(evaluation, skipped)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether a run of `steps` is evaluated after a step: each `every` steps, and at the end."""
    return (step > 0 and every > 0 and step % every == 0) or step == steps


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
        self._sums: Mapping[str, Any] | None = None

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        metrics = dict(metrics)
        if STATE in metrics or "step_seconds" in metrics:
            self._sums = metrics.pop(STATE, None)
        if "step_seconds" not in metrics:
            self.evaluation = metrics
            self.log.log(step, metrics, self._state())
            self.progress.update(step, metrics)
            return
        self._seconds += metrics["step_seconds"]
        skipped = not is_finite(metrics)
        if skipped:
            self._skipped += 1
            self.progress.log(
                f"WARNING: step {step} is not finite and was skipped ({self._skipped} of at most"
                f" {BAD_STEPS}): loss {float(metrics['loss'])}, gradient norm"
                f" {float(metrics['grad_norm'])}; {self._batch(step)}."
            )
        if is_spike(metrics):
            self.progress.log(
                f"WARNING: step {step} is a spike and was skipped"
                f" ({int(metrics[SUCCESSIVE_SPIKES])} in a row, at most {BAD_STEPS}):"
                f" {spike_text(metrics)};"
                f" {self._batch(step)}."
            )
        if not (skipped or is_spike(metrics) or is_logged(step, self.setup.run.train)):
            self.progress.update(step)
            return
        values = as_logged(jax.device_get(metrics))
        del values["step_seconds"]
        # Without a limit, as before half of the first window, there is nothing to log.
        for name in SPIKE_LIMITS:
            if values.get(name) == math.inf:
                del values[name]
        seconds = max(self._seconds, 1e-9)
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
        self.log.log(step, values, self._state())
        self.progress.update(step, values)

    def _batch(self, step: int) -> str:
        return batch_text(self.setup.batches, self.setup.directory, step)

    def _state(self) -> str:
        """The fingerprint of the newest state that metrics came with; empty without digests."""
        return "" if self._sums is None else combined(as_texts(self._sums))


def as_logged(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step under the names of metrics.jsonl, where "loss" is in nats, and
    "objective" is what is minimized, if that is another quantity."""
    values = {name: float(value) for name, value in metrics.items()}
    for name in [name for name in values if name.startswith("share/") and not values[name]]:
        # No row of the batch is of this source.
        del values[name.replace("share/", "loss/", 1)]
    if "nats" in values:
        values |= {"loss": values.pop("nats"), "objective": values["loss"]}
    return values
