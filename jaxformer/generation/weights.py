"""The weights as the decode loop reads them, computed once for the same params."""

import functools
import math
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AxisType, Mesh

from jaxformer.adapters.output_major_codes import Int8Head, OutputMajorNF4
from jaxformer.adapters.quantized import Int8Weight, NF4Weight
from jaxformer.arrays.mesh import on_same_devices, with_automatic_axes
from jaxformer.arrays.params import Params, RowGroups, contract, dotted, is_custom, lookup, rows
from jaxformer.arrays.sharding import Axes, RunT, explicit_axes, free_axes, platform
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.head import matrix_path
from jaxformer.models.stack import compute_dtype, layer_order, loops_when_cached, stacks_of
from jaxformer.models.transformer import specs
from jaxformer.models.virtual import with_leading_keys
from jaxformer.training.state import mesh_of


@struct.dataclass
class OutputMajor:
    """A weight of axes [*inputs, *outputs], stored as [*outputs, *inputs].

    On a CPU the product of a vector with it reads memory faster, since both vectors of an output
    are contiguous: GPT-2 124M decodes 1.22 times as fast (1.05 to 1.35, 12 pairs, on two cores of
    an AMD EPYC with jax 0.10.2), at 0.80 of the bandwidth instead of 0.68.
    """

    matrix: jax.Array
    inputs: int = struct.field(pytree_node=False)  # how many axes are contracted

    @property
    def shape(self) -> tuple[int, ...]:
        """[*inputs, *outputs]"""
        return self.matrix.shape[-self.inputs :] + self.matrix.shape[: -self.inputs]

    def array(self) -> jax.Array:
        """Return the weight with its inputs first."""
        return jnp.moveaxis(self.matrix, range(-self.inputs, 0), range(self.inputs))

    def contract(
        self, equation: str, x: jax.Array, *, groups: RowGroups | None = None, **how: Any
    ) -> jax.Array:
        if groups is not None:
            return contract(equation, x, self.array(), groups=groups, **how)
        if x.shape[: x.ndim - self.inputs] in ((2,), (2, 1)):
            # x has two rows: two products of vectors take 0.8 to 0.9 of the time of one of
            # matrices.
            halves = [self.contract(equation, half, **how) for half in (x[:1], x[1:])]
            return jnp.concatenate(halves)
        left, right, out = equation.replace("->", ",").split(",")
        # The letters of w in the order of the axes that are stored.
        turned = right[self.inputs :] + right[: self.inputs]
        return contract(f"{left},{turned}->{out}", x, self.matrix, **how)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        return lookup(self.array(), index, to)

    def astype(self, dtype: Any) -> "OutputMajor":
        return OutputMajor(self.matrix.astype(dtype), self.inputs)


def on_automatic_axes(run: RunT) -> RunT:
    """Return a function of params and more, which on a mesh with explicit axes, the default of
    `jax.make_mesh`, runs on the same devices with automatic ones. Its result is on that mesh."""

    @functools.wraps(run)
    def on_mesh(params: Params, *arguments: Any, **more: Any) -> Any:
        mesh = mesh_of(params)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
        if is_traced or not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
            return run(params, *arguments, **more)
        automatic = with_automatic_axes(mesh)
        with jax.set_mesh(automatic):
            result = run(on_same_devices(params, automatic), *arguments, **more)
        return on_same_devices(result, mesh)

    return on_mesh  # type: ignore[return-value]


def prepared(params: Params, config: ModelConfig) -> Params:
    """Return the weights layer by layer, in the dtype of the products; a custom leaf as its
    `astype` gives it. With model.layer_loop=scan the blocks are those of the params where one loop
    can read them: that compiles sooner, and takes longer for each token.

    The last result is cached for the next call with the same arrays, until one of these is freed.
    Under a transform of JAX nothing is cached. Raises ConfigError on a mesh of several devices with
    explicit axes, on which nothing is decoded.
    """
    if explicit_axes() and math.prod(free_axes().values()) > 1:
        raise ConfigError(
            "the mesh in force has explicit axes, as jax.make_mesh makes them by default, and texts"
            " are written on meshes with automatic ones: make it by jf.make_mesh, or with"
            " axis_types=(jax.sharding.AxisType.Auto,) * N for its N axes."
        )
    if _is_looped(params, config) and not _has_turned_head(params, config):
        return params
    leaves, treedef = jax.tree.flatten(params)
    if not all(isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) for a in leaves):
        return _prepare(params, config)
    # No other array has the address of one of these while the entry is there: it is cleared when
    # the first of them is freed.
    made_of = (treedef, config, *map(id, leaves))
    if _LAST.get("made of") != made_of:
        _LAST.clear()  # before new ones are made, so that there are never two
        weights = _prepare(params, config)
        sources = [weakref.ref(leaf, lambda _: _LAST.clear()) for leaf in leaves]
        _LAST.update({"made of": made_of, "sources": sources, "weights": weights})
    return _LAST["weights"]  # type: ignore[no-any-return]


