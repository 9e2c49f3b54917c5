"""Evaluations during training: the loss on held-out text, per token and per byte, and tasks of
EleutherAI's evaluation harness (`train.eval_tasks`)."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import data
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.runs.objectives import OBJECTIVES, loss_of
from jaxformer.tokenizer import Tokenizer
from jaxformer.training.loop import make_totals
from jaxformer.training.state import mesh_of, on_mesh
from jaxformer.training.step import Batch, Sums

Evaluation = dict[str, float]
# Shows the progress of an evaluation: takes its batches and their number, and yields the batches.
Watch = Callable[[Iterable[Batch], int], Iterable[Batch]]
# The bytes of text that the targets of a batch stand for.
CountBytes = Callable[[Batch], jax.Array]
MOST_NEW_TOKENS = 256  # of a task that does not say how many, if the context has space for them


def unwatched(batches: Iterable[Batch], count: int) -> Iterable[Batch]:
    """Shows nothing."""
    return batches


def make_evaluation(
    objective: str,
    config: ModelConfig,
    bytes_of: CountBytes | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Params, Iterable[Batch]], Evaluation]:
    """A function of params and batches to `val_loss` (nats per target) and the other entries of the
    loss and the metrics of the objective.

    `val_accuracy` is the fraction of targets that are the most likely class. With `bytes_of` also
    `val_bits_per_byte` (including ends of text). `options` are those of the loss; a loss of
    preferences is per pair.
    """
    loss = loss_of(objective, config, **(options or {}))
    metrics = OBJECTIVES[objective].metrics

    def sums(params: Params, batch: Batch, key: jax.Array | None) -> Sums:
        terms = dict(loss(params, batch, None))
        if bytes_of is not None:
            length = bytes_of(batch)
            terms["bytes"] = (length, length)
        if metrics is not None:
            terms |= metrics(params, config, batch)
        return terms

    totals = make_totals(sums)

    def evaluate(params: Params, batches: Iterable[Batch]) -> Evaluation:
        found = totals(params, batches)
        # If the loss is not in nats, `val_loss` is the "nats" beside it.
        nats, weight = found.get("nats", found.get("loss", (0.0, 0.0)))
        line = {"val_loss": nats / max(weight, 1)}
        if "bytes" in found:
            line["val_bits_per_byte"] = nats / math.log(2) / max(found["bytes"][0], 1)
        for name, (total, weight) in found.items():
            if name in ("loss", "nats", "bytes"):
                continue
            if weight:
                line[f"val_{name}"] = total / weight
            elif "/" not in name:
                # The loss of a source without rows has no mean, and all others are 0.
                line[f"val_{name}"] = total
        return line

    return evaluate


def bytes_of_targets(corpus: data.Corpus) -> CountBytes | None:
    """The UTF-8 bytes of text of targets, if every byte of the text is predicted once; None where
    bits per byte are not defined."""
    if not corpus.task.every_token:
        return None
    tokenizer = corpus.tokenizer
    sizes = tokenizer.token_bytes()
    space = tokenizer.spelled_space()
    end = tokenizer.end_token
    has_space_before = tokenizer.has_space_before()

    def count(batch: Batch) -> jax.Array:
        targets = batch["targets"]
        weights = batch["weights"]
        total = (jnp.asarray(sizes)[targets] * weights).sum()
        if has_space_before:
            # Each text begins with a space that is no byte of it. It also has one end token, so the
            # end tokens count these spaces.
            total -= ((targets == end) * weights).sum()
        if space:
            # A space that is spelled in three bytes is one. The last two tell it, and are at hand
            # at the start of a row, too.
            _, second, third = space
            ends_space = (batch["tokens"] == second) & (targets == third)
            total -= 2 * (ends_space * weights).sum()
        return total

    return count


class Tasks:
    """The tasks, whose texts are read. Calling it with parameters gives the results by names such
    as "tasks/arc_easy/acc", the same for the same parameters, whatever was asked before.

    Of several processes all ask the same, since each has a part of the parameters.
    """

    def __init__(self, names: str, config: ModelConfig, tokenizer: Tokenizer) -> None:
        try:
            import lm_eval
            import lm_eval.tasks
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "lm_eval":
                raise
            raise ConfigError(
                "train.eval_tasks needs the evaluation harness, which is not installed: pip install"
                ' "jaxformer[lm_eval]".'
            ) from None
        # Names of tasks as they are, and files of tasks as paths.
        paths = dict[str, str]()
        has_names = False
        for name in filter(None, map(str.strip, names.split(","))):
            paths[name] = name
            if name.endswith((".yaml", ".yml")):
                paths[name] = str(Path(name).expanduser().absolute())
            else:
                has_names = True
        # The index of all tasks of the harness takes seconds.
        manager = lm_eval.tasks.TaskManager(include_defaults=has_names)
        self._evaluate = functools.partial(
            lm_eval.simple_evaluate,
            tasks=[*paths.values()],
            task_manager=manager,
            # Standard errors are not logged, and for some the harness would draw 100,000 samples.
            bootstrap_iters=0,
            log_samples=False,
            torch_random_seed=None,
        )
        # Imported here, because it imports the harness too, and models read from disk.
        from jaxformer.runs.harness import HarnessModel
        from jaxformer.runs.loading import Loaded

        count = max(min(MOST_NEW_TOKENS, config.max_length // 2), 1)
        model = Loaded({}, config, tokenizer)
        self._model = HarnessModel(model, "this run", max_gen_toks=count)
        self._model.shows_progress = False  # beside that of training
        with _quiet():
            for name, path in paths.items():
                try:
                    tasks = manager.load([path])["tasks"].values()
                except Exception as error:  # of a file, a data set or code of the task: anything
                    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                    raise ConfigError(
                        f"train.eval_tasks has {name!r}, which the evaluation harness cannot read"
                        f" ({first_line}): `lm-eval ls tasks` lists the names of its tasks, and a"
                        " file of one's own ends with .yaml."
                    ) from error
                writes = any(task.config.output_type == "generate_until" for task in tasks)
                if writes and jax.process_count() > 1:
                    raise ConfigError(
                        f"train.eval_tasks has {name!r}, which lets the model write: in a run of"
                        " several processes take tasks with choices or of perplexity."
                    )
            # Whatever the model cannot answer is said before it is trained.
            try:
                self._evaluate(self._model)  # which has no parameters yet
            except ConfigError as error:
                raise ConfigError(f"train.eval_tasks={names}: {error}") from error

    def __call__(self, params: Params) -> dict[str, float]:
        self._model.params = params
        # At batch 0 `StopAgreement` begins the keys of another evaluation.
        self._model.batches = 0
        try:
            with _quiet(), on_mesh(mesh_of(params)):
                found = self._evaluate(self._model)
        finally:
            self._model.params = {}  # which the next step donates
        numbers = dict[str, float]()
        if not found:
            return numbers
        for task, metrics in found["results"].items():
            for name, value in metrics.items():
                # The harness names a metric with its filter, as in "acc,none".
                metric, _, filtered = name.partition(",")
                if not filtered or metric.endswith("_stderr"):
                    continue
                if isinstance(value, int | float):
                    path = f"tasks/{task}/{metric}/{filtered}".removesuffix("/none")
                    numbers[path] = float(value)
        return numbers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the harness about what a task leaves open."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
