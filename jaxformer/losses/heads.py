"""The loss and the metrics of a model's heads, as sums over a batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.exact import exactly
from jaxformer.arrays.mesh import SHARED_ENTRY
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import DistillConfig
from jaxformer.files import ConfigError
from jaxformer.layers.head import head, logits_of_rows, output_layer, pooled, readout
from jaxformer.losses.cross_entropy import cross_entropy, distillation
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.training.step import Batch, Sums


class Distillation(NamedTuple):
    """The model that teaches another one, and how, as the settings `distill` have it."""

    teacher: ModelConfig
    temperature: float = DistillConfig.temperature
    share: float = DistillConfig.share


def head_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_dtype: str = "float32",
    sources: tuple[str, ...] = (),
    distill: Distillation | None = None,
) -> Sums:
    """Return the cross-entropy of a model's head, as sums over the targets of a batch and their
    weight.

    `batch` holds tokens [B, T] int, targets and weights [B, T] (or [B, 1] for a class of each row),
    and what else the model reads: segment_ids, token_types, source, source_segment_ids, all int.
    "loss" is the objective; "nats" is the plain cross-entropy, if label smoothing, the z-loss, a
    second head (targets and weights [B, 1], under its name and with "_weights") or losses of the
    layers make that another. Losses and metrics of the layers are there by name. Dropout needs a
    key. `logits_dtype` is that of `cross_entropy`.

    With `sources`, names of two or more, the batch has "source_ids" [B] int, the index of that of
    each row: "loss/NAME" is then the plain cross-entropy over the rows of a source, and
    "share/NAME" the fraction of the weight that they have.

    With `distill`, the params of its teacher are `batch["shared"]`, and the objective is share
    times the above plus (1 - share) T^2 KL(teacher || model), as in `distillation`, with T its
    temperature; "kl" is the divergence, and "nats" are of the targets.
    """
    inputs = inputs_of(batch)
    x, _, aux = hidden(params, config, inputs, key=key if config.has_dropout else None)
    layer = output_layer(params, config, readout(params, config, x, inputs.layout))
    targets = batch["targets"]
    weights = batch["weights"]
    # Tokens, or rows where a row has one class: what the step divides by.
    weight = weights.sum()
    divergence: dict[str, tuple[jax.Array, jax.Array]] = {}
    extras: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "logits_dtype": logits_dtype,
        "soft_cap": config.head.soft_cap,
    }
    if distill is None:
        rows, matrix, bias = layer
        with exactly(config.exact):
            objective, nats = cross_entropy(
                rows, matrix, targets, weights, bias=bias, nats_by_row=bool(sources), **extras
            )
    else:
        theirs = batch.get(SHARED_ENTRY)
        if theirs is None:
            raise ConfigError(
                f"the loss has a teacher, and the batch no {SHARED_ENTRY!r}: add its params, as in"
                f" batch | {{{SHARED_ENTRY!r}: params}}."
            )
        teacher, temperature, share = distill
        y = readout(theirs, teacher, hidden(theirs, teacher, inputs).x, inputs.layout)
        plain, nats, kl = distillation(
            layer,
            output_layer(theirs, teacher, y),
            targets,
            weights,
            temperature=temperature,
            teacher_cap=teacher.head.soft_cap,
            **extras,
        )
        objective = share * plain.sum() + (1 - share) * temperature**2 * kl.sum()
        divergence["kl"] = (kl.sum(), weight)
        if not sources:
            nats = nats.sum()
    sums_of_sources: dict[str, tuple[jax.Array, jax.Array]] = {}
    if sources:
        of_row = weights.sum(1)
        # Two entries of a source, whose quotient is its mean loss; a batch without it has a weight
        # of 0.
        for number, name in enumerate(sources):
            belongs = batch["source_ids"] == number
            weight_here = jnp.where(belongs, of_row, 0).sum()
            sums_of_sources[f"loss/{name}"] = (jnp.where(belongs, nats, 0).sum(), weight_here)
            sums_of_sources[f"share/{name}"] = (weight_here, of_row.sum())
        # [B] -> scalar: the rows of all sources together.
        nats = nats.sum()
    for name in config.second_heads:
        y = pooled(params, config, x, inputs.layout)
        rows, matrix, bias = output_layer(params, config, y, name)
        # Added to the sum over tokens; a weight is the number of tokens that a row counts.
        targets = batch[name]
        weights = batch[f"{name}_weights"]
        objective += cross_entropy(rows, matrix, targets, weights, bias=bias)[0]
    objective = aux.added(objective, weight)
    sums = {"loss": (objective, weight), **divergence, **aux.losses, **aux.metrics}
    if label_smoothing or z_loss or config.second_heads or aux.losses or divergence:
        sums["nats"] = (nats, weight)
    return {**sums, **sums_of_sources}


def accuracy(params: Params, config: ModelConfig, batch: Batch) -> Sums:
    """Return the sums of "accuracy", that of the most likely class, and of that of each second
    head, by its name and "_accuracy"."""
    inputs = inputs_of(batch)
    x = hidden(params, config, inputs).x
    right = jnp.argmax(head(params, config, x, inputs.layout), axis=-1) == batch["targets"]
    sums = {"accuracy": ((right * batch["weights"]).sum(), batch["weights"].sum())}
    for name in config.second_heads:
        layer = output_layer(params, config, pooled(params, config, x, inputs.layout), name)
        right = jnp.argmax(logits_of_rows(*layer), axis=-1) == batch[name]
        weights = batch[f"{name}_weights"]
        sums[f"{name}_accuracy"] = ((right * weights).sum(), weights.sum())
    return sums
