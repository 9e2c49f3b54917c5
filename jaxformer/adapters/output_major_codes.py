"""Quantized weights as a decode loop reads them: NF4 on a GPU or a TPU with the inputs last, and
the int8 codes of a head on a CPU with the inputs first.

The blocks of NF4 lie along the outputs. A sum over inputs that are not adjacent makes XLA for GPUs
copy the codes for every product, and XLA for TPUs make the array. With the inputs adjacent the
codes are read once, and nothing is made: 0.56 bytes a weight, where bfloat16 has 2. In the
comments, I is the number of inputs and O that of outputs.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.adapters.code_sums import (
    NF4_BYTES,
    Platforms,
    contracts_last,
    high_and_low,
    inputs_first,
    looked_up,
)
from jaxformer.adapters.quantized import BLOCK, NF4_VALUES, CodedWeight, Int8Weight, NF4Weight
from jaxformer.arrays.sharding import Axes, constrain, explicit_axes


@struct.dataclass
class OutputMajorNF4(CodedWeight):
    """The weight of an `NF4Weight` of axes [*inputs, *outputs], O a number of blocks: `codes` uint8
    [O / 64, 32, I] and `maxima` float32 [O / 64, I]. `size` is the shape of the weight, `dtype`
    that of the array that it stands for."""

    codes: Any
    maxima: Any
    size: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)
    read_on: ClassVar[Platforms] = ("gpu", "tpu")

    @classmethod
    def of(cls, leaf: NF4Weight, inputs: int) -> "OutputMajorNF4 | NF4Weight":
        """Return a weight of which the first `inputs` axes are contracted; itself where its outputs
        are no number of blocks, or are split over devices by an explicit axis."""
        count = math.prod(leaf.size[:inputs])
        if leaf.shape != leaf.size or math.prod(leaf.size[inputs:]) % BLOCK or explicit_axes():
            return leaf
        codes = leaf.codes.reshape(count, -1, BLOCK // 2)  # [I, O / 64, 32]
        maxima = leaf.maxima().reshape(count, -1)  # [I, O / 64]
        return cls(jnp.moveaxis(codes, 0, -1), maxima.T, leaf.size, leaf.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def array(self) -> jax.Array:
        """Return the array that it stands for, that of the `NF4Weight` bit for bit."""
        codes = jnp.moveaxis(self.codes, -1, 0).reshape(-1, BLOCK // 2)
        return NF4Weight(codes, self.maxima.T.ravel(), size=self.size, dtype=self.dtype).array()

    def sums(self, x: jax.Array) -> jax.Array:
        """Multiply x [R, I] by the array as a matrix [I, O], float32."""
        codes = high_and_low(self.codes[:, :, None], axis=2)  # [O / 64, 32, 2, I]
        values = looked_up(codes, NF4_VALUES)
        rows = x.astype(jnp.float32)
        scales = (self.maxima[:, None, None] * row for row in rows)  # R of [O / 64, 1, 1, I]
        return jnp.stack([(values * scale).sum(-1).ravel() for scale in scales])


@struct.dataclass
class Int8Head:
    """An int8 table [V, D] that a head multiplies on a CPU: `table`, whose rows are looked up, and
    its codes once more as [D, V'] with V' >= V a number that `reads_codes` takes, filled up with
    zeros. A sum over inputs that are adjacent would not be vectorized."""

    table: Int8Weight
    turned: Int8Weight
    trainable: ClassVar[bool] = False

    @classmethod
    def of(cls, table: Int8Weight) -> "Int8Head":
        turned = table.turned()
        filling = [(0, 0), (0, -table.shape[0] % (2 * NF4_BYTES))]
        codes = jnp.pad(turned.codes, filling)
        scale = jnp.pad(turned.scale, filling)
        return cls(table, replace(turned, codes=codes, scale=scale))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape

    @property
    def ndim(self) -> int:
        return 2

    def contract(self, equation: str, x: jax.Array, *, to: Axes | None, **how: Any) -> jax.Array:
        if not contracts_last(equation):
            return self.table.contract(equation, x, to=to, **how)
        y = self.turned.contract(inputs_first(equation), x, to=None, **how)
        y = y[..., : self.shape[0]]
        return constrain(y, to)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        return self.table.lookup(index, to)

    def astype(self, dtype: Any) -> "Int8Head":
        """Return the same codes, which then stand for an array of this dtype."""
        return Int8Head(self.table.astype(dtype), self.turned.astype(dtype))
