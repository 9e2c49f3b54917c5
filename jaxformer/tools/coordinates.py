"""Coordinates of a model in muP: how far its activations move in the first steps, by width.

A parametrization transfers a learning rate over widths where the change of each activation keeps
its size as the model widens (the coordinate check, arXiv:2203.03466, appendix D.1). In the standard
one it grows with the width, until a rate that was best for a narrow model makes a wide one diverge.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Specs, init_params
from jaxformer.config.model import ModelConfig
from jaxformer.config.rules import widths_of
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.layers.capture import Request
from jaxformer.layers.head import head
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.models.transformer import specs as model_specs
from jaxformer.runs.objectives import loss_of, objective_specs
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.step import Loss

CAPTURED = ("residual", "attention_out", "cross_out", "mlp_out")
STEPS, SEEDS, LAYERS = 4, 2, 2
# The exponent of the width by which a change may grow or fall: that of a rate which is wrong by a
# factor of the width is 1.
MOST_EXPONENT = 0.5


class Coordinate(NamedTuple):
    """The root mean square of the change of an activation, for each width in turn, and the exponent
    of the width by which it grows from the first to the last."""

    changes: tuple[float, ...]
    growth: float


def widths_between(config: ModelConfig) -> list[ModelConfig]:
    """The model of mup_base, one of a width between it and `config` if there is one, and `config`:
    in muP, of at most two layers, or of one of each group that shares its parameters."""
    base: dict[str, Any] = {**widths_of(config.mup_base)}
    middle = {
        name: round(math.sqrt(width * (getattr(config, name) or width)))
        for name, width in base.items()
    }
    depth = config.layer_groups or min(config.n_layers, LAYERS)
    # A fused kernel may not take the heads of all widths.
    shallow: dict[str, Any] = {"n_layers": depth, "attention_kernel": "xla"}
    if config.family == "encoder_decoder":
        shallow["n_encoder_layers"] = depth
    configs = []
    for widths in (base, middle, {}):
        try:
            configs.append(replace(config, **shallow, **widths))
        except ConfigError:
            # Only the widths between may be those of no model: the others are settings.
            continue
    return list({model.d_model: model for model in configs}.values())


def coordinates(
    models: Sequence[ModelConfig],
    optimizer: OptimizerConfig,
    batch: Mapping[str, Any],
    objective: str = "causal",
) -> dict[str, Coordinate]:
    """By name of the activation, as "decoder.0.mlp_out" and "logits": its change in a few steps on
    one batch at the peak of the learning rate, in models of rising width; the mean of two seeds.

    `batch` is what the loss of the objective reads. Raises ConfigError for an optimizer without a
    factor of the width, if the models are in muP.
    """
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    by_width = [_changes(model, optimizer, arrays, objective) for model in models]
    grown = models[-1].d_model / models[0].d_model
    table = {}
    for name in by_width[0]:
        changes = tuple(float(of_width[name]) for of_width in by_width)
        ratio = changes[-1] / changes[0] if changes[0] else math.inf
        exponent = math.log(ratio) / math.log(grown) if 0 < ratio < math.inf else math.inf
        table[name] = Coordinate(changes, exponent)
    return table


def _changes(
    model: ModelConfig, optimizer: OptimizerConfig, batch: dict[str, jax.Array], objective: str
) -> dict[str, jax.Array]:
    """The change of each activation of a model, float32 scalars."""
    table: Specs = model_specs(model) | objective_specs(objective, model)
    loss: Loss = loss_of(objective, model)
    rule = make_optimizer(optimizer, lambda step: optimizer.learning_rate, table)

    def mean_loss(params: Any) -> jax.Array:
        total, weight = loss(params, batch, None)["loss"]
        return total / weight

    def advance(carry: Any, _: None) -> tuple[Any, None]:
        params, moments = carry
        updates, moments = rule.update(jax.grad(mean_loss)(params), moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), None

    def activations(params: Any) -> dict[str, Any]:
        # A pair [B, 2, T] is two sequences.
        flat = {name: a.reshape(-1, a.shape[-1]) for name, a in batch.items() if a.ndim > 1}
        inputs = inputs_of(flat)
        x, _, aux = hidden(params, model, inputs, request=Request(CAPTURED))
        return {**aux.captures, "logits": head(params, model, x, inputs.layout)}

    @jax.jit
    def change(seed: jax.Array) -> dict[str, jax.Array]:
        params = init_params(table, jax.random.key(seed))
        carry, _ = jax.lax.scan(advance, (params, rule.init(params)), None, STEPS)
        before, after = activations(params), activations(carry[0])
        difference = jax.tree.map(lambda a, b: (a - b).astype(jnp.float32), after, before)
        return jax.tree.map(lambda d: jnp.sqrt(jnp.mean(jnp.square(d))), difference)

    seeds = [jax.device_get(change(seed)) for seed in range(SEEDS)]
    return {name: sum(of_seed[name] for of_seed in seeds) / SEEDS for name in seeds[0]}


def disproportionate(table: Mapping[str, Coordinate]) -> list[str]:
    """The activations whose change does not keep its size over the widths."""
    return [name for name, row in table.items() if not abs(row.growth) <= MOST_EXPONENT]
