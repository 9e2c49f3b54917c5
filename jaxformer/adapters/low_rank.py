"""A weight plus a product of two narrow matrices that learn: LoRA (arXiv:2106.09685).

In the comments, I are the axes of the inputs of a weight and O those of its outputs, R is the rank,
L the number of layers of a stack and E that of experts.
"""

import math
import re
import zlib
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.arrays.params import (
    CustomLeaf,
    Params,
    RowGroups,
    Spec,
    contract,
    dotted,
    lookup,
    normal,
    zeros,
)
from jaxformer.arrays.sharding import Axes


@struct.dataclass
class LowRank:
    """weight + scale (a b), contracted without being made.

    `weight` [*] is an array or a `CustomLeaf` (as a quantized weight), with inputs I... and outputs
    O... in any order; a [I..., R] and b [R, O...] learn; `scale` [] is a float32 constant. The
    weights of experts, [E, *], have a [E, I..., R], b [E, R, O...] and one scale. In a stack of
    layers each of them has their leading axis. `inputs` are the axes of the inputs, counted from
    the end, as -3. All layers of a stack, and all experts, have one rank: those of a smaller one
    are filled up with zeros, which get no gradient.

    With a `key` (uint32, see `keyed`) a fraction `dropout` of the numbers that `a` reads is zeroed,
    and the others are divided by 1 - dropout.
    """

    # Arrays, `Spec`s or bools; Any, because JAX makes this node with objects of its own in their
    # place.
    weight: Any
    a: Any
    b: Any
    scale: Any
    key: Any = None
    inputs: tuple[int, ...] = struct.field(pytree_node=False, default=(-2,))
    dropout: float = struct.field(pytree_node=False, default=0.0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> Any:
        return self.b.dtype

    @property
    def layers(self) -> int | None:
        """Return the length of the leading axis of a stack; None outside of one."""
        return self.scale.shape[0] if self.scale.ndim else None

    def contract(
        self,
        equation: str,
        x: jax.Array,
        *,
        to: Axes | None,
        dtype: Any,
        groups: RowGroups | None = None,
    ) -> jax.Array:
        """Contract as `params.contract` does the array that this stands for.

        x is multiplied by one factor and the result by the other: R (I + O) multiplications a
        token, and no array, nor a gradient, of the size of the weight.
        """
        left, right, out = re.split(",|->", equation)  # "BTD,DNH->BTNH": "BTD", "DNH", "BTNH"
        into = "".join(right[axis] for axis in self.inputs)  # "D"
        experts = right[: self.a.ndim - len(into) - 1]  # "", and "E" of "MD,EDF->MF"
        outputs = "".join(letter for letter in right if letter not in experts + into)  # "NH"
        free = "".join(letter for letter in left if letter in out)  # "BT"
        # Over inputs x is multiplied by a first; over outputs (a tied output layer) by b.
        factors = [(f"{experts}{into}R", self.a), (f"{experts}R{outputs}", self.b)]
        if not set(into) <= set(left):
            factors.reverse()
        (first_axes, first), (second_axes, second) = factors
        narrow_to = (*to[: len(free)], None) if to else None  # R is not split
        narrow_equation = f"{left},{first_axes}->{free}R"
        read = x
        if self.key is not None and self.dropout:
            key = jax.random.wrap_key_data(self.key)
            keep = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
            read = jnp.where(keep, x / (1 - self.dropout), 0).astype(x.dtype)
        narrow = contract(narrow_equation, read, first, to=narrow_to, groups=groups)
        scaled = (narrow * self.scale).astype(narrow.dtype)
        update_equation = f"{free}R,{second_axes}->{out}"
        update = contract(update_equation, scaled, second, to=to, dtype=dtype, groups=groups)
        return contract(equation, x, self.weight, to=to, dtype=dtype, groups=groups) + update

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Look up as `params.lookup` does in the array that this stands for, without dropout, as in
        peft."""
        narrow = lookup(self.a, index, (*to[:-1], None)) * self.scale  # [..., R]
        free = "XYZUVW"[: index.ndim]
        update = contract(f"{free}R,RD->{free}D", narrow, self.b.astype(narrow.dtype), to=to)
        rows = lookup(self.weight, index, to)  # [..., D]
        return rows + update.astype(rows.dtype)

    def astype(self, dtype: Any) -> "LowRank":
        """Return the leaf whose products have another dtype. The scale stays float32, and a
        quantized weight its codes."""
        factors = {"a": self.a.astype(dtype), "b": self.b.astype(dtype)}
        return replace(self, weight=self.weight.astype(dtype), **factors)

    def product(self) -> jax.Array:
        """Return scale (a b), with the axes of the weight, in float32."""

        def of_matrix(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
            a = a.astype(jnp.float32)
            b = b.astype(jnp.float32)
            inputs_first = scale * jnp.tensordot(a, b, 1)  # [I..., O...]
            return jnp.moveaxis(inputs_first, range(len(self.inputs)), self.inputs)

        make = of_matrix
        for _ in range(self.a.ndim - len(self.inputs) - 1 - self.scale.ndim):
            make = jax.vmap(make, in_axes=(0, 0, None))
        if self.layers is not None:
            make = jax.vmap(make)
        return make(self.a, self.b, self.scale)


def is_adapted(node: Any) -> TypeGuard[LowRank]:
    """Return whether a node of the params or of the table is a `LowRank`."""
    return isinstance(node, LowRank)


def keyed(params: Params, key: jax.Array | None) -> Params:
    """Return `params` whose adapters drop out what they read, for one evaluation of a loss; the
    randomness of an adapter depends on the key and its path alone. `params` themselves without a
    key.

    The loss of `jf.loss_of` does this; a loss of your own calls it first: `params =
    jf.keyed(params, key)`.
    """
    if key is None:
        return params

    def with_key(path: Any, node: Any) -> Any:
        if not is_adapted(node) or node.dropout == 0:
            return node
        # The checksum of the path tells the adapters apart; a stack has a key for each layer, [L].
        leaf_key = jax.random.fold_in(key, zlib.crc32(dotted(path).encode()))
        keys = leaf_key if node.layers is None else jax.random.split(leaf_key, node.layers)
        return replace(node, key=jax.random.key_data(keys))

    params = jax.tree.map_with_path(with_key, params, is_leaf=is_adapted)
    return params


def low_rank(
    spec: Spec,
    rank: int,
    scale: float,
    dropout: float = 0.0,
    weight: CustomLeaf | Spec | None = None,
) -> LowRank:
    """Return the rows of a `LowRank` over a row: its weight frozen (`weight`: the rows of the leaf
    that stands for it, as of a quantized one).

    As in peft, `a` starts uniform within 1/sqrt(inputs) of zero and `b` at zero; for a table whose
    rows are looked up `a` starts at zero and `b` normal. Either way a b starts at zero. Each weight
    of `Spec.batch`, as each expert, has factors of its own; the row has no axis of layers yet.
    """
    count = len(spec.axes)
    # Counted from the end, because a stack puts its axis of layers in front.
    inputs = tuple(i - count for i, axis in enumerate(spec.axes) if axis in spec.inputs)
    batch = tuple(i - count for i, axis in enumerate(spec.axes) if axis in spec.batch)
    outputs = tuple(i for i in range(-count, 0) if i not in inputs + batch)

    def shape_and_axes(indices: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return tuple(spec.shape[i] for i in indices), tuple(spec.axes[i] for i in indices)

    a_shape, a_axes = shape_and_axes(batch + inputs)
    batch_shape, batch_axes = shape_and_axes(batch)
    output_shape, output_axes = shape_and_axes(outputs)
    init_a, init_b = (zeros, normal(1.0)) if spec.lookup else (kaiming_uniform, zeros)
    a = Spec((*a_shape, rank), (*a_axes, "rank"), init_a, inputs=spec.inputs, lookup=spec.lookup)
    b_shape = (*batch_shape, rank, *output_shape)
    b_axes = (*batch_axes, "rank", *output_axes)
    b = Spec(b_shape, b_axes, init_b, inputs=("rank",))
    a, b = (replace(row, reads=spec.reads, active=spec.active) for row in (a, b))
    scale_row = Spec((), (), lambda _, row: jnp.full(row.shape, scale), trainable=False)
    frozen = replace(spec, trainable=False) if weight is None else weight
    return LowRank(frozen, a, b, scale_row, inputs=inputs, dropout=dropout)


def learned_rows(spec: Spec, tokens: range) -> LowRank:
    """Return the rows of a `LowRank` over a table of tokens, or an output layer, of which the rows
    of `tokens` alone learn: the factor with the axis "vocab" is a constant that has a 1 for each of
    them, and the other is what is added to their rows, at first 0."""
    leaf = low_rank(spec, len(tokens), 1.0)

    def one_for_each(_: jax.Array, row: Spec) -> jax.Array:
        chosen = jnp.eye(spec.shape[spec.axes.index("vocab")], len(tokens), -tokens.start)
        return chosen if row.axes[0] == "vocab" else chosen.T

    factors = {}
    for name, row in (("a", leaf.a), ("b", leaf.b)):
        is_constant = "vocab" in row.axes
        init = one_for_each if is_constant else zeros
        factors[name] = replace(row, init=init, trainable=not is_constant)
    return replace(leaf, **factors)


def kaiming_uniform(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw uniformly within 1/sqrt(inputs) of zero: kaiming_uniform(a=sqrt(5)) of PyTorch."""
    bound = 1 / math.sqrt(spec.fan_in)
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)
