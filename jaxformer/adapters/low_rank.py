"""A weight plus a product of two narrow matrices that learn: LoRA (arXiv:2106.09685)."""

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.arrays.params import CustomLeaf, Spec, contract, lookup, zeros
from jaxformer.arrays.sharding import Axes


@struct.dataclass
class LowRank:
    """weight + scale (a b), contracted without being made.

    `weight` [*] is an array or a `CustomLeaf` (as a quantized weight), with inputs I... and outputs
    O... in any order; a [I..., R] and b [R, O...] learn; `scale` [] is a float32 constant. In a
    stack of layers each part has their leading axis. `inputs` are the axes of the inputs, counted
    from the end, as -3. All layers of a stack have one rank: in a layer of a smaller one the rest
    is zeros, which get no gradient.

    Where `key` (uint32, see `keyed`) is given, a fraction `dropout` of the numbers that `a` reads
    is zeroed, and the rest divided by 1 - dropout.
    """

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
        """The length of the leading axis of a stack; None outside of one."""
        return self.a.shape[0] if self.a.ndim > len(self.inputs) + 1 else None

    def contract(self, equation: str, x: jax.Array, *, to: Axes | None, dtype: Any) -> jax.Array:
        """As `params.contract` of the array that it stands for."""
        left, right, out = re.split(",|->", equation)
        into = "".join(right[axis] for axis in self.inputs)
        rest = "".join(letter for letter in right if letter not in into)
        free = "".join(letter for letter in left if letter not in right)
        # Over inputs x is multiplied by a first; over outputs (a tied output layer) by b.
        steps = [(f"{into}R", self.a), (f"R{rest}", self.b)]
        (inner, first), (outer, second) = steps if set(into) <= set(left) else steps[::-1]
        place = (*to[: len(free)], None) if to else None
        narrow = contract(f"{left},{inner}->{free}R", self._dropped(x), first, to=place)
        scaled = (narrow * self.scale).astype(narrow.dtype)
        more = contract(f"{free}R,{outer}->{out}", scaled, second, to=to, dtype=dtype)
        return contract(equation, x, self.weight, to=to, dtype=dtype) + more

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """As `params.lookup` of the array that it stands for: dropout is none here, as in peft."""
        narrow = lookup(self.a, index, (*to[:-1], None)) * self.scale
        free = "XYZUVW"[: index.ndim]
        more = contract(f"{free}R,RD->{free}D", narrow, self.b.astype(narrow.dtype), to=to)
        found = lookup(self.weight, index, to)
        return found + more.astype(found.dtype)

    def astype(self, dtype: Any) -> "LowRank":
        narrow = {"a": self.a.astype(dtype), "b": self.b.astype(dtype)}
        return replace(self, weight=self.weight.astype(dtype), **narrow)

    def product(self) -> jax.Array:
        """scale (a b), with the axes of the weight, in float32."""

        def of_one(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
            wide = scale * jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1)
            return jnp.moveaxis(wide, range(len(self.inputs)), self.inputs)

        make = of_one if self.layers is None else jax.vmap(of_one)
        return make(self.a, self.b, self.scale)

    def _dropped(self, x: jax.Array) -> jax.Array:
        if self.key is None or self.dropout == 0:
            return x
        kept = jax.random.bernoulli(jax.random.wrap_key_data(self.key), 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0).astype(x.dtype)


def low_rank(
    spec: Spec, rank: int, scale: float, dropout: float = 0.0, weight: CustomLeaf | None = None
) -> LowRank:
    """The rows of a `LowRank` over a row: its weight frozen (`weight`: the rows of the leaf that
    stands for it, as of a quantized one).

    As in peft, `a` starts uniform within 1/sqrt(inputs) of zero and `b` at zero; for a table whose
    rows are looked up `a` starts at zero and `b` normal.
    """
    count = len(spec.axes)
    inputs = tuple(at - count for at, axis in enumerate(spec.axes) if axis in spec.inputs)
    outputs = tuple(at - count for at, axis in enumerate(spec.axes) if axis not in spec.inputs)

    def part(at: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return tuple(spec.shape[i] for i in at), tuple(spec.axes[i] for i in at)

    (before, into), (after, out) = part(inputs), part(outputs)
    start_a, start_b = (zeros, normal_one) if spec.lookup else (kaiming_uniform, zeros)
    a = Spec((*before, rank), (*into, "rank"), start_a, inputs=into, lookup=spec.lookup)
    b = Spec((rank, *after), ("rank", *out), start_b, inputs=("rank",))
    a, b = (replace(row, reads=spec.reads) for row in (a, b))
    factor = Spec((), (), lambda _, row: jnp.full(row.shape, scale), trainable=False)
    frozen: Any = replace(spec, trainable=False) if weight is None else weight
    return LowRank(frozen, a, b, factor, inputs=inputs, dropout=dropout)


def kaiming_uniform(key: jax.Array, spec: Spec) -> jax.Array:
    """Uniform within 1/sqrt(inputs) of zero: kaiming_uniform(a=sqrt(5)) of PyTorch."""
    bound = 1 / math.sqrt(spec.fan_in)
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)


def normal_one(key: jax.Array, spec: Spec) -> jax.Array:
    return jax.random.normal(key, spec.shape)
