"""An objective from outside the package with a parameter of its own: beside the next token, the
token after it is predicted by a second matrix.
"""

import jax.numpy as jnp
import optax
from own_sublayer import SIZES, Batches, batch

import jaxformer as jf
from jaxformer.arrays.params import Spec
from jaxformer.layers.head import output_layer, readout
from jaxformer.layers.linear import INITIALIZERS
from jaxformer.losses.cross_entropy import cross_entropy
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.runs.objectives import Objective, objective_specs

NAME = "two_ahead"


def specs(config):
    make = INITIALIZERS[config.init](config)
    shape = (config.vocab_size, config.d_model)
    return {"weight": Spec(shape, ("vocab", "embed"), make.weight, inputs=("embed",))}


def loss(params, config, batch, key=None):
    inputs = inputs_of(batch)
    x, _, _ = hidden(params, config, inputs, key=key if config.has_dropout else None)
    rows, matrix, bias = output_layer(params, config, readout(params, config, x, inputs.layout))
    targets, weights = batch["targets"], batch["weights"]
    nats, _ = cross_entropy(rows, matrix, targets, weights, bias=bias)
    second = params["objective"][NAME]["weight"]
    # The target of the next position, where that is of the same text; the last one has no weight.
    later_weights = jnp.roll(weights, -1, axis=1).at[:, -1].set(0)
    if inputs.layout.segments is not None:
        segments = inputs.layout.segments
        later_weights *= segments == jnp.roll(segments, -1, axis=1)
    later, _ = cross_entropy(rows, second, jnp.roll(targets, -1, axis=1), later_weights)
    total = weights.sum()
    return {"loss": (nats + later, total), "nats": (nats, total), "later": (later, total)}


ROW = Objective(("decoder",), "language", ("text",), shortest=2, loss=loss, specs=specs)


def losses(steps, mesh=None):
    config, seen = jf.ModelConfig(**SIZES), []
    optimizer = optax.adamw(1e-2)
    table = jf.specs(config) | objective_specs(NAME, config)
    state = jf.init_state(table, optimizer, mesh=mesh)
    step = jf.make_step(jf.loss_of(NAME, config), optimizer, microbatches=2)

    def keep(number, state, metrics):
        seen.append(float(metrics["loss"]))

    state = jf.fit(step, state, Batches(batch), steps=steps, hooks=[keep])
    return seen, state.params
