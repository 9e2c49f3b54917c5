"""Quantized weights as leaves: int8 with a scale per output channel, and 4-bit NormalFloat (NF4,
arXiv:2305.14314) in blocks of 64, with the codes of bitsandbytes.

A leaf holds codes and scales, and makes the array that they stand for where it is used: products
are those of that array, bit for bit, but for few rows on a CPU (`code_sums.py`). Neither codes nor
scales learn. Of the weights of experts the arrays of all experts of a layer are made, also of those
to which no token is sent.

A data type of few bits is a table of ascending values in [-1, 1]. A number is divided by the
largest absolute value of its block, and its code is the index of the nearest value. In the
comments, B is the number of blocks of a weight, C that of the blocks of their maxima, and n the
numbers of a block.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxformer.adapters.code_sums import (
    Platforms,
    contracts_last,
    high_and_low,
    inputs_first,
    int8_sums,
    leading_inputs,
    looked_up,
    nf4_sums,
    reads_codes,
)
from jaxformer.arrays.params import RowGroups, Spec, contract, lookup, zeros
from jaxformer.arrays.sharding import Axes, constrain, explicit_axes, gathered, platform
from jaxformer.config.adapter import Quantization
from jaxformer.config.settings import Table

BLOCK = 64  # weights that share an absolute maximum
NESTED_BLOCK = 256  # absolute maxima that share one, with double quantization

TreeT = TypeVar("TreeT")

TINY = 1e-38  # in place of the absolute maximum of a block of zeros
# The 16 values of NF4 (appendix E of the paper).
NF4_VALUES = np.ravel(
    np.array(
        [
            [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
            [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
            [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
            [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
        ],
        np.float32,
    )
)


def _dynamic_values() -> np.ndarray:
    """Return the 256 values of the signed dynamic data type, ascending (arXiv:2110.02861): 0, 1,
    and +-10^e times the centers of 2^(e + 6) equal intervals of [0.1, 1], for e = -6 .. 0.

    The edges of the intervals are float32 steps from the nearer end of [0.1, 1], each rounded once:
    then the values are those of bitsandbytes to the last bit.
    """
    low = np.float32(0.1)
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        count = 2 ** (exponent + 6)
        numbers = np.arange(count + 1)
        step = np.float64((1 - low) / np.float32(count))
        from_low = low + numbers * step
        from_one = 1 - (count - numbers) * step
        edges = np.where(numbers <= count // 2, from_low, from_one).astype(np.float32)
        centers = np.float32(10.0**exponent) * ((edges[1:] + edges[:-1]) / np.float32(2))
        values += [*centers, *-centers]
    return np.sort(np.array(values, np.float32))


DYNAMIC_VALUES = _dynamic_values()


def nearest(x: jax.Array, values: np.ndarray) -> jax.Array:
    """Return the index, uint8, of the nearest of ascending values; between two the lower one."""
    middles = jnp.asarray((values[:-1] + values[1:]) / 2)
    # There are 15 or 255 middles; for so short an array JAX advises to compare with all of it.
    return jnp.searchsorted(middles, x, side="left", method="compare_all").astype(jnp.uint8)


def in_blocks(flat: jax.Array, size: int) -> jax.Array:
    """Map [..., m] -> [..., B, size], filled up with zeros."""
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % size)]
    return jnp.pad(flat, padding).reshape(*flat.shape[:-1], -1, size)


def scaled_codes(blocks: jax.Array, values: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return the codes [..., B, n] of blocks [..., B, n] divided by their absolute maxima, and
    these maxima [..., B]."""
    absmax = jnp.abs(blocks).max(-1)
    # Multiplied by a reciprocal, as in bitsandbytes: a division may give other codes.
    inverse = 1 / jnp.maximum(absmax, TINY)
    return nearest(blocks * inverse[..., None], values), absmax


