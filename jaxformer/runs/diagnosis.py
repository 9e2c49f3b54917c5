"""What is not finite in a step (its rows, activations by layer, gradients by leaf), and what a run
does then, as train.on_nan says; the rows of a spike."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import Params, Specs, dotted
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Log
from jaxformer.files import first_of
from jaxformer.layers.capture import Request
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.runs.rollback import ShiftedBatches, read_rollbacks, roll_back, shift
from jaxformer.runs.setup import RunSetup
from jaxformer.training.loop import Diverged
from jaxformer.training.norms import layered_paths
from jaxformer.training.spikes import IN_A_ROW, TooManySpikes, is_spike
from jaxformer.training.state import TrainState, mesh_of, on_mesh
from jaxformer.training.step import Batch, Loss, gradients

SHOWN = 6


def diagnosis(setup: RunSetup, error: Diverged) -> str:
    """Lines about the step of an error, which is run again with the newest parameters, those of
    `error.state`: the rows of its batch, the first activation and the leaves of the gradient that
    are not finite."""
    rollbacks, step = read_rollbacks(setup.run.run.dir), error.step - 1
    lines = [_batch_text(setup, error.step)]
    if error.state is None:
        return _indented(lines)
    batch = setup.placed(ShiftedBatches(setup.batches, rollbacks)[step])
    params = error.state.params
    try:
        with on_mesh(mesh_of(error.state)):
            bad = _bad_leaves(jax.device_get(_are_finite(setup.specs, params)))
            if bad:
                lines.append(f"parameters that are not finite: {bad}")
            pieces = setup.run.train.n_microbatches
            lines.append(_activations(setup.model, pieces, params, batch))
            key = jax.random.fold_in(jax.random.key(setup.run.run.seed), step)
            lines.append(_gradients(setup.loss, setup.specs, pieces, error.state, batch, key))
    except Exception as again:
        # The error that is examined must not be hidden by another one.
        reason = " ".join(str(again).split())[:200]
        lines.append(f"the step cannot be run again ({type(again).__name__}: {reason})")
    return _indented(lines)


def _batch_text(setup: RunSetup, step: int) -> str:
    """The rows of the batch of a step, counted from 1."""
    moved = shift(read_rollbacks(setup.run.run.dir), step - 1)
    numbers = setup.batches.row_numbers(step - 1 + moved)
    return f"its batch: rows {', '.join(map(str, numbers))} of the training data"


class SpikeNotes:
    """A hook of `fit` that logs each spike that was skipped, with the rows of its batch."""

    def __init__(self, setup: RunSetup, log: Log) -> None:
        self._setup, self._log = setup, log

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        if not is_spike(metrics):
            return
        limit = self._setup.run.train.spike_limit
        self._log(
            f"WARNING: step {step} is a spike and was skipped ({int(metrics[IN_A_ROW])} in a row,"
            f" at most {limit}): loss {float(metrics['loss']):.4g} (limit"
            f" {float(metrics['loss_limit']):.4g}), gradient norm {float(metrics['grad_norm']):.4g}"
            f" (limit {float(metrics['grad_norm_limit']):.4g}); {_batch_text(self._setup, step)}."
        )


def _indented(lines: list[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _are_finite(specs: Specs, tree: Any) -> Any:
    """For each leaf whether it is finite: a scalar, or of a stack of layers [L]."""
    layered = layered_paths(specs)

    def finite(path: Any, leaf: jax.Array) -> jax.Array:
        inside = range(int(dotted(path) in layered), leaf.ndim)
        return jnp.isfinite(leaf).all(tuple(inside))

    return jax.tree.map_with_path(finite, tree)


def _bad_leaves(finite: Any) -> str:
    """The leaves that are not finite, each with its layers (of its own stack, counted from 0)."""
    descriptions = []
    for path, value in jax.tree.leaves_with_path(finite):
        layers = [str(layer) for layer in np.flatnonzero(~np.atleast_1d(value))]
        if layers:
            where = f" (layers {', '.join(layers)} of {len(value)})" if np.ndim(value) else ""
            descriptions.append(f"{dotted(path)}{where}")
    return first_of(descriptions, SHOWN, between="; ")


def _activations(model: ModelConfig, pieces: int, params: Params, batch: Batch) -> str:
    """The first activation that is not finite, of a batch in so many microbatches."""

    @jax.jit
    def finite(params: Any, piece: Any) -> dict[str, jax.Array]:
        request = Request(("residual",))
        # A pair [B, 2, T] is two sequences.
        flat = {name: a.reshape(-1, a.shape[-1]) for name, a in piece.items() if a.ndim > 1}
        _, _, aux = hidden(params, model, inputs_of(flat), request=request)
        return {name: jnp.isfinite(value).all() for name, value in aux.captures.items()}

    def layer(name: str) -> tuple[bool, int]:
        # An encoder comes before its decoder.
        stack, number, _ = name.split(".")
        return stack == "decoder", int(number)

    bad = set[str]()
    for piece in range(pieces):
        microbatch = jax.tree.map(lambda a, m=piece: a[m::pieces], batch)
        are_finite = finite(params, microbatch)
        bad |= {name for name, is_finite in are_finite.items() if not is_finite}
    if not bad:
        return "activations: all layers are finite (without dropout)"
    first = min(bad, key=layer)
    return f"activations: {first} is the first that is not finite, of {len(bad)}"


def _gradients(
    loss: Loss, specs: Specs, pieces: int, state: TrainState, batch: Batch, key: jax.Array
) -> str:
    """The leaves of the gradient of a step in so many microbatches that are not finite."""

    @jax.jit
    def finite(state: TrainState, batch: Batch, key: jax.Array) -> Any:
        grads, _ = gradients(loss, state, batch, key, pieces)
        return _are_finite(specs, grads)

    bad = _bad_leaves(jax.device_get(finite(state, batch, key)))
    if bad:
        return f"gradients that are not finite: {bad}"
    return (
        f"gradients: the same batch gives finite ones with the parameters of step {int(state.step)}"
    )


def recovered(setup: RunSetup, error: Diverged, checkpoints: Checkpoints, log: Log) -> TrainState:
    """The state to train on from where train.on_nan is "rollback" and train.nan_limit permits it.
    Raises Diverged otherwise, with a diagnosis of the step."""
    settings, why = setup.run.train, ""
    if settings.on_nan == "rollback" and not isinstance(error, TooManySpikes):
        done = len(read_rollbacks(setup.run.run.dir))
        if done < settings.nan_limit:
            return roll_back(setup, error, checkpoints, log)
        why = f"\n  the run was rolled back {done} times before, which is train.nan_limit"
    raise Diverged(f"{error}{diagnosis(setup, error)}{why}", error.step) from None