# The weights that were prepared last, what they were made of, and weak references to its arrays.
_LAST: dict[str, Any] = {}


def _is_looped(params: Params, config: ModelConfig) -> bool:
    """Return whether one loop reads the layers of the params as they are."""
    return "virtual" not in params and loops_when_cached(params["blocks"], config)


def _has_turned_head(params: Params, config: ModelConfig) -> bool:
    """Return whether the codes of the head are turned: those of int8 on a CPU, where products in
    float32 read them."""
    branch, name = matrix_path(config)
    is_int8 = isinstance(params.get(branch, {}).get(name), Int8Weight)
    in_float32 = compute_dtype(config) == jnp.float32
    if config.exact:
        return False
    return is_int8 and in_float32 and platform() == "cpu" and not explicit_axes()


def _prepare(params: Params, config: ModelConfig) -> Params:
    is_looped = _is_looped(params, config)
    if "virtual" in params:
        params = jax.jit(with_leading_keys, static_argnums=1)(params, config)
    blocks = params["blocks"]
    if not is_looped:
        stacks = stacks_of(blocks)
        counts = [len(jax.tree.leaves(stacked)[0]) for stacked in stacks]
        has_pattern = "0" in blocks  # of layers of several kinds, each with a stack of its own
        blocks = []
        for kind, index in layer_order(counts):
            prefix = ""
            if has_pattern:
                prefix = f"{kind}."
            blocks.append(_layer(stacks[kind], np.int32(index), config, prefix))
    return _others(params, config) | {"blocks": blocks}


@functools.partial(jax.jit, static_argnums=1)
def _others(params: Params, config: ModelConfig) -> Params:
    """All but the blocks, in the dtype of the products."""
    others = _cast({name: branch for name, branch in params.items() if name != "blocks"}, config)
    if not _has_turned_head(others, config):
        return others
    branch, name = matrix_path(config)
    return others | {branch: others[branch] | {name: Int8Head.of(others[branch][name])}}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _layer(stacked: Params, index: np.int32, config: ModelConfig, prefix: str) -> Params:
    """A layer of a stack, as the decode loop reads it. One program serves all layers: one for the
    whole stack takes three seconds to compile for 30 layers. `prefix` is that of the stack in the
    table of the blocks.

    The outputs of each matrix come before its inputs: on a CPU of arrays, elsewhere of NF4 weights.
    """
    layer = jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked
    )
    table = rows(specs(config)["blocks"])
    turned_kind: Any = NF4Weight
    if platform() == "cpu":
        turned_kind = jax.Array

    def turned(path: Any, leaf: Any) -> Any:
        spec = table.get(prefix + dotted(path))
        if spec is None or not isinstance(leaf, turned_kind):
            return leaf
        n = len(spec.inputs)
        # The first axis is "layers". A matrix whose inputs do not follow it stays as it is.
        if not n or spec.lookup or spec.axes[1 : n + 1] != spec.inputs:
            return leaf
        if isinstance(leaf, NF4Weight):
            return OutputMajorNF4.of(leaf, n)
        return OutputMajor(jnp.moveaxis(leaf, range(n), range(-n, 0)), n)

    layer = _cast(layer, config)
    if config.exact:
        # A turned matrix is multiplied by sums in another order.
        return layer
    return jax.tree.map_with_path(turned, layer, is_leaf=is_custom)  # type: ignore[no-any-return]


def _cast(params: Params, config: ModelConfig) -> Params:
    if config.exact:
        # `jf.forward` reads the scales of norms as they are.
        return params
    dtype = compute_dtype(config)
    return jax.tree.map(lambda w: w.astype(dtype), params, is_leaf=is_custom)  # type: ignore[no-any-return]
