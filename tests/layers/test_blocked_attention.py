"""Blocked attention is plain attention in any number of blocks and any dtype, in less memory. Its
masks are in test_kernels.py, its biases and dropout in test_fused_kernels.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import blocked
from jaxformer.layers.blocked import blocked_attention
from jaxformer.layers.dot_product import plain
from jaxformer.layers.masks import AttentionMask, layout_of


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 4)
    monkeypatch.setattr(blocked, "MOST_BLOCKS", 4)


def inputs(length=14, heads=4, kv_heads=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(heads, 8), (kv_heads, 8), (kv_heads, 8), (heads, 8)]
    return [rng.standard_normal((2, length, *shape)).astype(dtype) for shape in shapes]


def reference(q, k, v, mask):
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a.astype(jnp.float32), groups, axis=2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1) * mask[:, None]
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def with_gradients(function, *arrays):
    @jax.jit
    def both(q, k, v, slope):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(slope.astype(out.dtype))

    return [np.asarray(a, np.float32) for a in both(*arrays)]


def assert_same(function, mask, *arrays, tolerance=1e-5):
    found = with_gradients(function, *arrays)
    wanted = with_gradients(lambda *a: reference(*a, mask), *arrays)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


def to_past(q, k, v, **changes):
    """Blocked attention of rows that are one text each, to the token and those before."""
    layout = layout_of(q[..., 0, 0], None, None)
    return blocked_attention(q, k, v, AttentionMask(layout, layout, **changes))


def causal(length):
    return np.tril(np.ones((2, length, length), bool))


@pytest.mark.parametrize("length", [1, 4, 14, 37])
def test_any_length_gives_plain_causal_attention(length):
    assert_same(to_past, causal(length), *inputs(length))


def test_bfloat16_is_near_the_float32_reference():
    q, k, v, slope = inputs(dtype=jnp.bfloat16)
    assert jax.eval_shape(to_past, q, k, v).dtype == jnp.bfloat16
    assert_same(to_past, causal(14), q, k, v, slope, tolerance=0.05)


def test_large_scores_stay_finite():
    q, k, v, slope = inputs()
    arrays = with_gradients(to_past, 1e3 * q, 1e3 * k, v, slope)
    assert all(np.isfinite(a).all() for a in arrays)


@pytest.mark.slow
def test_it_needs_less_than_half_the_memory_of_the_plain_kernel(monkeypatch):
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 128)
    monkeypatch.setattr(blocked, "MOST_BLOCKS", 16)
    shapes = [jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)] * 3

    def temporaries(function):
        """Of the gradient, in bytes."""
        step = jax.jit(
            jax.grad(lambda q, k, v: jnp.square(function(q, k, v)).sum(), argnums=(0, 1, 2))
        )
        return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    layout = layout_of(jnp.zeros((1, 1024), jnp.int32), None, None)
    dropout = (0.1, jax.random.key(0))
    mask = AttentionMask(layout, layout)
    all_weights = temporaries(lambda q, k, v: plain(q, k, v, mask))
    assert temporaries(to_past) < all_weights / 2
    # A CPU has the random bits of several blocks at a time; on an H100 they take no memory.
    all_weights = temporaries(lambda q, k, v: plain(q, k, v, mask._replace(dropout=dropout)))
    dropping = functools.partial(to_past, dropout=dropout)
    assert temporaries(dropping) < 0.75 * all_weights
