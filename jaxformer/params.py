"""One table of parameters: a `Spec` a leaf, from which everything else about parameters is derived.

A layer states its leaves once, as a nested dict of `Spec`. Initial values, abstract shapes, shardings, counts, FLOPs and
the weight-decay mask are tree maps over that table. A linear weight names the axes it contracts (`inputs`); fan-in and
fan-out follow from the names, so stacking layers or splitting heads changes no number.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ConfigError
from jaxformer.sharding import Axes, activation, constrain, explicit_axes, gathered

Params = dict[str, Any]
Specs = dict[str, Any]
Initializer = Callable[[jax.Array, "Spec"], jax.Array]


@dataclass(frozen=True)
class Spec:
    """One leaf: its shape, the name of each axis, how it starts, and for a matrix the axes it contracts."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer
    inputs: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        return bool(self.inputs)

    @property
    def fan_in(self) -> int:
        return math.prod(n for n, axis in zip(self.shape, self.axes, strict=True) if axis in self.inputs)

    @property
    def fan_out(self) -> int:
        return math.prod(n for n, axis in zip(self.shape, self.axes, strict=True) if axis not in (*self.inputs, "layers"))


def zeros(key: jax.Array, spec: Spec) -> jax.Array:
    return jnp.zeros(spec.shape)


def ones(key: jax.Array, spec: Spec) -> jax.Array:
    return jnp.ones(spec.shape)


def normal(std: float) -> Initializer:
    return lambda key, spec: std * jax.random.normal(key, spec.shape)


def truncated_normal(key: jax.Array, spec: Spec) -> jax.Array:
    """N(0, 2 / (fan_in + fan_out)) cut at three sigma (Glorot and Bengio 2010, for linear layers)."""
    std = math.sqrt(2 / (spec.fan_in + spec.fan_out))
    return std * jax.random.truncated_normal(key, -3, 3, spec.shape)


def fan_in_normal(key: jax.Array, spec: Spec) -> jax.Array:
    return jax.random.normal(key, spec.shape) / math.sqrt(spec.fan_in)


def xavier_uniform(key: jax.Array, spec: Spec) -> jax.Array:
    """Uniform within sqrt(6 / (fan_in + fan_out)) of zero (Glorot and Bengio 2010)."""
    bound = math.sqrt(6 / (spec.fan_in + spec.fan_out))
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)


def scaled(init: Initializer, factor: float) -> Initializer:
    return lambda key, spec: factor * init(key, spec)


def unit_truncated_normal(key: jax.Array, spec: Spec) -> jax.Array:
    return jax.random.truncated_normal(key, -3, 3, spec.shape)


def stack(specs: Specs, n: int) -> Specs:
    """The table of `n` equal layers: every leaf gets a leading "layers" axis."""
    return map_specs(lambda _, spec: replace(spec, shape=(n, *spec.shape), axes=("layers", *spec.axes)), specs)


def unstack(params: Params, n: int) -> list[Params]:
    """The params of each of `n` stacked layers.

    By `lax.split`, whose transpose is one concatenation; the transpose of indexing would pad and add `n` whole stacks.
    """
    leaves, treedef = jax.tree.flatten(params)
    split = [[piece[0] for piece in jax.lax.split(leaf, (1,) * n, axis=0)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, [pieces[i] for pieces in split]) for i in range(n)]


def map_specs(f: Callable[[str, Spec], Any], specs: Specs) -> dict[str, Any]:
    """`f(dotted path, spec)` of every row of the table, in its nesting."""
    named = jax.tree.map_with_path(
        lambda path, spec: f(jax.tree_util.keystr(path, simple=True, separator="."), spec), specs, is_leaf=_is_spec
    )
    return named  # type: ignore[no-any-return]


def rows(specs: Specs) -> dict[str, Spec]:
    """The table flat: dotted path to spec."""
    return dict(_flat(specs, ""))


def _flat(specs: Specs, prefix: str) -> list[tuple[str, Spec]]:
    return [
        row
        for name, entry in specs.items()
        for row in ([(prefix + name, entry)] if _is_spec(entry) else _flat(entry, f"{prefix}{name}."))
    ]


def _is_spec(entry: Any) -> bool:
    return isinstance(entry, Spec)


def init_params(specs: Specs, key: jax.Array) -> Params:
    """Initial values, float32. A leaf's randomness depends on the key and the leaf's path alone."""
    return map_specs(lambda path, spec: spec.init(jax.random.fold_in(key, zlib.crc32(path.encode())), spec), specs)


def abstract(specs: Specs) -> Params:
    """The params as `jax.ShapeDtypeStruct` leaves."""
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)


def count(specs: Specs) -> int:
    return sum(math.prod(spec.shape) for spec in rows(specs).values())


def check_params(specs: Specs, params: Any) -> None:
    """ConfigError naming every leaf that is missing, extra or of another shape."""
    expected = {path: spec.shape for path, spec in rows(specs).items()}
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    problems = [f"{path}: missing, expected {shape}" for path, shape in expected.items() if path not in found]
    problems += [f"{path}: {shape} is not in this model" for path, shape in found.items() if path not in expected]
    problems += [f"{p}: {found[p]} instead of {s}" for p, s in expected.items() if p in found and found[p] != s]
    if problems:
        raise ConfigError("the parameters do not fit the config:\n  " + "\n  ".join(problems))


def contract(equation: str, x: jax.Array, w: Any, *, to: Axes | None = None, dtype: Any = None) -> jax.Array:
    """`einsum(equation, x, w)` of an activation and a weight, e.g. "BTD,DNH->BTNH", in x's dtype.

    The equation lists x's free axes first, then those it shares with w; w lists the shared axes first, or last. `to` names
    the axes of the result where its placement has to be said; `dtype` is that of the result (default: x's). Products run
    on flattened rows: a CPU transposes less in the backward pass. A weight that is no array contracts itself.
    """
    if hasattr(w, "contract"):
        return w.contract(equation, x, to=to, dtype=dtype)  # type: ignore[no-any-return]
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    w = w.astype(x.dtype)
    if explicit_axes():
        sizes = dict(zip(left + right, (*x.shape, *w.shape), strict=True))
        place = activation([sizes[letter] for letter in out], to) if to else None
        return jnp.einsum(equation, x, gathered(w), preferred_element_type=dtype, out_sharding=place)
    shared = sum(letter in right for letter in left)
    inner = math.prod(x.shape[x.ndim - shared :])
    free = x.shape[: x.ndim - shared]
    transposed = right[0] not in left
    columns = w.shape[: w.ndim - shared] if transposed else w.shape[shared:]
    matrix = w.reshape(-1, inner) if transposed else w.reshape(inner, -1)
    y = jax.lax.dot_general(
        x.reshape(-1, inner), matrix, (((1,), (int(transposed),)), ((), ())), preferred_element_type=dtype
    ).reshape(*free, *columns)
    return constrain(y, to) if to else y


def lookup(table: jax.Array, index: Any, to: Axes) -> jax.Array:
    """Rows of a table [V, W] by an int index [...]: [..., W], the names of its axes in `to`. The rows are gathered first."""
    if explicit_axes():
        return gathered(table).at[index].get(out_sharding=activation((*index.shape, table.shape[-1]), to))
    return constrain(constrain(table, (None, to[-1]))[index], to)
