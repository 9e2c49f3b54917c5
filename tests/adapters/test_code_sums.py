"""Products of few rows from the codes of a quantized weight: those of its array but for rounding,
without making it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.adapters.code_sums import MOST_ROWS
from jaxformer.adapters.quantized import to_int8, to_nf4
from jaxformer.arrays.params import Spec, contract, zeros

MAKERS = {"int8": to_int8, "nf4": to_nf4, "nf4_double": functools.partial(to_nf4, double=True)}
each_kind = pytest.mark.parametrize("kind", MAKERS)


def leaf_of(kind, *shape, inputs=1):
    spec = Spec(shape, tuple("abc"[: len(shape)]), zeros, inputs=tuple("abc"[:inputs]))
    return MAKERS[kind](jax.random.normal(jax.random.key(0), shape), spec)


@each_kind
@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS])
def test_the_sums_are_those_of_the_array(kind, rows):
    x = jax.random.normal(jax.random.key(1), (rows, 1, 32))
    leaf = leaf_of(kind, 32, 2, 64)
    found = contract("BTD,DNH->BTNH", x, leaf)
    np.testing.assert_allclose(found, jnp.einsum("BTD,DNH->BTNH", x, leaf.array()), atol=2e-5)
    leaf = leaf_of(kind, 2, 32, 64, inputs=2)
    x = jax.random.normal(jax.random.key(2), (rows, 1, 2, 32))
    found = contract("BTNH,NHD->BTD", x, leaf)
    np.testing.assert_allclose(found, jnp.einsum("BTNH,NHD->BTD", x, leaf.array()), atol=2e-5)


@each_kind
def test_no_array_is_made_and_more_rows_make_one(kind):
    leaf = leaf_of(kind, 512, 512)

    def temporary(rows):
        product = jax.jit(lambda x, leaf: contract("BD,DF->BF", x, leaf))
        program = product.lower(jnp.ones((rows, 512)), leaf).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(1) < 512 * 512 < 4 * 512 * 512 <= temporary(MOST_ROWS + 1)


@each_kind
def test_derivatives_are_those_of_the_product_with_the_array(kind):
    leaf, x = leaf_of(kind, 32, 64), jax.random.normal(jax.random.key(1), (2, 32))

    def total(x, w):
        return jnp.sin(contract("BD,DF->BF", x, w)).sum()

    for derivative in (jax.grad(total), jax.hessian(total), jax.jacfwd(total)):
        np.testing.assert_allclose(derivative(x, leaf), derivative(x, leaf.array()), atol=1e-4)
