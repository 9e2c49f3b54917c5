"""Quantized weights as leaves: int8 with a scale per output channel, and 4-bit NormalFloat (NF4,
arXiv:2305.14314) in blocks of 64, with the codes of bitsandbytes.

A leaf holds codes and scales, and makes the array that they stand for where it is used: products
are those of that array, bit for bit. Its parts do not learn.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxformer.adapters.data_types import DYNAMIC_VALUES, NF4_VALUES, in_blocks, scaled_codes
from jaxformer.arrays.params import Spec, contract, lookup, zeros
from jaxformer.arrays.sharding import Axes, constrain, explicit_axes, gathered
from jaxformer.config.adapter import Quantization
from jaxformer.config.settings import Table

BLOCK = 64  # weights that share an absolute maximum
NESTED_BLOCK = 256  # absolute maxima that share one, with double quantization


@struct.dataclass
class Int8Weight:
    """codes * scale: `codes` int8 with the axes of the weight, `scale` float32 with one number for
    each output channel (for each row of a table that is looked up) and 1 for the other axes.

    `dtype` is that of the array that it stands for.
    """

    codes: Any
    scale: Any
    dtype: str = struct.field(pytree_node=False, default="float32")
    trainable: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def array(self) -> jax.Array:
        """The array that it stands for, in its dtype; parts get no gradient through it."""
        parts = gathered(self)
        return _rounded(parts.codes, parts.scale, 127).astype(self.dtype)

    def contract(self, equation: str, x: jax.Array, *, to: Axes | None, dtype: Any) -> jax.Array:
        return _contract(self, equation, x, to=to, dtype=dtype)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Rows of the array; only these are made."""
        codes = lookup(self.codes, index, to)
        width = to[-1] if self.scale.shape[-1] > 1 else None
        scale = lookup(self.scale, index, (*to[:-1], width))
        return _rounded(codes, scale, 127).astype(self.dtype)

    def astype(self, dtype: Any) -> "Int8Weight":
        """The same codes, which then stand for an array of this dtype."""
        return replace(self, dtype=str(jnp.dtype(dtype)))


