"""The train step: one jitted, donated function from state and batch to state and metrics."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxformer.config import ModelConfig, RunConfig
from jaxformer.layers.head import output_layer, pooled, readout
from jaxformer.losses import cross_entropy
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden, specs
from jaxformer.params import Params
from jaxformer.sharding import batch_sharding
from jaxformer.training.state import TrainState, compiler_options, state_shardings

Batch = dict[str, Any]
Metrics = dict[str, jax.Array]


def loss_sums(
    params: Params, config: ModelConfig, batch: Batch, key: jax.Array | None = None, **extras: Any
) -> tuple[jax.Array, jax.Array]:
    """Sums over the tokens of a batch: (objective, nats). Their weight is the sum of `batch["weights"]`.

    `batch` holds tokens [B, T] int, targets and weights [B, T] (or [B, 1] for a class of each row), and what else the model
    reads: segment_ids, token_types, source, source_segment_ids, all int. `extras` are label_smoothing and z_loss, which the
    objective has and nats has not; it also has the loss of next_sentence [B, 1], weighted as the batch says. A key turns
    dropout on.
    """
    inputs = inputs_of(batch)
    x, _, aux = hidden(params, config, inputs, key=key)
    extras["soft_cap"] = config.logit_soft_cap
    layer = output_layer(params, config, readout(params, config, x, inputs.places))
    targets, weights = batch["targets"], batch["weights"]
    objective, nats = cross_entropy(layer.rows, layer.matrix, targets, weights, bias=layer.bias, **extras)
    if config.next_sentence:
        layer = output_layer(params, config, pooled(params, config, x, inputs.places), "next_sentence")
        targets, weights = batch["next_sentence"], batch["next_sentence_weights"]
        objective += cross_entropy(layer.rows, layer.matrix, targets, weights, bias=layer.bias)[0]
    for total, _ in aux.losses.values():
        objective += total
    return objective, nats


def gradients(params: Params, run: RunConfig, batch: Batch, key: jax.Array) -> tuple[Params, jax.Array]:
    """(gradient of the mean objective, mean nats), summed over microbatches as (sum, weight) and divided once."""
    pieces = run.train.microbatches
    extras = {"label_smoothing": run.train.label_smoothing, "z_loss": run.train.z_loss}

    def of_sums(piece: Batch, key: jax.Array) -> tuple[Params, jax.Array]:
        def objective(params: Params) -> tuple[jax.Array, jax.Array]:
            return loss_sums(params, run.model, piece, key if run.model.dropout else None, **extras)

        (_, nats), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return grads, nats

    def add(total: Any, item: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        piece, i = item
        return jax.tree.map(jnp.add, total, of_sums(piece, jax.random.fold_in(key, i))), None

    if pieces == 1:
        sums = of_sums(batch, jax.random.fold_in(key, 0))
    else:  # piece m takes rows m, m + M, ...: the rows of a device stay on it
        split = jax.tree.map(lambda a: a.reshape(-1, pieces, *a.shape[1:]).swapaxes(0, 1), batch)
        nothing = (jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
        sums, _ = jax.lax.scan(add, nothing, (split, jnp.arange(pieces)))
    weight = jnp.maximum(batch["weights"].sum(), 1)
    return jax.tree.map(lambda total: total / weight, sums)  # type: ignore[no-any-return]


def make_step(run: RunConfig, optimizer: optax.GradientTransformation, schedule: optax.Schedule, mesh: Mesh) -> Any:
    """The jitted step (state, batch) -> (state, metrics) of a run; call or lower it under `jax.set_mesh(mesh)`.

    The state given is donated: use the one that comes back. Metrics: loss (nats a token), grad_norm (before clipping),
    learning_rate. Dropout depends on (run.seed, step) alone.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(run.run.seed), state.step)
        grads, loss = gradients(state.params, run, batch, key)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": schedule(state.step)}
        return TrainState(state.step + 1, params, moments), metrics  # type: ignore[arg-type]

    places = state_shardings(specs(run.model), optimizer, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(places, batch_sharding(mesh)),
        out_shardings=(places, None),
        compiler_options=compiler_options(),
    )
