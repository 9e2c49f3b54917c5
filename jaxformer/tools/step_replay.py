"""One step of a run, done again from its number: its batch, the loss of each token, and the norms
of its gradient.

In the comments, B is the number of rows, T that of tokens, D the width of the model, V the size of
the vocabulary and L the number of layers.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import place_batch
from jaxformer.arrays.params import Params, Specs
from jaxformer.checkpoints.reading import Damaged, flat_leaves, read_checkpoint, saved_steps
from jaxformer.config.config_file import read_config
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError, located
from jaxformer.layers.head import logits_of_rows, output_layer, readout
from jaxformer.losses.heads import head_loss
from jaxformer.losses.logits import gathered
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.report import read_metrics
from jaxformer.runs.evaluation import own_cache
from jaxformer.runs.metric_logger import as_logged
from jaxformer.runs.rollback import batches_of
from jaxformer.runs.setup import RunSetup, make_setup
from jaxformer.runs.states import first_state
from jaxformer.runs.train_run import compile_step
from jaxformer.training.deterministic import require_deterministic
from jaxformer.training.norms import layered_paths, squares_by_leaf
from jaxformer.training.program import Metrics
from jaxformer.training.state import TrainState, mesh_of, on_mesh
from jaxformer.training.step import Batch, gradients


class Replay(NamedTuple):
    """Step `step` of a run, counted from 1, done again from the state after step `begun`.

    Attributes:
      setup: of the run.
      batch: NumPy arrays, rows first.
      metrics: of the step, under the names of metrics.jsonl.
      logged: the line of the step in metrics.jsonl; None where there is none.
      norms: of the gradient, by leaf: one number, or one for each layer.
      nats: float32, of the shape of the targets: the cross-entropy of each, with the dropout of the
        step. None for an objective with a loss of its own, which is no sum over targets.
    """

    step: int
    begun: int
    setup: RunSetup
    batch: dict[str, np.ndarray]
    metrics: dict[str, float]
    logged: dict[str, Any] | None
    norms: dict[str, list[float]]
    nats: np.ndarray | None

    def differing(self) -> dict[str, tuple[float, float]]:
        """The numbers that are not, to the bit, those that the run logged: (now, then)."""
        logged = self.logged or {}
        differing = {}
        for name, now in self.metrics.items():
            then = float(logged.get(name, now))
            if now != then and not (math.isnan(now) and math.isnan(then)):
                differing[name] = (now, then)
        return differing


def replay(
    path: str | Path,
    step: int,
    log: Log,
    mesh: Mapping[str, int] | None = None,
    cache_dir: str | Path = "",
) -> Replay:
    """Does step `step` of the run directory `path` again, from its newest earlier checkpoint or
    from its beginning. Writes nothing.

    `mesh` are sizes of axes of the mesh in place of those of the run; tokenized text is stored in
    `cache_dir`, by default that of this user. Raises ConfigError where `path` is no run directory,
    has no such step, its data has changed, or the mesh does not fit the devices.
    """
    setup = setup_of_run(path, log, mesh, cache_dir)
    run, folder = setup.run, located(path)
    if not 1 <= step <= run.train.steps:
        raise ConfigError(
            f"--step {step}: {folder} has the steps 1 to {run.train.steps} (train.steps)."
        )
    state = state_before(setup, step, log)
    begun = int(state.step)
    program, batches = compile_step(setup, log), batches_of(str(folder), setup.batches)

    def advance(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return program(state, setup.placed(batch))

    for number in range(begun, step - 1):
        state, _ = advance(state, batches[number])
    batch = batches[step - 1]
    norms = gradient_norms(setup, state, batch)  # before the step, which donates the state
    nats = None
    if setup.objective.loss is head_loss:
        key = jax.random.fold_in(jax.random.key(run.run.seed), state.step)
        nats = _nats(run.model, state, batch, key, run.train.n_microbatches)
    _, metrics = advance(state, batch)
    numbers = as_logged(jax.device_get(metrics))
    logged = None
    for line in read_metrics(folder):
        if line["step"] == step and "loss" in line:
            logged = line
    return Replay(step, begun, setup, batch, numbers, logged, norms, nats)


def setup_of_run(
    path: str | Path, log: Log, mesh: Mapping[str, int] | None = None, cache_dir: str | Path = ""
) -> RunSetup:
    """The setup of the run directory `path`, which is only read. `mesh`, `cache_dir` and the errors
    are those of `replay`."""
    folder = located(path)
    run = read_config(folder / "config.json")
    run = dataclasses.replace(
        run,
        run=dataclasses.replace(run.run, dir=str(folder), profile=""),
        mesh=dataclasses.replace(run.mesh, **(mesh or {})),
        data=dataclasses.replace(run.data, cache_dir=str(cache_dir or own_cache())),
    )
    if run.train.deterministic:
        require_deterministic()
    return make_setup(run, log)


def state_before(setup: RunSetup, step: int, log: Log) -> TrainState:
    """The newest state of the run from before a step: from a checkpoint, or the first one."""
    folder = located(setup.run.run.dir).absolute()
    target = flat_leaves(setup.target_over_base)
    saved_leaves = {path: leaf for path, leaf in target.items() if path not in setup.unsaved}
    for saved in reversed([number for number in saved_steps(folder) if number < step]):
        try:
            leaves = read_checkpoint(
                folder / "checkpoints", saved, saved_leaves, run=setup.identity
            )
        except Damaged as error:
            log(f"The checkpoint of step {saved} cannot be read; an earlier one is used: {error}")
            continue
        structure = jax.tree.structure(setup.target)
        state: TrainState = jax.tree.unflatten(structure, (target | leaves).values())
        return state
    return first_state(setup, log)


def gradient_norms(setup: RunSetup, state: TrainState, batch: Batch) -> dict[str, list[float]]:
    """The Euclidean norm of the gradient of a step by leaf, for a leaf of several layers of each.
    The gradient is the one before it is clipped."""
    loss, pieces, seed = setup.loss, setup.run.train.n_microbatches, setup.run.run.seed
    layered = layered_paths(setup.specs)

    def norms_of(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        grads, _ = gradients(loss, state, batch, key, pieces, setup.is_rowwise)
        return {path: jnp.sqrt(square) for path, square in squares_by_leaf(grads, layered).items()}

    with on_mesh(setup.mesh):
        norms = jax.device_get(jax.jit(norms_of)(state, setup.placed(batch)))
    return {path: np.atleast_1d(norm).tolist() for path, norm in norms.items()}


def _nats(
    model: ModelConfig, state: TrainState, batch: Batch, key: jax.Array, pieces: int
) -> np.ndarray:
    """The cross-entropy of each target of a batch, with the dropout of the step, whose key this
    is."""
    mesh, nats = mesh_of(state), np.zeros(batch["targets"].shape, np.float32)
    program = jax.jit(token_nats, static_argnums=1)
    for piece in range(pieces):
        # Microbatch m of M has the rows m, m + M and so on, and its own key, as in the step.
        rows = {name: array[piece::pieces] for name, array in batch.items()}
        with on_mesh(mesh):
            placed = place_batch(rows, mesh)
            piece_nats = program(state.params, model, placed, jax.random.fold_in(key, piece))
        nats[piece::pieces] = np.asarray(piece_nats)
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


def norms_by_layer(norms: Mapping[str, list[float]], specs: Specs) -> dict[str, float]:
    """The norms of `gradient_norms` by layer, as "blocks 3", and by leaf for the parameters outside
    of the layers."""
    layered = layered_paths(specs)
    squares: dict[str, float] = {}
    for path, leaf_norms in norms.items():
        if path in layered:
            stack = path.partition("blocks")[0] + "blocks"
            names = [f"{stack} {layer}" for layer in range(len(leaf_norms))]
        else:
            names = [path]
        for name, norm in zip(names, leaf_norms, strict=True):
            squares[name] = squares.get(name, 0.0) + norm**2
    return {name: square**0.5 for name, square in squares.items()}