class CodedWeight:
    """A `CustomLeaf` of codes and scales: each kind has arrays, `shape`, and `dtype`, that
    of the array that it stands for."""

    dtype: str
    trainable: ClassVar[bool] = False
    read_on: ClassVar[Platforms]  # where products of few rows are made by `sums`

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def array(self) -> jax.Array:
        """Return the array that it stands for, in its dtype; codes and scales get no gradient
        through it."""
        raise NotImplementedError

    def sums(self, x: jax.Array) -> jax.Array:
        """Multiply x [R, I] by the array as a matrix [I, O], from its codes, where
        `reads_codes`."""
        raise NotImplementedError

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Look up as `params.lookup` does in the array."""
        return lookup(self.array(), index, to)

    def astype(self, dtype: Any) -> Self:
        """Return the same codes, which then stand for an array of this dtype."""
        return replace(self, dtype=str(jnp.dtype(dtype)))  # type: ignore[type-var]

    def contract(
        self,
        equation: str,
        x: jax.Array,
        *,
        to: Axes | None,
        dtype: Any,
        groups: RowGroups | None = None,
    ) -> jax.Array:
        """Contract as `params.contract` does the array, which is made again for the backward pass,
        once x is there: the arrays of all layers are never in memory at once, nor is one made
        before a loop over tokens. Few rows are multiplied from the codes where they are `read_on`
        the platform (`code_sums.py`).

        A CPU makes it once for both passes unless layers are scanned, since XLA drops the barrier
        there before it would matter.
        """
        inputs = leading_inputs(equation)
        if groups is None and reads_codes(x, self.shape, self.dtype, inputs, self.read_on):
            sums = _from_codes(x.reshape(-1, math.prod(self.shape[:inputs])), self)
            y = sums.reshape(*x.shape[: x.ndim - inputs], *self.shape[inputs:])
            y = y.astype(dtype or x.dtype)
            return constrain(y, to)

        @jax.checkpoint
        def product(x: jax.Array, leaf: CodedWeight) -> jax.Array:
            # The barrier ties the leaf to x. Without it XLA could make the arrays of all layers
            # first.
            x, leaf = jax.lax.optimization_barrier((x, leaf))
            return contract(equation, x, leaf.array(), to=to, dtype=dtype, groups=groups)

        return product(x, self)


@struct.dataclass
class Int8Weight(CodedWeight):
    """codes * scale: `codes` int8 with the axes of the weight, `scale` float32 with one number for
    each output channel (for each row of a table that is looked up) and 1 for the other axes.

    `dtype` is that of the array that it stands for.
    """

    # Arrays or `Spec`s; Any, because JAX makes this node with objects of its own in their place.
    codes: Any
    scale: Any
    dtype: str = struct.field(pytree_node=False, default="float32")
    read_on: ClassVar[Platforms] = ("cpu", "gpu")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def array(self) -> jax.Array:
        leaf = gathered(self)
        return _scaled(leaf.codes, leaf.scale, 127).astype(self.dtype)

    def contract(self, equation: str, x: jax.Array, **how: Any) -> jax.Array:
        if platform() == "gpu" and contracts_last(equation):
            # A head [V, D]: the sums read its codes as they are, since XLA fuses the transposition.
            return self.turned().contract(inputs_first(equation), x, **how)
        return super().contract(equation, x, **how)

    def turned(self) -> "Int8Weight":
        """Return the transposed matrix of a matrix [O, I]."""
        return replace(self, codes=self.codes.T, scale=self.scale.T)

    def sums(self, x: jax.Array) -> jax.Array:
        return int8_sums(x, self.codes, self.scale)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Return rows of the array; only these are made."""
        codes = lookup(self.codes, index, to)  # [..., W]
        # A scale that a whole row shares has one column, [V, 1], which is not split.
        width = to[-1] if self.scale.shape[-1] > 1 else None
        scale = lookup(self.scale, index, (*to[:-1], width))
        return _scaled(codes, scale, 127).astype(self.dtype)


