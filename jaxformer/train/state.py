"""Everything a training run carries from step to step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jaxformer.params import Params, Specs, abstract, init_params, shardings_of
from jaxformer.sharding import replicated


@struct.dataclass
class TrainState:
    """`step` counts optimizer steps done (int32); `params` and `optimizer` are float32 master weights and optax's state."""

    step: jax.Array
    params: Params
    optimizer: Any


def state_shardings(specs: Specs, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A sharding a leaf: the optimizer's moments lie as their parameters do, all else is on every device."""
    shapes, shardings, whole = abstract(specs), shardings_of(specs, mesh), replicated(mesh)

    def like(leaf: Any, shape: Any, sharding: Any) -> Any:
        return sharding if leaf.shape == shape.shape else whole

    moments = optax.tree_map_params(
        optimizer, like, jax.eval_shape(optimizer.init, shapes), shapes, shardings, transform_non_params=lambda _: whole
    )
    return TrainState(whole, shardings, moments)


def init_state(specs: Specs, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """The state before the first step, each leaf made where it lives."""

    def make(key: jax.Array) -> TrainState:
        params = init_params(specs, key)
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    return jax.jit(make, out_shardings=state_shardings(specs, optimizer, mesh))(jax.random.key(seed))


def abstract_state(specs: Specs, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state as shapes, dtypes and shardings, with no array made."""
    shapes = jax.eval_shape(lambda params: TrainState(jnp.int32(0), params, optimizer.init(params)), abstract(specs))
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        state_shardings(specs, optimizer, mesh),
    )
