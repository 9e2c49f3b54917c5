"""A leaf that is no array, as somebody would write it: a weight plus a low-rank product."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.arrays.params import Spec, contract, is_custom, lookup
from jaxformer.layers.linear import fan_in_normal

RANK = 2


@struct.dataclass
class LowRank:
    """weight + a b, contracted without being made: weight [I..., O...], a [I..., R], b [R,
    O...]."""

    weight: Any
    a: Any
    b: Any

    @property
    def shape(self):
        return tuple(self.weight.shape)

    def contract(self, equation, x, *, to, dtype):
        left, right, out = re.split(",|->", equation)
        first, rest = right[: self.a.ndim - 1], right[self.a.ndim - 1 :]
        free = "".join(letter for letter in left if letter not in right)
        steps = [(f"{first}R", self.a), (f"R{rest}", self.b)]
        (inner, before), (outer, after) = steps if set(first) <= set(left) else steps[::-1]
        place = (*to[: len(free)], None) if to else None
        narrow = contract(f"{left},{inner}->{free}R", x, before, to=place)
        more = contract(f"{free}R,{outer}->{out}", narrow, after, to=to, dtype=dtype)
        return contract(equation, x, self.weight, to=to, dtype=dtype) + more

    def lookup(self, index, to):
        narrow = lookup(self.a, index, (*to[:-1], None))
        free = "XYZ"[: index.ndim]
        return lookup(self.weight, index, to) + contract(
            f"{free}R,RD->{free}D", narrow, self.b, to=to
        )

    def astype(self, dtype):
        return jax.tree.map(lambda part: part.astype(dtype), self)

    def array(self):
        """The array that it stands for."""
        product = lambda a, b: jnp.tensordot(a, b, 1)  # noqa: E731
        stacked = self.a.ndim + self.b.ndim - 2 > self.weight.ndim
        return self.weight + (jax.vmap(product) if stacked else product)(self.a, self.b)


def low_rank(spec: Spec) -> Any:
    """The weight frozen, and two narrow matrices that learn; what is no matrix stays as it is."""
    if not spec.is_matrix:
        return spec
    n = max(sum(axis in spec.inputs for axis in spec.axes[:-1]), 1)
    a = Spec((*spec.shape[:n], RANK), (*spec.axes[:n], "rank"), fan_in_normal, inputs=spec.axes[:n])
    b = Spec((RANK, *spec.shape[n:]), ("rank", *spec.axes[n:]), fan_in_normal, inputs=("rank",))
    return LowRank(replace(spec, trainable=False), a, b)


def made(params):
    """The params with an array in the place of every leaf that is none."""
    return jax.tree.map(
        lambda leaf: leaf.array() if is_custom(leaf) else leaf, params, is_leaf=is_custom
    )
