"""How a token knows where it is: each scheme against its formula, or against numbers that another
library gives."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import layers
from jaxformer.config.settings import with_settings
from jaxformer.layers.biases import (
    alibi_slopes,
    disentangled_bias,
    log_bucket,
    relative_bucket,
    score_bias,
)
from jaxformer.layers.masks import AttentionMask, layout_of, visible
from jaxformer.layers.positions import FREQUENCIES, rotate, sinusoids


def array(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_turns_each_pair_as_a_complex_number(pairing):
    x, positions = array(2, 5, 3, 8), np.random.default_rng(0).integers(0, 500, (2, 5))
    first, second = slice(0, 8, 2), slice(1, 8, 2)
    if pairing == "half":
        first, second = slice(0, 4), slice(4, 8)
    turn = np.exp(1j * positions[..., None] * 100.0 ** (-2 * np.arange(4) / 8))[:, :, None]
    turned = (x[..., first] + 1j * x[..., second]) * turn
    found = layers.rope(jnp.array(x), jnp.array(positions), theta=100.0, pairing=pairing)
    np.testing.assert_allclose(found[..., first], turned.real, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found[..., second], turned.imag, rtol=2e-4, atol=2e-4)


SMALL = {"vocab_size": 8, "d_model": 64, "n_heads": 4, "max_length": 64}
DIVISORS = {
    "rope.short_factor": "1 1.1 1.2 1.3 1.4 1.5 1.6 1.7",
    "rope.long_factor": "1, 1.5, 2, 2.5, 3, 4, 6, 8",
}
# The names of transformers for the settings, and settings by these names.
NAMES = {
    "rope_type": "rope.scaling",
    "rope_theta": "rope.theta",
    "factor": "rope.factor",
    "original_max_position_embeddings": "rope.original_length",
    "beta_fast": "rope.fast",
    "beta_slow": "rope.slow",
    "high_freq_factor": "rope.fast",
    "low_freq_factor": "rope.slow",
}
OF_LLAMA = {"rope_type": "llama3", "high_freq_factor": 4.0, "low_freq_factor": 1.0}
WHOLE = {"original_max_position_embeddings": 200}
FAR = {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
STRETCHED = {
    "linear": {"rope_type": "linear"},
    "dynamic, 200 tokens of 64": {"rope_type": "dynamic"},
    "dynamic, 200 tokens of 200": {"rope_type": "dynamic"} | WHOLE,
    "yarn": {"rope_type": "yarn"},
    "yarn, other turns": {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0} | FAR,
    "llama3": OF_LLAMA,
    "llama3 of Llama 3.2": OF_LLAMA | FAR | {"factor": 32.0},
    "longrope, 200 tokens of 64": {"rope_type": "longrope"},
    "longrope, 200 tokens of 200": {"rope_type": "longrope"} | WHOLE,
}


@pytest.mark.parametrize("name", STRETCHED)
def test_stretched_rope_has_the_published_frequencies(name):
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    theirs = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    theirs |= STRETCHED[name]
    ours = SMALL | {NAMES[key]: value for key, value in theirs.items()}
    if theirs["rope_type"] == "longrope":
        ours |= DIVISORS
        for key, divisors in DIVISORS.items():
            numbers = divisors.replace(",", " ").split()
            theirs[key.removeprefix("rope.")] = [float(number) for number in numbers]
    config = with_settings(jf.ModelConfig(), ours)
    # Its dynamic scaling reads the length of the model as the original one.
    sizes = dict(hidden_size=64, num_attention_heads=4)
    sizes["max_position_embeddings"] = theirs["original_max_position_embeddings"]
    reference = LlamaConfig(**sizes, rope_parameters=theirs)
    expected, _ = utilities.ROPE_INIT_FUNCTIONS[config.rope.scaling](reference, "cpu", seq_len=200)
    find = jax.jit(FREQUENCIES[config.rope.scaling], static_argnums=0)
    found = find(config, jnp.arange(200)[None])
    np.testing.assert_allclose(np.squeeze(found), expected, rtol=2e-6)


def test_every_way_to_stretch_rope_is_held_against_transformers():
    kinds = {settings["rope_type"] for settings in STRETCHED.values()}
    assert kinds == set(FREQUENCIES) - {"none"}


LONG_SCALING = {"rope.scaling": "longrope"} | DIVISORS


def test_longrope_switches_its_divisors_behind_the_original_length():
    """64 tokens have the short ones, 65 the long ones, at every position."""
    config = with_settings(jf.ModelConfig(), {**SMALL, **LONG_SCALING, "rope.factor": 4.0})
    x = jnp.array(array(1, 65, 2, 16))
    plain, scale = 10_000.0 ** (-jnp.arange(8) / 8), math.sqrt(1 + math.log(4) / math.log(64))
    for length, divisors in zip((64, 65), config.rope.factors, strict=True):
        positions = jnp.arange(length)[None]
        expected = layers.rope(x[:, :length], positions, frequencies=plain / jnp.array(divisors))
        found = rotate(config, x[:, :length], positions)
        np.testing.assert_allclose(found, scale * expected, atol=1e-5)


def test_a_text_that_crosses_the_original_length_of_longrope_is_said_to_differ():
    config = with_settings(
        jf.ModelConfig(), {**SMALL, **LONG_SCALING, "rope.factor": 4.0, "rope.original_length": 8}
    )
    params, prompt = jf.init(config, jax.random.key(0)), np.ones((1, 6), int)
    jf.generate(params, config, prompt, 2, temperature=0)
    with pytest.warns(UserWarning, match=r"crosses 8 tokens .* transformers reads it anew"):
        jf.generate(params, config, prompt, 3, temperature=0)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"rope.long_factor": "1 2"}, r"rope.long_factor='1 2' must be 8 numbers above 0"),
        ({"rope.short_factor": ""}, r"rope.short_factor='' must be 8 numbers above 0"),
        ({"rope.short_factor": "1 1 1 1 1 1 1 a"}, "rope.short_factor=.* must be 8 numbers"),
        ({"rope.short_factor": "1 1 1 1 1 1 1 0"}, "rope.short_factor=.* must be 8 numbers"),
        ({"rope.short_factor": "1 1 1 1 1 1 1 inf"}, "rope.short_factor=.* must be 8 numbers"),
        ({"rope.fraction": 0.5}, "rope.long_factor=.* must be 4 numbers"),
        ({"rope.original_length": 1}, "rope.original_length=1 must be 2 or more"),
        ({"rope.factor": 1.0}, "set both, the factor above 1"),
    ],
)
def test_longrope_needs_a_divisor_for_each_pair(setting, message):
    with pytest.raises(jf.ConfigError, match=message):
        with_settings(jf.ModelConfig(), SMALL | LONG_SCALING | {"rope.factor": 4.0} | setting)


@pytest.mark.parametrize("scaling", [{"rope.scaling": "dynamic"}, LONG_SCALING])
def test_scaling_by_length_goes_by_that_of_each_tokens_own_segment(scaling):
    """Not by that of other rows, other segments, or padding."""
    config = with_settings(
        jf.ModelConfig(), {**SMALL, **scaling, "rope.factor": 4.0, "rope.original_length": 6}
    )
    config = dataclasses.replace(config, n_layers=1)
    params = jf.init(config, jax.random.key(0))
    short, long = (np.arange(n)[None] % 8 for n in (6, 40))
    forward = jax.jit(jf.forward, static_argnums=1)
    expected = [forward(params, config, tokens) for tokens in (short, long)]
    rows = np.zeros((2, 46), np.int32)
    segments = np.zeros((2, 46), np.int32)
    rows[:, :6], segments[:, :6] = short, 1
    rows[0, 6:], segments[0, 6:] = long, 2
    together = forward(params, config, rows, segment_ids=segments)
    for row in together:
        np.testing.assert_allclose(row[:6], expected[0][0], atol=1e-6)
    np.testing.assert_allclose(together[0, 6:], expected[1][0], atol=1e-6)


@pytest.mark.parametrize("given, scale", [(0.0, 0.1 * math.log(4) + 1), (0.7, 0.7)])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_yarn_scales_the_rotated_part_of_queries_and_keys(given, scale, fraction):
    settings = {"rope.attention_factor": given, "rope.fraction": fraction}
    config = with_settings(
        jf.ModelConfig(), {**SMALL, "rope.scaling": "yarn", "rope.factor": 4.0, **settings}
    )
    x, positions = jnp.array(array(1, 5, 2, 16)), jnp.arange(5)[None]
    turned = layers.rope(x, positions, frequencies=FREQUENCIES["yarn"](config, positions))
    w = config.rotated_width
    expected = np.concatenate([scale * turned[..., :w], x[..., w:]], -1)
    np.testing.assert_allclose(rotate(config, x, positions), expected, atol=1e-5)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_fraction_of_a_head_turns_as_a_head_of_that_width(pairing):
    config = with_settings(
        jf.ModelConfig(), {**SMALL, "rope.fraction": 0.25, "rope.pairing": pairing}
    )
    x, positions = jnp.array(array(2, 5, 3, 16)), jnp.arange(5)[None] * 7
    found = rotate(config, x, jnp.broadcast_to(positions, (2, 5)))
    expected = layers.rope(x[..., :4], positions, pairing=pairing)
    np.testing.assert_allclose(found[..., :4], expected, atol=1e-5)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])


SLOPES = {  # Bloom's and MPT's tables; 6 and 12 are no powers of two
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2.0**-i for i in range(1, 9)],
    12: [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes_are_the_published_ones(heads):
    np.testing.assert_allclose(alibi_slopes(heads), SLOPES[heads], rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_adds_the_distance_times_each_heads_slope(causal):
    config = with_settings(
        jf.ModelConfig(), SMALL | {"positions": "alibi", "n_heads": 2, "d_model": 32}
    )
    queries, keys = (layout_of(jnp.zeros((1, n), jnp.int32), None, None) for n in (4, 6))
    found = score_bias(None, config, AttentionMask(queries, keys, causal))
    back = np.abs(np.arange(4)[:, None] - np.arange(6)[None])
    np.testing.assert_allclose(found[0], -back[None] * np.array([2**-4, 2**-8])[:, None, None])


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("buckets, far", [(32, 128), (8, 20)])
def test_t5_buckets_are_the_published_ones(both_ways, buckets, far):
    reference = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    torch = pytest.importorskip("torch")
    distance = np.arange(-200, 201)
    given = both_ways, buckets, far
    expected = reference._relative_position_bucket(torch.from_numpy(distance), *given)
    found = jax.jit(relative_bucket, static_argnums=(1, 2, 3))(distance, *given)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_the_t5_bias_is_the_row_of_its_bucket(causal):
    config = with_settings(
        jf.ModelConfig(),
        {**SMALL, "positions": "t5", "relative.buckets": 8, "relative.distance": 20},
    )
    segments = np.array([[1] * 12 + [2] * 15 + [0] * 3, [1] * 30])
    layout = layout_of(jnp.zeros((2, 30), jnp.int32), None, jnp.array(segments))
    table = array(8, 4)
    found = score_bias(jnp.array(table), config, AttentionMask(layout, layout, causal))
    distance = layout.positions[:, None, :] - layout.positions[:, :, None]
    expected = table[np.asarray(relative_bucket(distance, not causal, 8, 20))]
    assert found.shape == (1, 4, 30, 30)  # one for all rows, right within each segment
    together = (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None]
    expected = np.moveaxis(expected, -1, 1)
    whole = np.broadcast_to(found, expected.shape)
    seen = np.broadcast_to(together[:, None], expected.shape)
    np.testing.assert_allclose(whole[seen], expected[seen])


def test_positions_that_are_given_have_a_bias_of_their_own_in_each_row():
    config = with_settings(
        jf.ModelConfig(), SMALL | {"positions": "alibi", "n_heads": 2, "d_model": 32}
    )
    positions = jnp.array([[0, 1, 2, 3], [0, 2, 4, 9]])
    layout = layout_of(jnp.zeros((2, 4), jnp.int32), positions, None)
    found = score_bias(None, config, AttentionMask(layout, layout))
    back = np.abs(positions[:, None, :] - positions[:, :, None])
    slopes = np.array([2**-4, 2**-8])[None, :, None, None]
    np.testing.assert_allclose(found, -back[:, None] * slopes)


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("order", ["interleaved", "half", "half_closed"])
def test_sinusoids_are_their_formula(width, order):
    """Closed ones end with the lowest frequency, and with a zero where the width is odd."""
    positions = np.array([[0, 1, 5, 700]])
    index = np.arange(width // 2 if order == "half_closed" else -(-width // 2))
    exponent = index / index[-1] if order == "half_closed" else 2 * index / width
    angles = positions[..., None] / 10_000**exponent
    if order == "interleaved":
        expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(1, 4, -1)
    else:
        missing = np.zeros((1, 4, width % 2))
        expected = np.concatenate([np.sin(angles), np.cos(angles), missing], axis=-1)
    found = sinusoids(jnp.array(positions), width, order)
    np.testing.assert_allclose(found, expected[..., :width], atol=1e-4)


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


SCORES = [(0.0, 0.0, 0, 0), (0.7, 1.5, 1, 1), (0.0, 1.5, 0, 1), (0.7, 0.0, 1, 0)]


@pytest.mark.parametrize("scale, soft_cap, with_sinks, with_bias", SCORES)
def test_attention_is_its_formula_with_scale_soft_cap_bias_and_sinks(
    scale, soft_cap, with_sinks, with_bias
):
    q, k, v = array(2, 5, 4, 8), array(2, 6, 2, 8, seed=1), array(2, 6, 2, 3)
    bias, sinks = array(2, 4, 5, 6) if with_bias else None, array(4) if with_sinks else None
    mask = np.arange(6)[None] <= np.arange(5)[:, None]
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, 2)) * (scale or 8**-0.5)
    scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
    scores = np.where(mask, scores if bias is None else scores + bias, -np.inf)
    if with_sinks:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (2, 4, 5, 1))], -1)
    expected = np.einsum("bnts,bsnh->btnh", softmax(scores)[..., :6], np.repeat(v, 2, 2))
    found = layers.dot_product_attention(
        *map(jnp.array, (q, k, v, np.broadcast_to(mask, (2, 5, 6)))),
        scale=scale,
        soft_cap=soft_cap,
        bias=None if bias is None else jnp.array(bias),
        sinks=None if sinks is None else jnp.array(sinks),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


MASKS = {  # of six tokens in segments 1 1 1 2 2 and padding; of six in one segment
    "causal": ({}, ["x.....", "xx....", "xxx...", "...x..", "...xx.", "......"]),
    "both ways": ({"causal": False}, ["xxx...", "xxx...", "xxx...", "...xx.", "...xx.", "......"]),
    "window": ({"window": 2}, ["x.....", "xx....", ".xx...", "...x..", "...xx.", "......"]),
    "window both ways": (
        {"causal": False, "window": 2},
        ["xx....", "xxx...", ".xx...", "...xx.", "...xx.", "......"],
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_is_positions_and_segments(name):
    how, seen = MASKS[name]
    layout = layout_of(jnp.zeros((1, 6), jnp.int32), None, jnp.array([[1, 1, 1, 2, 2, 0]]))
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 0, 1, 0]])
    np.testing.assert_array_equal(
        visible(AttentionMask(layout, layout, **how))[0], [[c == "x" for c in row] for row in seen]
    )
    one = dataclasses.replace(layout, positions=jnp.arange(6)[None], segments=None)
    back = np.arange(6)[:, None] - np.arange(6)[None]
    causal, window = how.get("causal", True), how.get("window", 6)
    found = visible(AttentionMask(one, one, **how))
    expected = ((back >= 0) | (not causal)) & (np.abs(back) < window)
    assert found is None or (np.asarray(found)[0] == expected).all()
    assert (found is None) == expected.all()


@pytest.mark.parametrize("name", MASKS)
def test_every_token_sees_the_leading_keys_whatever_its_segment_and_the_window(name):
    how, seen = MASKS[name]
    layout = layout_of(jnp.zeros((1, 6), jnp.int32), None, jnp.array([[1, 1, 1, 2, 2, 0]])).after(2)
    np.testing.assert_array_equal(layout.positions, [[2, 3, 4, 2, 3, 2]])
    found = visible(AttentionMask(layout, layout, leading=2, **how))[0]
    padding = len(seen) - 1
    for query, row in enumerate(seen):
        lead = ".." if query == padding else "xx"
        assert "".join(".x"[int(key)] for key in found[query]) == lead + row


@pytest.mark.parametrize("buckets, far", [(256, 512), (6, 9), (32, 128)])
def test_rows_of_disentangled_positions_are_those_of_transformers(buckets, far):
    reference = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    torch = pytest.importorskip("torch")
    distance = np.arange(-3 * far, 3 * far + 1)
    signed = reference.make_log_bucket_position(torch.from_numpy(distance), buckets, far).long()
    expected = np.clip(signed.numpy() + buckets, 0, 2 * buckets - 1)
    np.testing.assert_array_equal(log_bucket(jnp.asarray(distance), buckets, far), expected)


def test_disentangled_scores_add_both_products_with_the_row_of_the_distance():
    """q_t . k_s + q_t . k'_r + k_s . q'_r, all times the scale."""
    sizes = SMALL | {"n_kv_heads": 2, "relative.buckets": 4, "relative.distance": 8}
    config = with_settings(
        jf.ModelConfig(), {**sizes, "positions": "disentangled", "attention.scale": 0.3}
    )
    q, k = array(2, 5, 4, 16), array(2, 5, 2, 16, seed=1)
    q_rows, k_rows = array(1, 8, 4, 16, seed=2), array(1, 8, 2, 16, seed=3)
    layout = layout_of(jnp.zeros((2, 5), jnp.int32), None, None)
    bias = disentangled_bias(config, (q, k), (q_rows, k_rows), AttentionMask(layout, layout))
    assert bias.shape == (2, 4, 5, 5) and bias.dtype == jnp.float32
    bias = np.asarray(bias)
    for head, query, key in [(0, 0, 0), (1, 4, 0), (3, 1, 3), (2, 2, 1)]:
        row = int(log_bucket(jnp.asarray(query - key), 4, 8))
        of_position = q[:, query, head] @ k_rows[0, row, head // 2]
        of_content = k[:, key, head // 2] @ q_rows[0, row, head]
        expected = 0.3 * (of_position + of_content)
        np.testing.assert_allclose(bias[:, head, query, key], expected, rtol=1e-5)
