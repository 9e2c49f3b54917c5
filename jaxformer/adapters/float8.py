"""Products of the layers' matrices in 8 bits, in training (`train.products=fp8`)."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from jaxformer.adapters.low_rank import is_adapted
from jaxformer.arrays.params import Params, Specs, dotted, is_custom, rows
from jaxformer.arrays.sharding import Axes, constrain, explicit_axes
from jaxformer.files import ConfigError

# Four bits of exponent and three of mantissa, up to 448, for values; gradients need the range of
# five and two, up to 57,344 (arXiv:2209.05433).
VALUES = jnp.float8_e4m3fn
GRADIENTS = jnp.float8_e5m2
Codes = tuple[jax.Array, jax.Array]  # codes [...] of 8 bits and a float32 scale []
EXPONENT = 0xFF800000  # the bits of a float32 without its mantissa


def coded(x: jax.Array, dtype: Any) -> Codes:
    """Return codes [...] of 8 bits and a float32 scale [], whose product is about x.

    The scale is of the whole array and of this step, which costs one more read of x than the
    maximum of earlier steps would, but is no state that a checkpoint has to keep, and lets nothing
    overflow. It is a power of two, and so rounds nothing itself: another scale, as of the part of x
    that a replica has, gives the same numbers but for the smallest.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    # An array of zeros has a scale, too.
    quotient = jnp.maximum(largest, 1e-30) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(2 * quotient, jnp.uint32) & jnp.uint32(EXPONENT)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def product(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return `einsum(equation, x, w)` of two arrays in codes of 8 bits, in x's dtype. So are both
    products of its backward pass, with the gradient in the wider range and with the codes of the
    forward pass, which are points for `model.remat`."""
    x_codes = checkpoint_name(coded(jax.lax.stop_gradient(x), VALUES), "codes")
    w_codes = checkpoint_name(coded(jax.lax.stop_gradient(w), VALUES), "weight")
    return _multiplied(equation, x, w, x_codes, w_codes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiplied(equation: str, x: jax.Array, w: jax.Array, x_codes: Codes, w_codes: Codes) -> Any:
    """Return the product of the codes of x and w. The values of x and w are not read: derivatives
    are taken with respect to them, since codes have none.

    The codes themselves are multiplied: XLA may leave out a conversion to fewer bits and back.
    """
    x_array, x_scale = x_codes
    w_array, w_scale = w_codes
    y = jnp.einsum(
        equation,
        x_array,
        w_array,
        # Or cuBLASLt adds with 14 bits of mantissa on Hopper.
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=x.dtype,
    )
    return y * (x_scale * w_scale).astype(x.dtype)


def _forward(equation: str, *arrays: Any) -> Any:
    return _multiplied(equation, *arrays), arrays


def _backward(equation: str, arrays: Any, gradient: jax.Array) -> Any:
    x, w, x_codes, w_codes = arrays
    left, right, out = equation.replace("->", ",").split(",")
    codes = coded(jax.lax.stop_gradient(gradient), GRADIENTS)
    d_x = _multiplied(f"{out},{right}->{left}", gradient, w, codes, w_codes)
    d_w = _multiplied(f"{left},{out}->{right}", x, gradient, x_codes, codes)
    return d_x, d_w, None, None


_multiplied.defvjp(_forward, _backward)


@struct.dataclass
class Float8:
    """A matrix that is multiplied in 8 bits; the weight itself keeps its dtype."""

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def contract(
        self, equation: str, x: jax.Array, *, to: Axes | None, dtype: Any, **_: Any
    ) -> jax.Array:
        if explicit_axes():
            raise ConfigError(
                "products in 8 bits are for a mesh whose axes are automatic: make it by"
                " jf.make_mesh, or set train.products to dtype."
            )
        y = product(equation, x, self.weight.astype(x.dtype)).astype(dtype or x.dtype)
        return constrain(y, to)

    def array(self) -> jax.Array:
        return self.weight  # type: ignore[no-any-return]

    def astype(self, dtype: Any) -> "Float8":
        return Float8(self.weight.astype(dtype))


def in_8_bits(params: Params, specs: Specs) -> Params:
    """Return `params` whose layers multiply by their matrices in 8 bits, and below an adapter by
    the matrix that it adapts. Routers and the matrices of experts stay, as does what is quantized
    or outside of the layers.

    Raises ConfigError if no matrix is left.
    """
    matrices = {
        path
        for path, spec in rows(specs).items()
        if spec.is_matrix and spec.quantizable and not spec.lookup and spec.batch == ("layers",)
    }
    found = []

    def leaf(path: Any, node: Any) -> Any:
        weight = node.weight if is_adapted(node) else node
        if dotted(path) not in matrices or is_custom(weight):
            return node
        found.append(path)
        return replace(node, weight=Float8(weight)) if is_adapted(node) else Float8(weight)

    params = jax.tree.map_with_path(leaf, params, is_leaf=is_custom)
    if not found:
        raise ConfigError(
            "train.products=fp8: the layers have no matrix that could be multiplied in 8 bits;"
            " those of experts and quantized ones are not: set it to dtype."
        )
    return params
