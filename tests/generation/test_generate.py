"""Generation: cached decoding against the model without a cache, the sampling rules, padding, ends
and streams."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import slow_but
from shapes import MODELS, VOCABULARY, forward, weights_and_tokens

import jaxformer as jf
from jaxformer.generation.decode import decode, fitted, start, stream_tokens
from jaxformer.generation.sampling import Sampling, draw
from jaxformer.generation.weights import prepared

KEY = jax.random.key(7)


def greedy_without_cache(params, config, prompt, count):
    """The likeliest token again and again, each by a full forward pass over a fixed width."""
    text = np.zeros((len(prompt), prompt.shape[1] + count), np.int32)
    text[:, : prompt.shape[1]] = prompt
    for at in range(prompt.shape[1], text.shape[1]):
        text[:, at] = np.asarray(forward(params, config, text))[:, at - 1].argmax(-1)
    return text[:, prompt.shape[1] :]


@pytest.mark.parametrize(
    "name", slow_but(MODELS, "llama", "gpt2", "experts in groups after a dense layer")
)
def test_greedy_generation_equals_the_model_without_a_cache(name):
    params, config, prompt = weights_and_tokens(name)
    found = jf.generate(params, config, prompt[:, :9], max_new_tokens=12, temperature=0)
    assert found.dtype == jnp.int32 and found.shape == (2, 12)
    np.testing.assert_array_equal(found, greedy_without_cache(params, config, prompt[:, :9], 12))


def test_layers_in_a_loop_write_the_same_text():
    params, config, prompt = weights_and_tokens("llama")
    looped = dataclasses.replace(config, layer_loop="scan")
    assert prepared(params, looped) is params
    found = jf.generate(params, looped, prompt[:, :9], max_new_tokens=12, temperature=0)
    np.testing.assert_array_equal(found, greedy_without_cache(params, config, prompt[:, :9], 12))


def test_layers_in_a_loop_are_compiled_once():
    def products(layers, loop):
        _, config, prompt = weights_and_tokens("llama")
        config = dataclasses.replace(config, n_layers=layers, layer_loop=loop)
        params = jf.init(config, jax.random.key(0))
        weights = prepared(params, config)
        stream = start(params, config, prompt[:, :9], 4, KEY)
        program = decode.lower(weights, config, Sampling(temperature=0), 4, stream, True).compile()
        return program.as_text().count("dot(")

    assert products(3, "scan") == products(2, "scan") < products(3, "unroll")


@pytest.mark.parametrize("name, side", [("llama", "left"), ("gpt2", "right")])
def test_a_padded_prompt_continues_as_it_would_alone(name, side):
    params, config, prompt = weights_and_tokens(name)
    long, short = prompt[:1, :11], prompt[1:, :6]
    pad = ((0, 0), (5, 0) if side == "left" else (0, 5))
    both = np.concatenate([long, np.pad(short, pad)])
    real = np.concatenate([np.ones_like(long), np.pad(np.ones_like(short), pad)])
    found = jf.generate(params, config, both, max_new_tokens=8, temperature=0, segment_ids=real)
    np.testing.assert_array_equal(found[:1], greedy_without_cache(params, config, long, 8))
    np.testing.assert_array_equal(found[1:], greedy_without_cache(params, config, short, 8))


def test_a_stream_gives_the_tokens_of_generate():
    params, config, prompt = weights_and_tokens("llama")
    rules = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}
    whole = jf.generate(params, config, prompt, max_new_tokens=13, key=KEY, **rules)
    pieces = list(stream_tokens(params, config, prompt, 13, key=KEY, chunk=5, **rules))
    assert [piece.shape[1] for piece in pieces] == [5, 5, 3]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


def test_int8_is_read_by_wider_vectors_and_writes_the_text_of_its_arrays():
    params, config, prompt = weights_and_tokens("llama")
    codes = jf.quantize(params, "int8")
    assert fitted(prepared(params, config)) is decode
    assert fitted(prepared(codes, config)) is not decode
    found = jf.generate(codes, config, prompt[:, :9], max_new_tokens=8, temperature=0)
    np.testing.assert_array_equal(found, greedy_without_cache(codes, config, prompt[:, :9], 8))

    def written(codes):
        return jf.generate(codes, config, prompt[:, :9], 12, temperature=0)

    np.testing.assert_array_equal(jax.jit(written)(codes), written(codes))


@pytest.mark.parametrize("count, reads", [(1, False), (2, True)])
def test_the_last_token_is_not_read(count, reads):
    """One token takes the logits of the prompt and no step of the model."""
    params, config, prompt = weights_and_tokens("gpt2")
    stream = start(params, config, prompt, count, KEY)
    rules = Sampling(temperature=0)
    program = decode.lower(prepared(params, config), config, rules, count, stream, True).as_text()
    assert ("dot_general" in program) == reads


def test_a_row_stops_at_whichever_of_several_end_tokens_comes_first():
    params, config, prompt = weights_and_tokens("llama")
    free = np.asarray(jf.generate(params, config, prompt, 12, temperature=0))
    several = (int(free[0, 6]), int(free[1, 3]))
    stopped = jf.generate(params, config, prompt, 12, temperature=0, end_token=several)
    for row, found in zip(free, stopped, strict=True):
        at = next(place for place, token in enumerate(row) if token in several)
        np.testing.assert_array_equal(found, [*row[: at + 1], *[several[0]] * (11 - at)])


def test_the_same_key_gives_the_same_text_and_another_key_another():
    params, config, prompt = weights_and_tokens("llama")
    keys = (jax.random.key(seed) for seed in (0, 0, 1))
    a, b, c = (jf.generate(params, config, prompt, 20, key=key) for key in keys)
    np.testing.assert_array_equal(a, b)
    assert (np.asarray(a) != np.asarray(c)).any()


def test_a_sampled_row_does_not_depend_on_its_neighbors():
    params, config, prompt = weights_and_tokens("llama")
    rules = {"key": jax.random.key(3), "temperature": 1.0}
    alone = jf.generate(params, config, prompt[:1], 12, **rules)
    others = np.concatenate([prompt[:1], (prompt + 1) % VOCABULARY, prompt[::-1]])
    np.testing.assert_array_equal(jf.generate(params, config, others, 12, **rules)[:1], alone)


SMALLEST = [1e-38, 5e-324]


@pytest.mark.parametrize(
    "rules",
    [{"temperature": value} for value in SMALLEST]
    + [{"top_p": value} for value in SMALLEST]
    + [{"temperature": 1e-38, "top_p": 1e-45, "top_k": 2}, {"temperature": 1e308, "top_k": 1}],
)
def test_the_least_temperature_and_probability_draw_the_likeliest_token(rules):
    """They are numbers that float32 rounds to 0, or whose quotients it rounds to infinity."""
    logits = jnp.array([[1.0, 4.0, 3.0, -2.0], [-9.0, -8.0, -8.5, -7.0], [900.0, 0.0, 901.0, 1.0]])
    for compiled in (draw, jax.jit(draw, static_argnums=2)):
        found = compiled(logits, KEY, Sampling(vocab_size=4, **rules))
        np.testing.assert_array_equal(found, [1, 3, 2])


@pytest.mark.parametrize("temperature", [1e30, 1e308])
def test_the_largest_temperatures_draw_every_token_alike_and_no_padding(temperature):
    logits = jnp.broadcast_to(jnp.array([0.0, 50.0, -50.0, 9.0, 99.0]), (40_000, 5))
    rules = Sampling(temperature=temperature, vocab_size=4)
    share = np.bincount(np.asarray(jax.jit(draw, static_argnums=2)(logits, KEY, rules))) / 40_000
    np.testing.assert_allclose(share, [0.25] * 4, atol=0.01)


def test_padding_ids_of_the_table_are_never_drawn():
    params, config, prompt = weights_and_tokens("llama")
    drawn = jf.generate(params, config, prompt, 30, key=KEY, temperature=3.0, vocab_size=5)
    assert int(drawn.max()) < 5 <= VOCABULARY


@pytest.mark.parametrize(
    "prompt, changes, said",
    [
        (np.zeros((1, 0), int), {}, "empty"),
        (np.zeros((1, 60), int), {"max_new_tokens": 10}, "max_length=64"),
        (np.full((1, 3), VOCABULARY), {}, f"0 .. {VOCABULARY - 1}"),
        (np.zeros((1, 3)), {}, "integer"),
        (np.zeros((1, 3), int), {"temperature": -1.0}, "temperature"),
        (np.zeros((1, 3), int), {"top_p": 0.0}, "top_p"),
        (np.zeros((1, 3), int), {"key": None}, "key"),
        (np.zeros((2, 3), int), {"segment_ids": np.array([[1, 1, 1], [0, 0, 0]])}, "empty"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_in_words(prompt, changes, said):
    params, config, _ = weights_and_tokens("llama")
    with pytest.raises(jf.ConfigError, match=said):
        jf.generate(params, config, prompt, **({"key": KEY, "max_new_tokens": 4} | changes))


def test_weights_that_are_not_numbers_write_no_text():
    params, config, prompt = weights_and_tokens("llama")
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    with pytest.raises(jf.ConfigError, match="the logits after the prompt are NaN"):
        jf.generate(broken, config, prompt, max_new_tokens=4, temperature=0)


def test_a_mesh_with_explicit_axes_is_refused_by_name():
    config = jf.ModelConfig(vocab_size=VOCABULARY, d_model=8, n_layers=1, n_heads=2)
    params = jf.init(config, jax.random.key(0))
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(jf.ConfigError, match=r"explicit axes, .* make it by jf\.make_mesh"),
    ):
        prepared(params, config)
