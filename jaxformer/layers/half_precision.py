"""Products of 16-bit operands with float32 results, whose derivatives are products of 16-bit
operands too."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`einsum(equation, a, b)` in float32.

    JAX would multiply the float32 gradient of the result with `a` and `b` in float32, which
    accelerators do several times slower.
    """
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


@wide_product.defjvp
def _derivative(
    equation: str, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (a, b), (d_a, d_b) = primals, tangents
    # The conversion's transpose makes 16 bits of the gradient before it is multiplied.
    d_out = jnp.einsum(equation, d_a, b) + jnp.einsum(equation, a, d_b)
    return wide_product(equation, a, b), d_out.astype(jnp.float32)
