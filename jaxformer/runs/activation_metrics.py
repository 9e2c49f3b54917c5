"""How the activations of a model are at an evaluation: units of the feed-forward that are dead, and
the entropy of attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.layers.capture import Request
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.training.state import mesh_of, on_mesh
from jaxformer.training.step import Batch

# What is captured of each layer, and the names of the metrics.
NAMES = {
    "mlp_units": "dead_units",
    "attention_weights": "attention_entropy",
    "cross_weights": "cross_attention_entropy",
}
# Activations that are 0 on a half line, exactly; the others only come near it.
EXACT_ZEROS = frozenset({"relu", "relu2", "reglu"})
# The absolute activation up to which one of these others counts as 0.
NEAR_ZERO = 1e-3


def make_activation_metrics(
    config: ModelConfig, microbatches: int = 1
) -> Callable[[Params, Batch], dict[str, float]]:
    """A function of params and a batch to "dead_units/decoder.3", "attention_entropy/decoder.3" and
    "cross_attention_entropy/decoder.3", for each stack and layer that has these, without dropout.

    A unit of the feed-forward is dead if its activation act(up x), with a gate act(gate x), is 0
    for all tokens: exactly for relu, relu2 and reglu, and at most 1e-3 in absolute value for the
    others, which only come near 0. The metric is the fraction of units that are. Layers of experts
    have none. The entropy is that of the attention weights of a query, -sum w log w in nats, meaned
    over heads and queries; it is between 0 and the logarithm of the number of keys.

    Padding counts for neither, nor do rows without a target. Only the first of `microbatches` is
    read, so that the weights [B, N, T, S] of one layer are in memory.
    """

    @jax.jit
    def program(params: Params, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        # A pair [B, 2, T] is two sequences.
        piece = {name: a[::microbatches] for name, a in batch.items() if a.ndim > 1}
        flat = {name: a.reshape(-1, a.shape[-1]) for name, a in piece.items()}
        inputs = inputs_of(flat)
        has_target = (flat["weights"] > 0).any(-1)
        segments = {"decoder": inputs.layout.segments, "encoder": inputs.layout.segments}
        if inputs.source_layout is not None:
            segments["encoder"] = inputs.source_layout.segments

        def summary(stack: str, what: str, value: jax.Array) -> jax.Array:
            length = value.shape[1 if what == "mlp_units" else 2]
            counts = jnp.broadcast_to(has_target[:, None], (len(has_target), length))
            segment_ids = segments[stack]
            # Learned prompts lengthen the rows: their tokens count then, and padding too.
            if segment_ids is not None and segment_ids.shape[1] == length:
                counts &= segment_ids != 0
            if what == "mlp_units":
                return _dead_fraction(config, value, counts)
            return _mean_entropy(value, counts)

        request = Request(tuple(NAMES), summary=summary)
        return hidden(params, config, inputs, request=request).aux.captures

    def metrics(params: Params, batch: Batch) -> dict[str, float]:
        with on_mesh(mesh_of(params)):
            captures = jax.device_get(program(params, batch))
        return dict(map(_named, sorted(captures.items())))

    return metrics


def _named(capture: tuple[str, Any]) -> tuple[str, float]:
    """The metric of a capture with a full name."""
    name, value = capture
    layer, _, what = name.rpartition(".")
    return f"{NAMES[what]}/{layer}", float(np.asarray(value))


def _dead_fraction(config: ModelConfig, units: jax.Array, counts: jax.Array) -> jax.Array:
    """The fraction of the units [B, T, F] that are 0 for all tokens that count, bool [B, T]."""
    largest = jnp.where(counts[..., None], jnp.abs(units.astype(jnp.float32)), 0).max((0, 1))
    return (largest <= (0 if config.activation in EXACT_ZEROS else NEAR_ZERO)).mean()


def _mean_entropy(weights: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean entropy of weights [B, N, T, S] over the heads and the queries that count [B, T]."""
    weights = weights.astype(jnp.float32)
    terms = jnp.where(weights > 0, weights * jnp.log(jnp.where(weights > 0, weights, 1)), 0)
    entropy = -terms.sum(-1).mean(1)
    return jnp.where(counts, entropy, 0).sum() / jnp.maximum(counts.sum(), 1)
