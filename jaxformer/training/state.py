"""The state of a training run between steps, for any parameters and any optax optimizer."""

import contextlib
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from jaxformer.arrays.mesh import AnyMesh, parameter_sharding, place_array, placement, replicated
from jaxformer.arrays.params import NamedAxes, Params, Spec, dotted, init_params
from jaxformer.files import ConfigError
from jaxformer.training.compiler_options import compiler_options

# Which leaves learn: a pytree of bools (a bool may stand for a whole branch), or a function of the
# leaf's dotted path and the leaf itself (its `Spec`, where a table of specs was given). None: all
# but those whose `Spec`, or whose custom leaf, has `trainable` False.
Trainable = Any
HALF_DTYPES = ("bfloat16", "float16")


@struct.dataclass
class TrainState:
    """The state of a run between two steps.

    `step` counts the optimizer steps done (int32); `params` are the master weights, any pytree;
    `optimizer` is optax's state, which has moments for the leaves that learn. `frozen` names, by
    dotted path, the leaves that do not.
    """

    step: jax.Array
    params: Params
    optimizer: Any
    frozen: tuple[str, ...] = struct.field(pytree_node=False, default=())


def init_state(
    tree: Any,
    optimizer: optax.GradientTransformation,
    *,
    mesh: AnyMesh | None = None,
    seed: int = 0,
    trainable: Trainable = None,
) -> TrainState:
    """Return the state before the first step, each leaf made on its own devices.

    Args:
      tree: a table of specs (`jf.specs(config)`), whose initial values are drawn from `seed`, or
          params: any pytree of arrays. Leaves that learn are copied, because a step donates its
          state; the others are the arrays of the state, unless they have to be placed elsewhere.
      optimizer: any optax.GradientTransformation.
      mesh: the devices, from `jf.make_mesh`. Specs are placed by the names of their axes; params
          that are not on the mesh yet are replicated on it. None: the default device, or where the
          params are.
      seed: seed of the initial values.
      trainable: which leaves learn (see `Trainable`); the others get no gradient and no moments.

    Raises:
      ConfigError: if `trainable` does not fit the tree.
    """
    frozen = frozen_paths(tree, trainable)
    options = compiler_options(mesh)

    def draw() -> TrainState:
        return _first(init_params(tree, jax.random.key(seed)), optimizer, frozen)

    def copy(learned: Params) -> TrainState:
        return _first(jax.tree.map(jnp.array, learned), optimizer, frozen)

    shardings = state_shardings(tree, optimizer, mesh, frozen)
    if all(isinstance(leaf, Spec) for leaf in jax.tree.leaves(tree)):  # a table
        placed = None
        if mesh is not None:
            placed = shardings
        program = jax.jit(draw, out_shardings=placed, compiler_options=options)
        return program()  # type: ignore[no-any-return]
    learned, still = split_frozen(tree, frozen)
    short = {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(learned)} & {*HALF_DTYPES}
    if short:
        warnings.warn(
            f"parameters that learn are {' and '.join(sorted(short))}: an update of less than about"
            " 1/256 (bfloat16) or 1/2048 (float16) of a number is lost. Learn float32 params, and"
            " compute in bfloat16 by dtype='bfloat16' of the ModelConfig.",
            stacklevel=2,
        )
    learned_shardings, still_shardings = split_frozen(shardings.params, frozen)
    shardings = replace(shardings, params=learned_shardings)
    state = jax.jit(copy, out_shardings=shardings, compiler_options=options)(learned)
    still = jax.tree.map(
        lambda leaf, sharding: place_array(jnp.asarray(leaf), sharding), still, still_shardings
    )
    return replace(state, params=merged(state.params, still, frozen))


def _first(
    params: Params, optimizer: optax.GradientTransformation, frozen: tuple[str, ...]
) -> TrainState:
    """Return the state before the first step, with these params."""
    return TrainState(jnp.int32(0), params, optimizer.init(learning(params, frozen)), frozen)


