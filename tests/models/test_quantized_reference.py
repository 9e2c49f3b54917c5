"""NF4 against bitsandbytes: its values, its codes of ten million normal numbers, and its error."""

import functools

import bitsandbytes.functional as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.adapters.quantized import DYNAMIC_VALUES, NF4_VALUES, to_nf4
from jaxformer.arrays.params import Spec, zeros

# Ten million numbers. Rows are whole blocks of 64: on a CPU with AVX-512, bitsandbytes 0.50 gives
# back wrong numbers for some others.
NORMAL = (1250, 8000)
quantized = jax.jit(to_nf4, static_argnums=(1, 2))


def spec_of(weight):
    return Spec(weight.shape, ("layers", "embed", "mlp")[-weight.ndim :], zeros)


def theirs(weight, double=False):
    """bitsandbytes' bytes of codes, its state and the weight that it gives back."""
    codes, state = reference.quantize_4bit(
        torch.from_numpy(weight), quant_type="nf4", compress_statistics=double
    )
    return codes.numpy().ravel(), state, reference.dequantize_4bit(codes, state).numpy()


def ours(weight, double=False):
    leaf = quantized(jnp.asarray(weight), spec_of(weight), double)
    return leaf, np.asarray(leaf.array())


@functools.cache
def normal():
    return np.random.default_rng(0).standard_normal(NORMAL).astype(np.float32)


def test_the_values_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(NF4_VALUES, reference.get_4bit_type("nf4", device="cpu"))
    np.testing.assert_array_equal(DYNAMIC_VALUES, reference.create_dynamic_map())


def test_codes_of_ten_million_normal_numbers_are_those_of_bitsandbytes():
    leaf, back = ours(normal())
    codes, state, expected = theirs(normal())
    assert np.mean(np.asarray(leaf.codes).ravel() == codes) >= 0.9999
    np.testing.assert_array_equal(leaf.absmax, state.absmax)
    errors = [np.sqrt(np.mean((found - normal()) ** 2)) for found in (back, expected)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-6)
    assert np.mean(back == expected) >= 0.9999


def test_numbers_at_the_thresholds_get_the_codes_of_bitsandbytes():
    middles = (NF4_VALUES[:-1] + NF4_VALUES[1:]) / 2
    sides = [np.nextafter(middles, np.float32(side)) for side in (-2, 2)]
    blocks = np.zeros((3, 64), np.float32)
    blocks[:, 0] = (1, 3, 1e-6)  # the absolute maxima
    blocks[:, 1:46] = np.concatenate([middles, *sides]) * blocks[:, :1]
    leaf, back = ours(blocks)
    codes, _, expected = theirs(blocks)
    np.testing.assert_array_equal(np.asarray(leaf.codes).ravel(), codes)
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_have_the_codes_of_bitsandbytes(dtype):
    weight = torch.from_numpy(normal()[:16]).to(dtype)
    codes, _ = reference.quantize_4bit(weight, quant_type="nf4")
    wide = weight.to(torch.float32).numpy()
    half = jnp.asarray(wide).astype(str(dtype).removeprefix("torch."))
    leaf = quantized(half, spec_of(wide), False)
    np.testing.assert_array_equal(np.asarray(leaf.codes).ravel(), codes.numpy().ravel())


def test_double_quantization_is_that_of_bitsandbytes():
    leaf, back = ours(normal(), double=True)
    codes, state, expected = theirs(normal(), double=True)
    assert np.mean(np.asarray(leaf.codes).ravel() == codes) >= 0.9999
    np.testing.assert_allclose(leaf.mean, state.offset.item(), rtol=1e-6)
    np.testing.assert_allclose(leaf.nested, state.state2.absmax, rtol=1e-6)
    # On a CPU bitsandbytes finds the code of an absolute maximum in a table of 65,536 numbers, so
    # that some codes are not those of the nearest value; on a GPU they are.
    apart = np.abs(np.asarray(leaf.absmax, int) - state.absmax.numpy().astype(int))
    assert np.mean(apart == 0) > 0.998 and apart.max() <= 1
    errors = [np.sqrt(np.mean((found - normal()) ** 2)) for found in (back, expected)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-6)


def test_each_layer_of_a_stack_is_quantized_by_itself():
    stack = normal().ravel()[:27_000].reshape(3, 90, 100)
    for double in (False, True):
        leaf, back = ours(stack, double)
        for layer, weight in enumerate(stack):
            codes, _, expected = theirs(weight, double)
            # bitsandbytes fills the last block with nothing, and divides in it
            assert np.mean(np.asarray(leaf.codes)[layer].ravel()[: codes.size] == codes) >= 0.9999
            np.testing.assert_allclose(back[layer], expected, atol=2e-3 if double else 0)
