"""The invariants of a decoder in compiled programs: those that the kernel, the pieces of a cache or
the precision could break, over models that use every row of every table, the others over one model.

test_family_invariants.py has packing and padding in every variant, and remat in every family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from products import slow_but
from shapes import (
    LENGTH,
    VOCABULARY,
    forward,
    made,
    model,
    products_of,
    strong,
    tokens,
    weights_and_tokens,
)

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.layers.attention import self_attention
from jaxformer.layers.block import empty_cache
from jaxformer.layers.head import head
from jaxformer.layers.masks import AttentionMask, TokenLayout, layout_of
from jaxformer.layers.sublayer import Call
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import cast_in_loop
from jaxformer.models.transformer import hidden

# Those whose layers differ most; test_family_invariants.py has the settings of the others.
SEVERAL = ("gpt2", "multi-query, interleaved, post-norm", "experts in groups after a dense layer")
several_models = pytest.mark.parametrize(
    "name", [pytest.param("llama", marks=pytest.mark.fast), *slow_but(SEVERAL, SEVERAL[2])]
)


def close(found, expected):
    """Equal to 2e-5 of the largest element."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))


def reach(name: str, kernel: str) -> np.ndarray:
    """bool [T, T]: whether the logits at a position depend on the token at another, by gradient.

    The tokens are distinct and the output layer is untied, so a token's row of the embedding table
    is its position's alone.
    """
    config = model(name, tied_head=False, **{"attention.kernel": kernel})
    params = made(config)
    row = jnp.arange(LENGTH, dtype=jnp.int32)[None]

    def logits(table):
        changed = params | {"embed": params["embed"] | {"tokens": table}}
        return forward(changed, config, row)[0].sum(-1)

    moved = jax.jit(jax.jacrev(logits))(params["embed"]["tokens"])
    return np.asarray(jnp.abs(moved[:, :LENGTH]).max(-1) > 0)


@pytest.mark.fast
@pytest.mark.parametrize(
    "name, kernel", [("llama", "blocked"), ("experts in groups after a dense layer", "xla")]
)
def test_future_tokens_do_not_move_past_logits(name, kernel):
    found = reach(name, kernel)
    np.testing.assert_array_equal(found, np.tril(np.ones((LENGTH, LENGTH), bool)))


@pytest.mark.fast
@pytest.mark.parametrize("kernel", ["xla", "blocked"])
def test_packed_rows_equal_separate_rows(kernel):
    params, config, row = weights_and_tokens("llama", **{"attention.kernel": kernel})
    first, second = row[:, :10], row[:, 10:]
    segments = np.repeat([[1] * 10 + [2] * (LENGTH - 10)], 2, 0)
    packed = forward(params, config, row, segment_ids=segments)
    close(packed[:, :10], forward(params, config, first))
    close(packed[1:, 10:], forward(params, config, second[1:]))  # nor does a row another


@functools.partial(jax.jit, static_argnums=1)
def extend(params, config, row, layout, cache):
    x, cache, _ = hidden(params, config, Inputs(row, layout), cache)
    return head(params, config, x, layout), cache


@several_models
def test_cached_decoding_equals_the_full_forward(name):
    params, config, row = weights_and_tokens(name)
    cache, logits, at = empty_cache(config, 2, LENGTH + 5, jnp.float32), [], 0
    for size in (11, 1, 1, 11):
        positions = np.broadcast_to(np.arange(at, at + size, dtype=np.int32), (2, size))
        piece, cache = extend(params, config, row[:, at : at + size], TokenLayout(positions), cache)
        logits.append(np.asarray(piece))
        at += size
    close(np.concatenate(logits, 1), forward(params, config, row))


@several_models
def test_scanned_layers_equal_unrolled_ones(name):
    params, config, row = weights_and_tokens(name)
    scanned = dataclasses.replace(config, layer_loop="scan")
    close(forward(params, scanned, row), forward(params, config, row))