def state_of(
    params: Params, optimizer: optax.GradientTransformation, target: TrainState
) -> TrainState:
    """Return the state before the first step, with `params`, which are placed already and not
    copied: a step donates them. `target` is the state as shapes and shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (target.step, target.optimizer))

    def start(params: Params) -> Any:
        first = _first(params, optimizer, target.frozen)
        return first.step, first.optimizer

    step, moments = jax.jit(start, out_shardings=shardings)(params)
    return TrainState(step, params, moments, target.frozen)


def abstract_state(
    tree: Any, optimizer: optax.GradientTransformation, mesh: AnyMesh | None = None
) -> TrainState:
    """Return `init_state` as shapes, dtypes and shardings, with no array made."""
    frozen = frozen_paths(tree, None)
    return jax.tree.map(  # type: ignore[no-any-return]
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        _shapes(tree, optimizer, frozen),
        state_shardings(tree, optimizer, mesh, frozen),
    )


def frozen_paths(tree: Any, trainable: Trainable) -> tuple[str, ...]:
    """Return the dotted paths of the leaves that do not learn, in the order of the tree."""

    def is_frozen(node: Any) -> bool:
        """Return whether a row, or a custom leaf with all its arrays, has `trainable` False."""
        return not getattr(node, "trainable", True)

    flags = trainable
    if trainable is None:
        flags = jax.tree.map(lambda node: not is_frozen(node), tree, is_leaf=is_frozen)
    elif callable(trainable):
        flags = jax.tree.map_with_path(lambda path, leaf: trainable(dotted(path), leaf), tree)
    paths = list[str]()

    def add(path: Any, learns: Any, branch: Any) -> None:
        if not learns:
            paths.extend(dotted(path + end) for end, _ in jax.tree.leaves_with_path(branch))

    try:
        jax.tree.map_with_path(add, flags, tree)
    except ValueError as error:
        raise ConfigError(
            "trainable does not fit the parameters: give a pytree of bools of their structure, in"
            f" which one bool may stand for a whole branch, or a function of (path, leaf). {error}"
        ) from error
    return tuple(paths)


def split_frozen(params: Params, frozen: tuple[str, ...]) -> tuple[Params, Params]:
    """Return `params` with None for the leaves that do not learn, and `params` with None for those
    that do; `merged` combines both."""
    if not frozen:
        # Without frozen leaves there is no second tree, so a step has no further arguments.
        return params, {}
    leaves, structure = jax.tree.flatten_with_path(params)
    frozen_set = set(frozen)
    learned = list[Any]()
    still = list[Any]()
    for path, leaf in leaves:
        if dotted(path) in frozen_set:
            learned.append(None)
            still.append(leaf)
        else:
            learned.append(leaf)
            still.append(None)
    return jax.tree.unflatten(structure, learned), jax.tree.unflatten(structure, still)


def learning(params: Params, frozen: tuple[str, ...]) -> Params:
    """Return `params` with None for the leaves that do not learn, which optax then does not see."""
    return split_frozen(params, frozen)[0]


def merged(learned: Params, params: Params, frozen: tuple[str, ...]) -> Params:
    """Return `params` with the leaves that learn taken from `learned`, whose others are None."""
    if not frozen:
        return learned
    return jax.tree.map(  # type: ignore[no-any-return]
        lambda new, old: old if new is None else new,
        learned,
        params,
        is_leaf=lambda leaf: leaf is None,
    )


def updated_if(applied: jax.Array, new: Any, old: Any) -> Any:
    """Return `new`, in the dtypes of `old`, if the update of a step is applied, else `old`: by a
    select, which is fused with the update and needs no copy; on a CPU by a branch, which copies,
    because a select would change how the update is rounded there."""
    # Gradients are float32, and so are moments that an optimizer makes from them, though those of
    # bfloat16 parameters began as bfloat16.
    new = jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, old)

    def branch(applied: jax.Array, new: Any, old: Any) -> Any:
        return jax.lax.cond(applied, lambda new, old: new, lambda new, old: old, new, old)

    def select(applied: jax.Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jax.lax.select(applied, a, b), new, old)

    return jax.lax.platform_dependent(applied, new, old, cpu=branch, default=select)


def state_shardings(
    tree: Any,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh | None,
    frozen: tuple[str, ...],
) -> TrainState:
    """Return the sharding of each leaf. A moment has that of the parameter with whose path its own
    path ends, and `NamedAxes` that of its axes; all others are replicated."""
    shapes = _shapes(tree, optimizer, frozen)
    devices = mesh
    if mesh is None:
        devices = mesh_of(tree)
    everywhere: Sharding
    if devices is None:
        everywhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
        everywhere = replicated(devices)
    # Of a parameter: by the names of its axes, or as it is, or replicated.
    table: dict[Any, tuple[Any, Sharding]] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, Spec):
            current = placement(mesh, leaf.shape, leaf.axes)
        else:
            current = getattr(leaf, "sharding", None) or everywhere
            if mesh is not None and getattr(current, "mesh", None) != mesh:
                current = everywhere
        table[path] = (tuple(leaf.shape), current)

    def sharding_at(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, NamedAxes):
            by_axes = everywhere
            if devices is not None:
                by_axes = parameter_sharding(devices, leaf.value.shape, leaf.axes)
            return jax.tree.map(lambda _: by_axes, leaf)
        # A moment of optax has the path of its parameter behind names of its own, as in
        # mu.blocks.attention.q; the longest end that fits is the parameter.
        for start in range(len(path) + 1):
            shape, sharding = table.get(path[start:], (None, everywhere))
            if shape == leaf.shape:
                return sharding
        return everywhere

    return jax.tree.map_with_path(  # type: ignore[no-any-return]
        sharding_at, shapes, is_leaf=lambda node: isinstance(node, NamedAxes)
    )


def mesh_of(state: Any) -> AnyMesh | None:
    """Return the mesh of the arrays of a state; None without one, or while they are traced."""
    # All arrays of a state are on one mesh, so the first that has one decides.
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.core.Tracer):
            continue
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    return None


def on_mesh(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Put a mesh in force, if there is one: of devices, or abstract to compile for others."""
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def _shapes(
    tree: Any, optimizer: optax.GradientTransformation, frozen: tuple[str, ...]
) -> TrainState:
    """Return the state as shapes and dtypes, from the rows of a table or from arrays."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))

    params = jax.tree.map(shape, tree)
    return jax.eval_shape(lambda params: _first(params, optimizer, frozen), params)