@struct.dataclass
class NF4Weight:
    """Values of NF4 times the absolute maximum of their block, each block 64 weights of the
    flattened weight (of one layer in a stack); the last is filled up with zeros.

    `codes` uint8 [..., B, 32]: two codes of 4 bits each, the first in the high bits. `absmax` [...,
    B] is float32, or with double quantization uint8: then each stands for a value of the dynamic
    data type, times the number in `nested` [..., C] of its 256 blocks, plus the `mean` [...].
    `size` is the shape of the weight (without the axis of layers), `dtype` that of the array that
    it stands for.
    """

    codes: Any
    absmax: Any
    nested: Any = None
    mean: Any = None
    size: tuple[int, ...] = struct.field(pytree_node=False, default=())
    dtype: str = struct.field(pytree_node=False, default="float32")
    trainable: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-2], *self.size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def array(self) -> jax.Array:
        """The array that it stands for, in its dtype; parts get no gradient through it."""
        parts = _whole(self)
        values = _rounded(_nf4_values(parts.codes), parts.maxima()[..., None])  # [..., B, 64]
        flat = values.reshape(*values.shape[:-2], -1)[..., : math.prod(self.size)]
        return flat.reshape(self.shape).astype(self.dtype)

    def maxima(self) -> jax.Array:
        """The absolute maximum of each block, float32 [..., B]."""
        if self.nested is None:
            return self.absmax  # type: ignore[no-any-return]
        units = jnp.repeat(self.nested, NESTED_BLOCK, -1)[..., : self.absmax.shape[-1]]
        return _rounded(jnp.asarray(DYNAMIC_VALUES)[self.absmax], units) + self.mean[..., None]

    def contract(self, equation: str, x: jax.Array, *, to: Axes | None, dtype: Any) -> jax.Array:
        return _contract(self, equation, x, to=to, dtype=dtype)

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Rows of the array; only these are made where each is a number of blocks."""
        width = self.size[-1]
        if width % BLOCK or explicit_axes():
            return lookup(self.array(), index, to)
        whole = (*to[:-1], None)  # a row's codes are fewer than its numbers
        codes = lookup(self.codes.reshape(-1, width // 2), index, whole)  # [..., W / 2]
        maxima = lookup(self.maxima().reshape(-1, width // BLOCK), index, whole)
        blocks = _nf4_values(codes.reshape(*maxima.shape, BLOCK // 2))  # [..., W / 64, 64]
        rows = _rounded(blocks, maxima[..., None]).astype(self.dtype)
        return constrain(rows.reshape(*rows.shape[:-2], width), to)

    def astype(self, dtype: Any) -> "NF4Weight":
        """The same codes, which then stand for an array of this dtype."""
        return replace(self, dtype=str(jnp.dtype(dtype)))


def _contract(leaf: Any, equation: str, x: jax.Array, **where: Any) -> jax.Array:
    """As `params.contract` of the array of a leaf, which is made again for the backward pass, where
    x is there: never the arrays of all layers at once, nor one before a loop over tokens.

    A CPU makes it once for both passes unless layers are scanned, since XLA drops the barrier there
    before it would matter.
    """

    @jax.checkpoint
    def product(x: jax.Array, leaf: Any) -> jax.Array:
        x, leaf = jax.lax.optimization_barrier((x, leaf))
        return contract(equation, x, leaf.array(), **where)

    return product(x, leaf)


def _whole(tree: Any) -> Any:
    """The arrays of a tree whole on each device where axes are explicit: these do not reshape an
    axis that is split; automatic axes do."""
    if not explicit_axes():
        return tree
    return jax.tree.map(lambda array: jax.sharding.reshard(array, PartitionSpec()), tree)


def _rounded(codes: jax.Array, scale: jax.Array, most: int = 1) -> jax.Array:
    """codes * scale, float32, for codes of at most `most`; without a gradient.

    The minimum changes no number. It keeps the compiler from joining the product and an addition
    after it in one rounding (a fused multiply-add), which gives other bits than the array.
    """
    product = jnp.minimum(codes.astype(jnp.float32) * scale, most * scale)
    return jax.lax.stop_gradient(product)


def _nf4_values(codes: jax.Array) -> jax.Array:
    """uint8 [..., n] -> float32 [..., 2n], two values for each."""
    pairs = jnp.stack([codes >> 4, codes & 15], -1)
    return jnp.asarray(NF4_VALUES)[pairs.reshape(*codes.shape[:-1], -1)]


def to_int8(weight: jax.Array, spec: Spec) -> Int8Weight:
    """A weight with the axes of its row, [*] floating-point, as round(weight / scale) with scale =
    absmax / 127 of each output channel, half to even.

    Output channels are the axes that are not inputs, in a stack for each layer; of a table that is
    looked up they are its rows.
    """
    wide = weight.astype(jnp.float32)
    absmax = jnp.abs(wide).max(_reduced(spec), keepdims=True)
    # The divisor is no constant: XLA would multiply by the inverse of one, and round twice.
    scale = absmax / jnp.where(absmax > 0, 127.0, 1.0)
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1))
    return Int8Weight(jnp.clip(codes, -127, 127).astype(jnp.int8), scale, str(weight.dtype))


def _reduced(spec: Spec) -> tuple[int, ...]:
    """The axes over which an int8 weight shares a scale."""
    shared = {*spec.axes} - {*spec.inputs, "layers"} if spec.lookup else {*spec.inputs}
    return tuple(at for at, axis in enumerate(spec.axes) if axis in shared)


def to_nf4(weight: jax.Array, spec: Spec, double: bool = False) -> NF4Weight:
    """A weight with the axes of its row, [*] floating-point, in blocks of NF4.

    Takes 0.5625 bytes a weight, or with `double` quantization 0.516: the absolute maxima, less
    their mean, are then 8-bit codes of the dynamic data type in blocks of 256.
    """
    lead = weight.shape[: _lead(spec)]
    flat = _whole(weight).astype(jnp.float32).reshape(*lead, -1)
    codes, absmax = scaled_codes(in_blocks(flat, BLOCK), NF4_VALUES)
    packed = codes[..., ::2] << 4 | codes[..., 1::2]
    own: dict[str, Any] = {"size": tuple(weight.shape[len(lead) :]), "dtype": str(weight.dtype)}
    if not double:
        return NF4Weight(packed, absmax, **own)
    mean = jnp.minimum(absmax.mean(-1), absmax.max(-1))  # rounded before it is subtracted
    inner, nested = scaled_codes(in_blocks(absmax - mean[..., None], NESTED_BLOCK), DYNAMIC_VALUES)
    inner = inner.reshape(*lead, -1)[..., : absmax.shape[-1]]
    return NF4Weight(packed, inner, nested, mean, **own)


def _lead(spec: Spec) -> int:
    """The number of leading axes that are of layers."""
    return int(spec.axes[:1] == ("layers",))


def int8_rows(spec: Spec) -> Int8Weight:
    """The rows of the parts of `to_int8`, which start at zero and do not learn."""
    shared = _reduced(spec)
    shape = tuple(1 if at in shared else length for at, length in enumerate(spec.shape))
    axes = tuple("shared" if at in shared else axis for at, axis in enumerate(spec.axes))
    part = replace(spec, init=zeros, inputs=(), trainable=False)
    return Int8Weight(replace(part, dtype="int8"), replace(part, shape=shape, axes=axes))


def nf4_rows(spec: Spec, double: bool = False) -> NF4Weight:
    """The rows of the parts of `to_nf4`, which start at zero and do not learn.

    Blocks are placed as the first axis of the weight, along which they follow one another.
    """
    at = _lead(spec)
    lead, size, names = spec.shape[:at], spec.shape[at:], spec.axes[:at]
    count = -(-math.prod(size) // BLOCK)
    first = spec.axes[at]

    def part(shape: tuple[int, ...], axes: tuple[str, ...], dtype: str) -> Spec:
        return Spec(
            (*lead, *shape), (*names, *axes), zeros, trainable=False, reads=spec.reads, dtype=dtype
        )

    codes = part((count, BLOCK // 2), (first, "codes"), "uint8")
    absmax = part((count,), (first,), "uint8" if double else "float32")
    if not double:
        return NF4Weight(codes, absmax, size=size)
    nested = part((-(-count // NESTED_BLOCK),), ("blocks",), "float32")
    return NF4Weight(codes, absmax, nested, part((), (), "float32"), size=size)


class Quantizer(NamedTuple):
    """A leaf of a weight and its row, and the rows of that leaf's parts."""

    make: Callable[[jax.Array, Spec], Any]
    rows: Callable[[Spec], Any]


QUANTIZERS: Table[Quantizer] = Table(
    Quantization,
    {
        "int8": Quantizer(to_int8, int8_rows),
        "nf4": Quantizer(to_nf4, nf4_rows),
        "nf4_double": Quantizer(
            functools.partial(to_nf4, double=True), functools.partial(nf4_rows, double=True)
        ),
    },
)