@struct.dataclass
class NF4Weight(CodedWeight):
    """Values of NF4 times the absolute maximum of their block, each block 64 weights of the
    flattened weight (of one layer in a stack, and of one expert); the last is filled up with zeros.

    `codes` uint8 [..., B, 32]: two codes of 4 bits each, the first in the high bits. `absmax` [...,
    B] is float32, or with double quantization uint8: then each stands for a value of the dynamic
    data type, times the number in `nested` [..., C] of its 256 blocks, plus the `mean` [...].
    `size` is the shape of the weight (without the axes of layers and of experts), `dtype` that of
    the array that it stands for.
    """

    # Arrays or `Spec`s; Any, because JAX makes this node with objects of its own in their place.
    codes: Any
    absmax: Any
    nested: Any = None
    mean: Any = None
    size: tuple[int, ...] = struct.field(pytree_node=False, default=())
    dtype: str = struct.field(pytree_node=False, default="float32")
    read_on: ClassVar[Platforms] = ("cpu",)  # elsewhere `OutputMajorNF4` takes its place

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-2], *self.size)

    def array(self) -> jax.Array:
        leaf = _replicated(self)
        values = _scaled(_nf4_values(leaf.codes), leaf.maxima()[..., None])  # [..., B, 64]
        flat = values.reshape(*values.shape[:-2], -1)[..., : math.prod(self.size)]
        return flat.reshape(self.shape).astype(self.dtype)

    def maxima(self) -> jax.Array:
        """Return the absolute maximum of each block, float32 [..., B]."""
        if self.nested is None:
            return self.absmax  # type: ignore[no-any-return]
        values = jnp.asarray(DYNAMIC_VALUES)[self.absmax]  # [..., B]
        # Every maximum gets the maximum of its block, [..., C] -> [..., B]; the last block may be
        # shorter.
        scale = jnp.repeat(self.nested, NESTED_BLOCK, -1)[..., : self.absmax.shape[-1]]
        return _scaled(values, scale) + self.mean[..., None]

    def sums(self, x: jax.Array) -> jax.Array:
        return nf4_sums(x, self.codes, self.maxima(), NF4_VALUES)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Return rows of the array; only these are made where each is a number of blocks."""
        width = self.size[-1]
        if width % BLOCK or explicit_axes():
            return super().lookup(index, to)
        # The axis of the width is not split: a row's codes are fewer than its numbers.
        unsplit = (*to[:-1], None)
        codes = lookup(self.codes.reshape(-1, width // 2), index, unsplit)  # [..., W / 2]
        maxima = lookup(self.maxima().reshape(-1, width // BLOCK), index, unsplit)  # [..., W / 64]
        blocks = _nf4_values(codes.reshape(*maxima.shape, BLOCK // 2))  # [..., W / 64, 64]
        rows = _scaled(blocks, maxima[..., None]).astype(self.dtype)
        return constrain(rows.reshape(*rows.shape[:-2], width), to)


@jax.custom_jvp
def _from_codes(x: jax.Array, leaf: CodedWeight) -> jax.Array:
    return leaf.sums(x)


@_from_codes.defjvp
def _from_codes_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Return the derivative by x, a product with the array, made again for the backward pass; by
    the codes there is none."""
    x, leaf = primals

    @jax.checkpoint
    def product(x: jax.Array, leaf: CodedWeight) -> jax.Array:
        return (x @ leaf.array().reshape(x.shape[1], -1)).astype(jnp.float32)

    return _from_codes(x, leaf), product(tangents[0], leaf)


def _replicated(tree: TreeT) -> TreeT:
    """Return a tree whose arrays every device has in full where axes are explicit, since an axis
    that is split cannot be reshaped there; automatic axes can."""
    if not explicit_axes():
        return tree
    return jax.tree.map(lambda array: jax.sharding.reshard(array, PartitionSpec()), tree)


def _scaled(codes: jax.Array, scale: jax.Array, max_code: int = 1) -> jax.Array:
    """Return codes * scale, float32, for codes of at most `max_code`; without a gradient.

    The minimum changes no number. It keeps the compiler from joining the product and an addition
    after it in one rounding (a fused multiply-add), which gives other bits than the array.
    """
    product = jnp.minimum(codes.astype(jnp.float32) * scale, max_code * scale)
    return jax.lax.stop_gradient(product)


def _nf4_values(codes: jax.Array) -> jax.Array:
    """Map uint8 [..., n / 2] -> float32 [..., n], two values for each."""
    pairs = high_and_low(codes[..., None], axis=codes.ndim)  # [..., n / 2, 2]
    return looked_up(pairs.reshape(*codes.shape[:-1], -1), NF4_VALUES)


def to_int8(weight: jax.Array, spec: Spec) -> Int8Weight:
    """Return a weight with the axes of its row, [*] floating-point, as round(weight / scale) with
    scale = absmax / 127 of each output channel, half to even.

    Output channels are the axes that are not inputs, in a stack for each layer and of each expert;
    of a table that is looked up they are its rows.
    """
    weight_32 = weight.astype(jnp.float32)
    absmax = jnp.abs(weight_32).max(_shared_axes(spec), keepdims=True)
    # The divisor is no constant: XLA would multiply by the inverse of one, and round twice.
    scale = absmax / jnp.where(absmax > 0, 127.0, 1.0)
    codes = jnp.round(weight_32 / jnp.where(scale > 0, scale, 1))
    return Int8Weight(jnp.clip(codes, -127, 127).astype(jnp.int8), scale, str(weight.dtype))


