"""The losses and metrics that a model's heads are trained and evaluated by, as sums over a batch."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.layers.head import head, output_layer, pooled, readout
from jaxformer.losses import cross_entropy
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.params import Params, contract
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

    `batch` holds tokens [B, T] int, targets and weights [B, T] (or [B, 1] for a class of each row), and what else the model
    reads: segment_ids, token_types, source, source_segment_ids, all int. "loss" is the objective; "nats", where label
    smoothing, the z-loss or next sentences [B, 1] make that another, is the plain cross-entropy. A key turns dropout on.
    """
    inputs = inputs_of(batch)
    x, _ = hidden(params, config, inputs, key=key if config.dropout else None)
    extras: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "soft_cap": config.logit_soft_cap}
    layer = output_layer(params, config, readout(params, config, x, inputs.places))
    objective, nats = cross_entropy(*layer, batch["targets"], batch["weights"], **extras)
    weight = batch["weights"].sum()
    if config.next_sentence:
        layer = output_layer(params, config, pooled(params, config, x, inputs.places), "next_sentence")
        # Added to the sum over tokens, by weights that say how many tokens a pair of sentences counts for.
        objective += cross_entropy(*layer, batch["next_sentence"], batch["next_sentence_weights"])[0]
    if label_smoothing or z_loss or config.next_sentence:
        return {"loss": (objective, weight), "nats": (nats, weight)}
    return {"loss": (objective, weight)}


def accuracy(params: Params, config: ModelConfig, batch: Batch) -> Sums:
    """Whether the likeliest class is the target: "accuracy", and of the pairs of sentences "next_sentence_accuracy"."""
    inputs = inputs_of(batch)
    x, _ = hidden(params, config, inputs)
    right = jnp.argmax(head(params, config, x, inputs.places), axis=-1) == batch["targets"]
    sums = {"accuracy": ((right * batch["weights"]).sum(), batch["weights"].sum())}
    if config.next_sentence:
        rows, matrix = output_layer(params, config, pooled(params, config, x, inputs.places), "next_sentence")
        follows = jnp.argmax(contract("BTD,VD->BTV", rows, matrix), axis=-1) == batch["next_sentence"]
        weights = batch["next_sentence_weights"]
        sums["next_sentence_accuracy"] = ((follows * weights).sum(), weights.sum())
    return sums