def test_weights_that_are_tied_to_the_number_of_their_layer_keep_their_bits():
    values = [0.0, -0.0, 1.5, -3e38, 2e-38, jnp.inf, -jnp.inf, jnp.nan]
    params = {"w": jnp.array(values, jnp.float32), "codes": jnp.array([1, -1], jnp.int8)}
    tied = jax.jit(cast_in_loop)(params, jnp.int32(3))
    for name, leaf in params.items():
        assert tied[name].dtype == leaf.dtype
        assert np.asarray(tied[name]).tobytes() == np.asarray(leaf).tobytes()


def test_forward_works_under_every_transform_with_no_set_up():
    params, config, row = weights_and_tokens("gpt2", n_layers=1)
    call = functools.partial(forward, config=config, tokens=row)
    expected = call(params)
    shape = jax.ShapeDtypeStruct((2, LENGTH, VOCABULARY), jnp.float32)
    assert jax.eval_shape(call, params) == shape
    many = jax.vmap(call)(jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params))
    close(many[0], expected)
    close(jax.checkpoint(call)(params), expected)
    direction = strong(jax.tree.map(jnp.zeros_like, params))
    _, slope = jax.jvp(lambda p: call(p).mean(), (params,), (direction,))
    gradient = jax.grad(lambda p: call(p).mean())(params)
    inner = optax.tree.vdot(gradient, direction)
    np.testing.assert_allclose(slope, inner, rtol=1e-4)
    hessian_vector = jax.jvp(jax.grad(lambda p: call(p).mean()), (params,), (direction,))[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(hessian_vector))


@several_models
def test_bfloat16_products_give_float32_logits_near_the_float32_ones(name):
    params, config, row = weights_and_tokens(name)
    params = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
    coarse = forward(params, dataclasses.replace(config, dtype="bfloat16"), row)
    exact = forward(params, config, row)
    assert coarse.dtype == jnp.float32
    assert jnp.abs(coarse - exact).max() < 0.05 * jnp.abs(exact).max()


def mean_nats(params, config, row):
    logits = jf.forward(params, config, row)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, row[:, 1:]).mean()


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {"layer_loop": "scan"}),
        ("llama", {"remat": "dots"}),
        ("llama", {"attention.kernel": "blocked"}),
        ("experts", {"experts.kernel": "loop"}),
    ],
)
def test_gradients_of_bfloat16_products_are_near_the_float32_ones(name, changes):
    config = model(name)
    params = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
    gradient = jax.jit(jax.grad(mean_nats), static_argnums=1)
    exact = gradient(params, config, tokens())
    found = gradient(params, with_settings(config, changes | {"dtype": "bfloat16"}), tokens())
    difference = optax.tree.norm(optax.tree.sub(found, exact))
    # Two units in the last of the eight bits.
    assert 0 < difference < 2**-7 * optax.tree.norm(exact)


def test_bfloat16_products_have_every_derivative_and_those_of_weights_alone_are_stored():
    params, config, row = weights_and_tokens("llama", n_layers=1, dtype="bfloat16")
    call = functools.partial(mean_nats, config=config, row=row)
    direction = strong(jax.tree.map(jnp.zeros_like, params))
    _, slope = jax.jit(lambda p, d: jax.jvp(call, (p,), (d,)))(params, direction)
    gradient = jax.jit(jax.grad(call))(params)
    np.testing.assert_allclose(slope, optax.tree.vdot(gradient, direction), rtol=0.02)
    hessian_vector = jax.jvp(jax.jit(jax.grad(call)), (params,), (direction,))[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(hessian_vector))
    many = jax.vmap(call)(jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params))
    np.testing.assert_allclose(many[0], call(params), rtol=0.01)
    numbers = []
    for policy in ("none", "dots", "full"):
        recomputed = dataclasses.replace(config, remat=policy)
        program = jax.make_jaxpr(lambda p, c=recomputed: jax.grad(mean_nats)(p, c, row))(params)
        numbers.append(len(products_of(program.jaxpr)))
    # `dots` computes the product of the scores again, and `full` those of the weights too.
    assert numbers[0] < numbers[1] < numbers[2]