def _shared_axes(spec: Spec) -> tuple[int, ...]:
    """Return the axes over which an int8 weight shares a scale."""
    shared = {*spec.axes} - {*spec.inputs, *spec.batch} if spec.lookup else {*spec.inputs}
    return tuple(index for index, axis in enumerate(spec.axes) if axis in shared)


def to_nf4(weight: jax.Array, spec: Spec, double: bool = False) -> NF4Weight:
    """Return a weight with the axes of its row, [*] floating-point, in blocks of NF4, of each layer
    and each expert by itself.

    Takes 0.5625 bytes a weight, or with `double` quantization 0.516: the absolute maxima, less
    their mean, are then 8-bit codes of the dynamic data type in blocks of 256.
    """
    batch = weight.shape[: _batch_axes(spec)]  # (), (L,), (E,) or (L, E)
    size = tuple(weight.shape[len(batch) :])
    dtype = str(weight.dtype)
    flat = _replicated(weight).astype(jnp.float32).reshape(*batch, -1)
    codes, absmax = scaled_codes(in_blocks(flat, BLOCK), NF4_VALUES)  # [..., B, 64], [..., B]
    packed = codes[..., ::2] << 4 | codes[..., 1::2]  # [..., B, 32]
    if not double:
        return NF4Weight(packed, absmax, size=size, dtype=dtype)
    # The minimum changes no number, but has the mean rounded before it is subtracted.
    mean = jnp.minimum(absmax.mean(-1), absmax.max(-1))  # [...]
    nested_blocks = in_blocks(absmax - mean[..., None], NESTED_BLOCK)  # [..., C, 256]
    absmax_codes, nested = scaled_codes(nested_blocks, DYNAMIC_VALUES)
    absmax_codes = absmax_codes.reshape(*batch, -1)[..., : absmax.shape[-1]]  # [..., B]
    return NF4Weight(packed, absmax_codes, nested, mean, size, dtype)


def _batch_axes(spec: Spec) -> int:
    """Return the number of the leading axes that count weights beside each other."""
    return next(index for index, axis in enumerate(spec.axes) if axis not in spec.batch)


def int8_rows(spec: Spec) -> Int8Weight:
    """Return the rows of the arrays of `to_int8`, which start at zero and do not learn."""
    shared = _shared_axes(spec)
    shape = tuple(1 if index in shared else length for index, length in enumerate(spec.shape))
    axes = tuple("shared" if index in shared else axis for index, axis in enumerate(spec.axes))
    frozen = replace(spec, init=zeros, inputs=(), trainable=False)
    return Int8Weight(replace(frozen, dtype="int8"), replace(frozen, shape=shape, axes=axes))


def nf4_rows(spec: Spec, double: bool = False) -> NF4Weight:
    """Return the rows of the arrays of `to_nf4`, which start at zero and do not learn.

    Blocks are placed as the first axis of the weight, along which they follow one another.
    """
    first = _batch_axes(spec)
    size = spec.shape[first:]
    count = -(-math.prod(size) // BLOCK)

    def row(shape: tuple[int, ...], axes: tuple[str, ...], dtype: str) -> Spec:
        return Spec(
            (*spec.shape[:first], *shape),
            (*spec.axes[:first], *axes),
            zeros,
            trainable=False,
            reads=spec.reads,
            active=spec.active,
            dtype=dtype,
        )

    codes = row((count, BLOCK // 2), (spec.axes[first], "codes"), "uint8")
    absmax = row((count,), (spec.axes[first],), "uint8" if double else "float32")
    if not double:
        return NF4Weight(codes, absmax, size=size)
    nested = row((-(-count // NESTED_BLOCK),), ("blocks",), "float32")
    mean = row((), (), "float32")
    return NF4Weight(codes, absmax, nested, mean, size=size)


class Quantizer(NamedTuple):
    """What makes a leaf of a weight and its row, what makes the rows of that leaf's arrays, and
    whether `jf.quantize` makes one of the tables of tokens too: the embedding and the head."""

    make: Callable[[jax.Array, Spec], CodedWeight]
    rows: Callable[[Spec], Any]
    of_tokens: bool = False


QUANTIZERS: Table[Quantizer] = Table(
    Quantization,
    {
        "int8": Quantizer(to_int8, int8_rows, of_tokens=True),
        "int8_blocks": Quantizer(to_int8, int8_rows),
        "nf4": Quantizer(to_nf4, nf4_rows),
        "nf4_double": Quantizer(
            functools.partial(to_nf4, double=True), functools.partial(nf4_rows, double=True)
        ),
    },
)
