"""Evaluation: a model's loss on held-out text, per token and per byte."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import data
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import Log
from jaxformer.runs.objectives import OBJECTIVES, loss_of, task_of
from jaxformer.training.loop import make_totals
from jaxformer.training.step import Batch, Sums

Evaluation = dict[str, float]
# Shows the progress of an evaluation: takes its batches and their number, and yields the batches.
Watch = Callable[[Iterable[Batch], int], Iterable[Batch]]


# The bytes of text that the targets of a batch stand for.
CountBytes = Callable[[Batch], jax.Array]


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
        return {**terms, **(metrics(params, config, batch) if metrics else {})}

    totals = make_totals(sums)

    def evaluate(params: Params, batches: Iterable[Batch]) -> Evaluation:
        found = totals(params, batches)
        # If the loss is not in nats, `val_loss` is the "nats" beside it.
        nats, weight = found.get("nats") or found.get("loss") or (0.0, 0.0)
        line = {"val_loss": nats / max(weight, 1)}
        if "bytes" in found:
            line["val_bits_per_byte"] = nats / math.log(2) / max(found["bytes"][0], 1)
        for name, (total, weight) in found.items():
            # What has no weight, as the loss of a source without rows, has no mean.
            if name not in ("loss", "nats", "bytes") and (weight or "/" not in name):
                line[f"val_{name}"] = total / (weight or 1)
        return line

    return evaluate


def bytes_of_targets(corpus: data.Corpus) -> CountBytes | None:
    """The UTF-8 bytes of text of targets, if every byte of the text is predicted once; None where
    bits per byte are not defined."""
    if not corpus.task.every_token:
        return None
    tokenizer = corpus.tokenizer
    sizes, space, end = tokenizer.token_bytes(), tokenizer.spelled_space(), tokenizer.end_token
    has_space_before = tokenizer.has_space_before()

    def count(batch: Batch) -> jax.Array:
        targets, weights = batch["targets"], batch["weights"]
        total = (jnp.asarray(sizes)[targets] * weights).sum()
        if has_space_before:
            total -= ((targets == end) * weights).sum()
        if space:
            # A space that is spelled in three bytes is one. The last two tell it, and are at hand
            # at the start of a row, too.
            _, second, third = space
            ends_space = (batch["tokens"] == second) & (targets == third)
            total -= 2 * (ends_space * weights).sum()
        return total

    return count


def corpus_of(
    run: RunConfig,
    labels: tuple[str, ...] = (),
    new_labels: bool = False,
    log: Log = lambda line: None,
) -> data.Corpus:
    """The data of a run as rows. `labels` and `new_labels` are those of `data.ModelLabels`, and the
    errors those of `data.prepare`."""
    return data.prepare(
        run.data,
        run.tokenizer,
        task_of(run.model, run.data),
        seed=run.run.seed,
        vocab_size=run.model.vocab_size,
        model_labels=data.ModelLabels(labels, new_labels),
        log=log,
    )
