"""The train step: one jitted, donated function from state and batch to state and metrics, for any
loss."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxformer.arrays.mesh import SHARED_ENTRY
from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import explicit_axes, free_axes, on_devices
from jaxformer.files import ConfigError, first_of
from jaxformer.training.program import Metrics, Observe, Step
from jaxformer.training.state import (
    Trainable,
    TrainState,
    frozen_paths,
    learning,
    merged,
    updated_if,
)

# The mesh axis whose devices have the same params and different rows.
REPLICA = "data"

Batch = dict[str, Any]

# Sums over the examples of a batch and their weights. Only the step divides, once, over all
# microbatches and devices.
Sums = Mapping[str, tuple[Any, Any]]
ScalarSums = dict[str, tuple[jax.Array, jax.Array]]

# loss(params, batch, key) -> Sums. "loss" is minimized, each entry is logged as sum / weight; a key
# turns dropout on.
Loss = Callable[[Any, Any, jax.Array | None], Sums]


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    trainable: Trainable = None,
    seed: int = 0,
    schedules: Mapping[str, optax.Schedule] | None = None,
    rowwise: bool = False,
    deterministic: bool = False,
) -> Step:
    """Return the step of a loss and an optimizer: `state, metrics = step(state, batch)`. It is
    jitted, and the state is donated, except for the leaves that do not learn.

    Args:
      loss: (params, batch, key) -> {"loss": (sum, weight), ...}, a pure function. The gradient is
          that of the sum of "loss", divided once by its weight over all microbatches and devices.
          The key depends on (seed, step) alone.
      optimizer: any optax.GradientTransformation, the one that `init_state` was given. One that
          takes extra arguments has the mean loss as `value`, the `key` of the step, and
          `hessian_product`, from a tree v of the leaves that learn to the leaves of the Hessian of
          this batch's loss times v.
      microbatches: pieces that a batch is computed in, one after the other, to save memory. Every
          array of the batch has its rows on the first axis, and piece m takes rows m, m +
          microbatches, ...: the rows of a device stay on it. What the batch has in "shared" is no
          rows, and every piece reads it.
      trainable: which leaves learn, as in `init_state`; None goes by what the state says.
      seed: of the keys.
      schedules: functions of the step number (from 0), logged beside the losses, as in
          {"learning_rate": schedule}.
      rowwise: whether each sum of the loss is one over rows that do not read each other, without
          the key. Then each replica of the mesh adds up the gradients of its own rows over all
          microbatches, and they are reduced over replicas once a step.
      deterministic: whether a GPU is to run the same kernels, which add in a fixed order, after
          each start; see `train.deterministic`. Programs for other devices do not change.

    If the loss or the norm of the gradient is not finite, parameters and optimizer keep their
    values, and only the number of the step increases.

    Metrics are float32 scalars: each entry of the loss as sum / weight, grad_norm (before any
    clipping of the optimizer), the schedules, and what the optimizer's state has to say, if it has
    a method `metrics`, as that of `skip_spikes`. Raises ConfigError where the batch cannot be
    divided, the loss returns something else, or `trainable` is not that of the state.
    """
    transformation = optax.with_extra_args_support(optimizer)

    def advance(
        state: TrainState, batch: Batch, observe: Observe | None = None
    ) -> tuple[TrainState, Metrics]:
        if trainable is not None:
            # The moments were made for the leaves of `init_state`; other ones would have none.
            different = sorted({*frozen_paths(state.params, trainable)} ^ {*state.frozen})
            if different:
                raise ConfigError(
                    "trainable of make_step and of init_state differ at"
                    f" {first_of(different, 5, ', ')}: give both the same."
                )
        # By seed and step alone, so that a run that continues draws what it would have drawn.
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        learned = learning(state.params, state.frozen)
        grads, means = gradients(loss, state, batch, key, microbatches, rowwise)
        norm = optax.tree.norm(grads)

        def gradient_at(learned: Params) -> Params:
            at = replace(state, params=merged(learned, state.params, state.frozen))
            return gradients(loss, at, batch, key, microbatches)[0]

        product = functools.partial(_hessian_product, gradient_at, learned)
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
        with jax.named_scope("optimizer"):
            updates, moments = transformation.update(
                grads,
                state.optimizer,
                learned,
                value=means["loss"],
                key=key,
                hessian_product=product,
            )
            moments = updated_if(finite, moments, state.optimizer)
            learned = updated_if(finite, optax.apply_updates(learned, updates), learned)
            params = merged(learned, state.params, state.frozen)
        metrics = {**means, "grad_norm": norm}
        if hasattr(moments, "metrics"):
            metrics |= moments.metrics()
        if schedules is not None:
            metrics |= {name: schedule(state.step) for name, schedule in schedules.items()}
        if observe is not None:
            metrics |= observe(state.step, grads, updates)
        after = replace(state, step=state.step + 1, params=params, optimizer=moments)
        return after, metrics

    return Step(advance, deterministic)


def _hessian_product(
    gradient_at: Callable[[Params], Params], learned: Params, tangent: Any
) -> list[jax.Array]:
    """Return the leaves of H v at the arrays of v, which is 0 at all other leaves. H is that of the
    loss whose gradient is given, at the parameters `learned`."""

    def filled(leaf: jax.Array, v: Any) -> Any:
        if hasattr(v, "dtype"):
            return v
        return jnp.zeros_like(leaf)

    try:
        # In reverse mode, as H is symmetric: it needs no forward derivative of any part.
        transposed = jax.vjp(gradient_at, learned)[1]
        (product,) = transposed(jax.tree.map(filled, learned, tangent))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            "the optimizer needs products with the Hessian, which a kernel of this model does not"
            f" have ({str(error).partition('. ')[0]}): set model.attention.kernel=xla and"
            " model.experts.kernel=xla, or choose another optimizer.name."
        ) from error
    chosen = jax.tree.map(lambda h, v: h if hasattr(v, "dtype") else None, product, tangent)
    return jax.tree.leaves(chosen)


def gradients(
    loss: Loss,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    microbatches: int,
    rowwise: bool = False,
) -> tuple[Params, dict[str, jax.Array]]:
    """Return (gradient of the mean loss, means of all entries), summed over microbatches as (sum,
    weight) and divided once."""
    shared = {}
    if isinstance(batch, Mapping) and SHARED_ENTRY in batch:
        shared = {SHARED_ENTRY: batch[SHARED_ENTRY]}
        batch = {name: arrays for name, arrays in batch.items() if name != SHARED_ENTRY}

    # Traced once, for the shapes of its result and for the loop over microbatches.
    @functools.partial(jax.jit, inline=True)
    def sums_of(params: Params, piece: Batch, key: jax.Array) -> tuple[Params, ScalarSums]:
        def objective(learned: Params) -> tuple[jax.Array, ScalarSums]:
            # Only the leaves that learn are differentiated, so a frozen base takes no memory for
            # gradients.
            whole = {**piece, **shared} if shared else piece
            sums = checked_sums(loss(merged(learned, params, state.frozen), whole, key))
            return sums["loss"][0], sums

        learned = learning(params, state.frozen)
        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(learned)
        return grads, sums

    def accumulated(params: Params, batch: Batch, key: jax.Array) -> tuple[Params, ScalarSums]:
        def add(total: Any, item: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            piece, i = item
            # Each piece has a key of its own, or all pieces would drop the same units.
            grads_and_sums = sums_of(params, piece, jax.random.fold_in(key, i))
            return jax.tree.map(jnp.add, total, grads_and_sums), None

        # [B, ...] -> [M, B / M, ...], in which piece m holds rows m, m + M, ...
        split = jax.tree.map(
            lambda a: a.reshape(-1, microbatches, *a.shape[1:]).swapaxes(0, 1), batch
        )
        shapes = jax.eval_shape(sums_of, params, jax.tree.map(lambda a: a[0], split), key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (split, jnp.arange(microbatches)))
        return total  # type: ignore[no-any-return]

    def of_replica(params: Params, batch: Batch, key: jax.Array) -> tuple[Params, ScalarSums]:
        """Return the sums of a replica's own rows, reduced over replicas once and not in each
        piece."""
        return jax.lax.psum(accumulated(params, batch, key), REPLICA)  # type: ignore[no-any-return]

    if microbatches == 1:
        grads, sums = sums_of(state.params, batch, jax.random.fold_in(key, 0))
    else:
        for path, array in jax.tree.leaves_with_path(batch):
            if array.ndim == 0 or array.shape[0] % microbatches:
                raise ConfigError(
                    f"batch{jax.tree_util.keystr(path)} of shape {list(array.shape)} does not"
                    f" divide into microbatches={microbatches}: the first axis of every array of a"
                    " batch is its rows, a multiple of that."
                )
        run = accumulated
        replicas = free_axes().get(REPLICA, 1)
        if rowwise and replicas > 1 and not explicit_axes():
            rows = {len(array) for array in jax.tree.leaves(batch)}
            # Every microbatch has the same number of rows on each replica.
            if all(length % (replicas * microbatches) == 0 for length in rows):
                everywhere = PartitionSpec()
                in_specs = (everywhere, PartitionSpec(REPLICA), everywhere)
                run = on_devices(of_replica, in_specs, everywhere, {REPLICA})
        grads, sums = run(state.params, batch, key)
    # The one place that divides, after the sums of all microbatches, devices and processes.
    means = {name: total / _divisor(weight) for name, (total, weight) in sums.items()}
    # By the weight of all pieces, so that pieces with more tokens count more, as in one big batch.
    weight = _divisor(sums["loss"][1])
    return jax.tree.map(lambda total: total / weight, grads), means


def checked_sums(sums: Any) -> ScalarSums:
    """Return the result of a loss as float32 scalars."""
    returned: Any = type(sums).__name__
    is_right = False
    if isinstance(sums, Mapping):
        returned = {name: jax.tree.map(jnp.shape, entry) for name, entry in sums.items()}
        pairs = all(shapes in (((), ()), [(), ()]) for shapes in returned.values())
        is_right = pairs and "loss" in returned
    if not is_right:
        raise ConfigError(
            f"the loss returned {returned} (shapes), and must return {{'loss': (sum, weight),"
            " ...}, each a scalar: sum over the examples."
        )
    return {
        name: (jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))
        for name, (total, weight) in sums.items()
    }


def _divisor(weight: jax.Array) -> jax.Array:
    """Return the weight, or 1 where it is 0, so that a batch with only padding has a loss of 0."""
    return jnp.where(weight > 0, weight, 1)