def test_cached_decoding_in_bfloat16_is_near_the_full_forward():
    params, config, row = weights_and_tokens("llama", dtype="bfloat16")
    cache, logits = empty_cache(config, 2, LENGTH, jnp.bfloat16), []
    for at in range(0, LENGTH, 12):
        for first, size in ((at, 11), (at + 11, 1)):
            positions = np.broadcast_to(np.arange(first, first + size, dtype=np.int32), (2, size))
            piece = row[:, first : first + size]
            found, cache = extend(params, config, piece, TokenLayout(positions), cache)
            logits.append(found)
    expected = forward(params, config, row)
    difference = jnp.abs(jnp.concatenate(logits, 1) - expected).max()
    assert difference < 0.02 * jnp.abs(expected).max()


@functools.partial(jax.jit, static_argnums=1)
def residual(params, config, row, layout, key=None):
    return hidden(params, config, Inputs(row, layout), key=key)[0]


def test_dropout_needs_a_key_and_keeps_the_mean():
    params, config, row = weights_and_tokens("llama", dropout=0.3)
    layout = layout_of(row, None, None)
    still = residual(params, config, row, layout)
    close(still, residual(params, dataclasses.replace(config, dropout=0.0), row, layout))
    drop = [residual(params, config, row, layout, key=jax.random.key(k)) for k in (0, 0, 1)]
    np.testing.assert_array_equal(drop[0], drop[1])
    assert (jnp.abs(drop[0] - drop[2]) > 1e-3).mean() > 0.5
    from jaxformer.layers.linear import dropout

    mask = dropout(jnp.ones(100_000), 0.3, jax.random.key(0))
    assert abs(float(mask.mean()) - 1) < 0.01 and abs(float((mask == 0).mean()) - 0.3) < 0.01


@pytest.mark.parametrize("kernel", slow_but(["xla", "blocked"], "xla"))
def test_the_dropout_of_attention_weights_has_a_rate_of_its_own(kernel):
    """By default it is model.dropout, bit for bit; 0 leaves attention out, and nothing else."""
    params, config, row = weights_and_tokens("llama", dropout=0.3, **{"attention.kernel": kernel})
    layout, key = layout_of(row, None, None), jax.random.key(2)

    def dropped(**changes):
        changed = with_settings(config, changes)
        attended = jax.random.normal(jax.random.key(5), (*row.shape, config.d_model))
        layer = jax.tree.map(lambda leaf: leaf[0], params["blocks"]["attention"])

        def attention(key):
            mask = AttentionMask(layout, layout)
            return self_attention(layer, changed, attended, Call(mask, key=key)).x

        def whole(key):
            return residual(params, changed, row, layout, key=key)

        return [np.abs(f(key) - f(None)).max() > 1e-3 for f in (whole, jax.jit(attention))]

    as_before = residual(params, config, row, layout, key=key)
    same = with_settings(config, {"attention.dropout": 0.3})
    np.testing.assert_array_equal(as_before, residual(params, same, row, layout, key=key))
    assert dropped() == [True, True]
    assert dropped(**{"attention.dropout": 0.0}) == [True, False]
    assert dropped(dropout=0.0, **{"attention.dropout": 0.3}) == [True, True]
    assert dropped(dropout=0.0) == [False, False]
    rates = [(0.3, 0.0), (0.0, 0.3), (0.3, "auto"), (0.0, "auto"), (0.0, 0.0)]
    configs = [with_settings(config, {"dropout": a, "attention.dropout": b}) for a, b in rates]
    assert [one.has_dropout for one in configs] == [True, True, True, False, False]


def test_dropout_is_the_same_in_a_loop_and_computed_again():
    """In the gradient, whose backward pass has to drop what the forward pass dropped."""
    params, config, row = weights_and_tokens("llama", dropout=0.3)
    layout, key = layout_of(row, None, None), jax.random.key(3)

    @functools.partial(jax.jit, static_argnums=1)
    def found(params, config):
        return jnp.square(residual(params, config, row, layout, key=key)).mean()

    changed = dataclasses.replace(config, layer_loop="scan", remat="full")
    value_and_gradient = jax.value_and_grad(found)
    jax.tree.map(close, value_and_gradient(params, changed), value_and_gradient(params, config))
