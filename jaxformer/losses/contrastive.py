"""The loss of pairs of texts that belong together, each told from the others of the batch.

A batch holds tokens and segment_ids [B, 2, T] (and token_types): on the second axis are a text, the
anchor, and one that belongs to it, its positive. Both go through the model as 2 B sequences, and
the positives of the other pairs are the negatives of an anchor.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import TrainConfig
from jaxformer.models.inputs import INPUT_NAMES, inputs_of
from jaxformer.models.text_vectors import row_vectors
from jaxformer.models.transformer import hidden
from jaxformer.training.step import Batch, Sums


def contrastive_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    temperature: float = TrainConfig.contrastive_temperature,
) -> Sums:
    """InfoNCE with in-batch negatives, in both directions, a sum over pairs (arXiv:1908.10084,
    arXiv:2212.03533).

    With a_i and p_i the vectors of length 1 of `jf.embed`, s_ij = a_i . p_j / temperature, and
    loss_i = -(log softmax_j(s_ij)_i + log softmax_j(s_ji)_i) / 2. Negatives are those of the batch
    that the loss is called with: under a mesh those of all devices, and in a step of several
    microbatches those of the microbatch. Two pairs with one text are each other's negatives. A pair
    whose texts are padding, which only fills a batch, is none.

    "accuracy" is how often the positive of an anchor is the nearest of the batch. Losses and
    metrics of the layers are there by name. Dropout needs a key.
    """
    pairs, _, length = jnp.shape(batch["tokens"])

    def sequences(array: Any) -> jax.Array:
        """[B, 2, T] -> [2 B, T], in an order in which rows stay on their device."""
        return jnp.asarray(array).reshape(2 * pairs, length)

    inputs = inputs_of({name: sequences(batch[name]) for name in INPUT_NAMES if name in batch})
    x, _, aux = hidden(params, config, inputs, key=key if config.has_dropout else None)
    vectors = row_vectors(config, x, inputs.layout).reshape(pairs, 2, -1)
    segments = inputs.layout.segments
    real = jnp.ones(pairs, bool)
    if segments is not None:
        real = (segments.reshape(pairs, -1) != 0).any(axis=1)
    anchors = vectors[:, 0]
    positives = vectors[:, 1]
    matched = (anchors * positives).sum(axis=1) / temperature
    # Every device compares its anchors with the positives of all.
    gathered = constrain(positives, (None, None))
    scores = jnp.einsum("ID,JD->IJ", anchors, gathered, precision=jax.lax.Precision.HIGHEST)
    # Finite, so that a row of padding alone has a finite gradient.
    scores = jnp.where(real & real[:, None], scores / temperature, jnp.finfo(jnp.float32).min)
    nats = (jax.nn.logsumexp(scores, axis=1) + jax.nn.logsumexp(scores, axis=0)) / 2 - matched
    count = real.sum(dtype=jnp.float32)
    objective = jnp.where(real, nats, 0).sum()
    right = real & (scores.argmax(axis=1) == jnp.arange(pairs))
    sums = {"accuracy": (right.sum(dtype=jnp.float32), count), **aux.losses, **aux.metrics}
    if aux.losses:
        sums["nats"] = (objective, count)
    for total, weight in aux.losses.values():
        objective += count * total / weight
    return {"loss": (objective, count), **sums}
