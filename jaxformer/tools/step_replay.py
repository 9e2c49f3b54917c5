"""One step of a run, done again from its number: its batch, the loss of each token, and the norms
of its gradient.

In the comments, B is the number of rows, T that of tokens, D the width of the model, V the size of
the vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import place_batch
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError
from jaxformer.layers.head import logits_of_rows, output_layer, readout
from jaxformer.losses.heads import head_loss
from jaxformer.losses.logits import gathered
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.runs.setup import RunSetup
from jaxformer.tools.verify.steps import StepsAgain, setup_of_run
from jaxformer.training.norms import layered_paths, squares_by_leaf
from jaxformer.training.state import TrainState, on_mesh
from jaxformer.training.step import Batch, gradients


class Replay(NamedTuple):
    """Step `step` of a run, counted from 1, done again from the state after step `begun`.

    Attributes:
      batch: NumPy arrays, rows first.
      metrics: of the step, under the names of metrics.jsonl.
      logged: the line of the step in metrics.jsonl; None where there is none.
      norms: of the gradient before it is clipped, by layer, as "blocks 3", and by leaf outside of
        the layers.
      nats: float32, of the shape of the targets: the cross-entropy of each, with the dropout of the
        step. None for an objective with a loss of its own, which is no sum over targets.
    """

    step: int
    begun: int
    setup: RunSetup
    batch: dict[str, np.ndarray]
    metrics: dict[str, float]
    logged: dict[str, Any] | None
    norms: dict[str, float]
    nats: np.ndarray | None


def replay(
    path: str | Path,
    step: int,
    log: Log,
    mesh: Mapping[str, int] | None = None,
    cache_dir: str | Path = "",
) -> Replay:
    """Does step `step` of the run directory `path` again, from its newest earlier checkpoint or
    from its beginning. Writes nothing. The other arguments are those of `setup_of_run`."""
    setup = setup_of_run(path, log, mesh, cache_dir)
    steps = setup.run.train.steps
    if not 1 <= step <= steps:
        raise ConfigError(f"--step {step}: {path} has the steps 1 to {steps} (train.steps).")
    again = StepsAgain(setup, log)
    state = again.newest(step)
    begun = int(state.step)
    while int(state.step) < step - 1:
        state, _ = again.advance(state)
    batch = again.batches[step - 1]
    # Before the step, which donates the state.
    key = jax.random.fold_in(jax.random.key(setup.run.run.seed), state.step)
    norms = _gradient_norms(setup, state, batch, key)
    nats = None
    if setup.objective.loss is head_loss:
        nats = _nats(setup, state, batch, key)
    _, metrics = again.advance(state)
    return Replay(step, begun, setup, batch, metrics, again.logged.get(step), norms, nats)


def _gradient_norms(
    setup: RunSetup, state: TrainState, batch: Batch, key: jax.Array
) -> dict[str, float]:
    layered = layered_paths(setup.specs)
    pieces = setup.run.train.n_microbatches

    def squares_of(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        grads, _ = gradients(setup.loss, state, batch, key, pieces, setup.is_rowwise)
        return squares_by_leaf(grads, layered)

    with on_mesh(setup.mesh):
        by_leaf = jax.device_get(jax.jit(squares_of)(state, setup.placed(batch)))
    squares: dict[str, float] = {}
    for path, square in by_leaf.items():
        names = [path]
        if path in layered:  # one number for each layer
            stack = path.partition("blocks")[0] + "blocks"
            names = [f"{stack} {layer}" for layer in range(len(square))]
        for name, one in zip(names, np.atleast_1d(square).tolist(), strict=True):
            squares[name] = squares.get(name, 0.0) + one
    return {name: square**0.5 for name, square in squares.items()}


def _nats(setup: RunSetup, state: TrainState, batch: Batch, key: jax.Array) -> np.ndarray:
    pieces = setup.run.train.n_microbatches
    nats = np.zeros(batch["targets"].shape, np.float32)
    program = jax.jit(token_nats, static_argnums=1)
    for piece in range(pieces):
        # Microbatch m of M has the rows m, m + M and so on, and its own key, as in the step.
        rows = {name: array[piece::pieces] for name, array in batch.items()}
        with on_mesh(setup.mesh):
            placed = place_batch(rows, setup.mesh)
            own_key = jax.random.fold_in(key, piece)
            nats[piece::pieces] = program(state.params, setup.model, placed, own_key)
    return nats


def token_nats(
    params: Params, config: ModelConfig, batch: Batch, key: jax.Array | None = None
) -> jax.Array:
    """The cross-entropy of each target of a batch in nats, [B, T] float32, computed one row at a
    time, so that only the logits of one row, [T, V], are in memory. A key turns dropout on."""
    inputs = inputs_of(batch)
    x = hidden(params, config, inputs, key=key if config.has_dropout else None).x  # [B, T, D]
    out = output_layer(params, config, readout(params, config, x, inputs.layout))

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:  # [T, D], [T] -> [T]
        y, targets = row
        logits = logits_of_rows(y[None], out.matrix, out.bias)  # [1, T, V]
        cap = config.logit_soft_cap
        if cap:
            logits = cap * jnp.tanh(logits / cap)
        target_logits = gathered(logits, targets[None])[..., 0]  # [1, T]
        return (jax.nn.logsumexp(logits, axis=-1) - target_logits)[0]

    return jax.lax.map(of_row, (out.rows, jnp.asarray(batch["targets"])))
