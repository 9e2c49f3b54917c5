"""What is learned: each objective's rows and the loss that they are learned by."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.layers.head import head, output_layer, pooled, readout
from jaxformer.losses import cross_entropy
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.params import Params, contract
from jaxformer.training.step import Batch, Loss, Sums


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


def loss_of(objective: str, config: ModelConfig, **options: Any) -> Loss:
    """The loss that `train.py` uses for an objective of `data.objective`: (params, batch, key) -> Sums.

    `options` are those of the objective's loss: label_smoothing and z_loss for the cross-entropies; 0 leaves one out.
    Raises ConfigError for an objective that there is not, and for an option that its loss does not have.
    """
    if objective not in LOSSES:
        raise ConfigError(f"objective {objective!r} is not one of {', '.join(map(repr, LOSSES))}.")
    loss = LOSSES[objective]
    given = {name: value for name, value in options.items() if value}
    known = inspect.signature(loss).parameters
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"the loss of the objective {objective!r} takes no {', '.join(unknown)}: set it to 0.")

    @functools.wraps(loss)
    def bound(params: Params, batch: Batch, key: jax.Array | None) -> Sums:
        return loss(params, config, batch, key, **given)

    return bound


LOSSES: dict[str, Any] = dict.fromkeys(
    ("causal", "masked", "spans", "prefix", "pairs", "answers", "classes", "tags"), head_loss
)
METRICS: dict[str, Any] = {"masked": accuracy, "classes": accuracy, "tags": accuracy}
