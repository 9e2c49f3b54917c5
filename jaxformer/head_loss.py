"""The losses and metrics that a model's heads are trained and evaluated by, as sums over a
batch."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.layers.head import head, logits_of_rows, output_layer, pooled, readout
from jaxformer.losses import cross_entropy
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.params import Params
from jaxformer.training.step import Batch, Sums


def head_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Sums:
    """The cross-entropy of a model's head, as sums over the targets of a batch and their weight.

    `batch` holds tokens [B, T] int, targets and weights [B, T] (or [B, 1] for a class of each row),
    and what else the model reads: segment_ids, token_types, source, source_segment_ids, all int.
    "loss" is the objective; "nats", where label smoothing, the z-loss, next sentences [B, 1] or
    losses of the layers make that another, is the plain cross-entropy. What the layers give beside
    (a router's loss, metrics) is there by name. A key turns dropout on.
    """
    inputs = inputs_of(batch)
    x, _, aux = hidden(params, config, inputs, key=key if config.dropout else None)
    extras: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": config.logit_soft_cap,
    }
    layer = output_layer(params, config, readout(params, config, x, inputs.layout))
    targets, weights = batch["targets"], batch["weights"]
    objective, nats = cross_entropy(
        layer.rows, layer.matrix, targets, weights, bias=layer.bias, **extras
    )
    weight = weights.sum()
    if config.next_sentence:
        layer = output_layer(
            params, config, pooled(params, config, x, inputs.layout), "next_sentence"
        )
        # Added to the sum over tokens, by weights that say how many tokens a pair of sentences
        # counts for.
        targets, weights = batch["next_sentence"], batch["next_sentence_weights"]
        objective += cross_entropy(layer.rows, layer.matrix, targets, weights, bias=layer.bias)[0]
    for total, own in aux.losses.values():
        objective += weight * total / own  # so that their means are added to the mean over tokens
    sums = {"loss": (objective, weight), **aux.losses, **aux.metrics}
    if label_smoothing or z_loss or config.next_sentence or aux.losses:
        sums["nats"] = (nats, weight)
    return sums


def accuracy(params: Params, config: ModelConfig, batch: Batch) -> Sums:
    """Whether the likeliest class is the target: "accuracy", and of the pairs of sentences
    "next_sentence_accuracy"."""
    inputs = inputs_of(batch)
    x = hidden(params, config, inputs).x
    right = jnp.argmax(head(params, config, x, inputs.layout), axis=-1) == batch["targets"]
    sums = {"accuracy": ((right * batch["weights"]).sum(), batch["weights"].sum())}
    if config.next_sentence:
        layer = output_layer(
            params, config, pooled(params, config, x, inputs.layout), "next_sentence"
        )
        follows = jnp.argmax(logits_of_rows(*layer), axis=-1) == batch["next_sentence"]
        weights = batch["next_sentence_weights"]
        sums["next_sentence_accuracy"] = ((follows * weights).sum(), weights.sum())
    return sums
