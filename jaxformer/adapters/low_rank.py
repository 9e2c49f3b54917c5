"""A weight plus a product of two narrow matrices that learn: LoRA (arXiv:2106.09685), with DoRA's
magnitudes (arXiv:2402.09353) and PiSSA's initial values (arXiv:2404.02948).

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
    is_custom,
    lookup,
    normal,
    ones,
    zeros,
)
from jaxformer.arrays.sharding import Axes


@struct.dataclass
class LowRank:
    """weight + scale (a b), contracted without being made.

    With `start_a` and `start_b` it is weight + scale (a b - start_a start_b): a and b begin as
    these, the principal components of the weight. With `magnitude` the sum is divided by its norm
    over the inputs of each output, which gets no gradient, and multiplied by the magnitude.

    `weight` [*] is an array or a `CustomLeaf` (as a quantized weight), with inputs I... and outputs
    O... in any order; a [I..., R], b [R, O...] and magnitude [O...] learn; `scale` [] is a float32
    constant, as are start_a and start_b, the initial a and b. The weights of experts, [E, *], have
    a [E, I..., R], b [E, R, O...] and one scale. In a stack of layers each of them has their
    leading axis. `inputs` are the axes of the inputs, counted from the end, as -3. All layers of a
    stack, and all experts, have one rank: those of a smaller one are filled up with zeros, which
    get no gradient.

    With a `key` (uint32, see `keyed`) a fraction `dropout` of the numbers that `a` reads is zeroed,
    and the others are divided by 1 - dropout.
    """

    # Arrays, `Spec`s or bools; Any, because JAX makes this node with objects of its own in their
    # place.
    weight: Any
    a: Any
    b: Any
    scale: Any
    magnitude: Any = None
    start_a: Any = None
    start_b: Any = None
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

    @property
    def factors(self) -> tuple[jax.Array, jax.Array]:
        """Return the two matrices whose product is added to the weight: a and b, or of twice their
        rank where those with which they began are taken away."""
        if self.start_a is None:
            return self.a, self.b
        # That of R, behind the axes of layers and experts.
        axis = self.a.ndim - len(self.inputs) - 1
        a = jnp.concatenate([self.a, self.start_a], -1)
        return a, jnp.concatenate([self.b, -self.start_b], axis)

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
        a, b = self.factors
        factors = [(f"{experts}{into}R", a), (f"{experts}R{outputs}", b)]
        is_reversed = not set(into) <= set(left)
        if is_reversed:
            factors.reverse()
            if self.magnitude is not None:
                # The gain is of the outputs, which x has here.
                x = (x * self._gain(outputs, left)).astype(x.dtype)
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
        y = contract(equation, x, self.weight, to=to, dtype=dtype, groups=groups) + update
        if self.magnitude is not None and not is_reversed:
            y = (y * self._gain(outputs, out)).astype(y.dtype)
        return y

    def _gain(self, outputs: str, letters: str) -> jax.Array:
        """Return magnitude / |column| of each output, with the axes of an array of `letters`."""
        gain = self.magnitude / jax.lax.stop_gradient(self.norms())
        sizes = dict(zip(outputs, gain.shape, strict=True))
        in_order = gain.transpose([outputs.index(letter) for letter in letters if letter in sizes])
        return in_order.reshape([sizes.get(letter, 1) for letter in letters])

    def norms(self) -> jax.Array:
        """Return the norm over the inputs of each output of the adapted weight, [O...] float32."""
        # An array of the size of the weight, for the time of this sum.
        return jnp.sqrt(jnp.square(self._sum()).sum(self.inputs))

    def _sum(self) -> jax.Array:
        """Return the weight and what is added to it, in the dtype of the scale."""
        weight = self.weight.array() if is_custom(self.weight) else self.weight
        return weight.astype(self.scale.dtype) + self.product()

    def array(self) -> jax.Array:
        """Return the array that it stands for, in the dtype of its weight."""
        # Rounded once: in 16 bits most of a small product would be lost in the sum.
        merged = self._sum()
        if self.magnitude is not None:
            merged *= jnp.expand_dims(self.magnitude / self.norms(), self.inputs)
        return merged.astype(self.weight.dtype)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Look up as `params.lookup` does in the array that this stands for, without dropout, as in
        peft."""
        a, b = self.factors
        narrow = lookup(a, index, (*to[:-1], None)) * self.scale  # [..., R]
        free = "XYZUVW"[: index.ndim]
        update = contract(f"{free}R,RD->{free}D", narrow, b.astype(narrow.dtype), to=to)
        rows = lookup(self.weight, index, to)  # [..., D]
        return rows + update.astype(rows.dtype)

    def astype(self, dtype: Any) -> "LowRank":
        """Return the leaf whose products have another dtype. Scale and magnitudes stay float32, and
        a quantized weight its codes."""
        factors = {"a": self.a.astype(dtype), "b": self.b.astype(dtype)}
        if self.start_a is not None:
            factors["start_a"] = self.start_a.astype(dtype)
            factors["start_b"] = self.start_b.astype(dtype)
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
        return make(*self.factors, self.scale)


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
    *,
    dora: bool = False,
    pissa: bool = False,
) -> LowRank:
    """Return the rows of a `LowRank` over a row: its weight frozen (`weight`: the rows of the leaf
    that stands for it, as of a quantized one), with magnitudes (`dora`) and with the constants that
    it begins with (`pissa`), whose values `begun` gives.

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
    leaf = LowRank(frozen, a, b, scale_row, inputs=inputs, dropout=dropout)
    if dora:
        magnitude = Spec((*batch_shape, *output_shape), (*batch_axes, *output_axes), ones)
        leaf = replace(leaf, magnitude=magnitude)
    if pissa:
        start_a = replace(a, trainable=False)
        start_b = replace(b, trainable=False)
        leaf = replace(leaf, start_a=start_a, start_b=start_b)
    return leaf


def begun(leaf: LowRank) -> LowRank:
    """Return a new adapter with the initial values that come of its weight: a and b whose scaled
    product is the principal components of the weight, if it has `start_a`, and the norms of the
    weight as its magnitudes."""
    if leaf.start_a is not None:

        def principal(weight_and_scale: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weight, scale = weight_and_scale
            count = len(leaf.inputs)
            weight = jnp.moveaxis(weight, leaf.inputs, range(count))  # [I..., O...]
            inputs = weight.shape[:count]
            matrix = weight.reshape(math.prod(inputs), -1)  # [I, O]
            u, s, v = jnp.linalg.svd(matrix, full_matrices=False)  # [I, K], [K], [K, O]
            rank = leaf.a.shape[-1]
            root = jnp.sqrt(s[:rank] / scale)
            a = (u[:, :rank] * root).reshape(*inputs, rank)
            return a, (root[:, None] * v[:rank]).reshape(rank, *weight.shape[count:])

        weight = leaf.weight.array() if is_custom(leaf.weight) else leaf.weight
        read = weight.astype(jnp.float32), leaf.scale
        # One layer after another.
        a, b = principal(read) if leaf.layers is None else jax.lax.map(principal, read)
        # Buffers of their own, since a and b are donated to each step.
        leaf = replace(leaf, a=a, b=b, start_a=jnp.copy(a), start_b=jnp.copy(b))
    if leaf.magnitude is not None:
        leaf = replace(leaf, magnitude=leaf.norms())
    return leaf


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
