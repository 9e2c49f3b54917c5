"""A mixer whose cache is a recurrent state: it decodes, packs, beams and takes the rows of texts
that have ended, and is not speculated with."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.generation import refill as refill_file

COUNT = 12
SIZES = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4, d_ff=48, max_length=64)

forward = jax.jit(jf.forward, static_argnums=1)
EACH = pytest.mark.parametrize("pattern", ["dm", "sm"])


def model(pattern, **changes):
    recurrent = jf.Recurrent(key_heads=2, chunk=4)
    settings = SIZES | {"layer_pattern": pattern, "recurrent": recurrent} | changes
    config = jf.ModelConfig(**settings)
    params = jf.init(config, jax.random.key(0))
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 2 else leaf, params), config


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, length, dtype=np.int32) for length in lengths]


def likeliest(params, config, prompt):
    """The greedy tokens after a prompt, by full forward passes, all of one length."""
    text = np.zeros((1, 32), np.int32)
    text[0, : len(prompt)] = prompt
    end = len(prompt) + COUNT
    for i in range(len(prompt), end):
        text[0, i] = forward(params, config, text)[0, i - 1].argmax()
    return text[0, len(prompt) : end].tolist()


@EACH
@pytest.mark.parametrize("loop", ["unroll", "scan"])
def test_cached_decoding_equals_the_full_forward(loop, pattern):
    params, config = model(pattern, layer_loop=loop)
    rows = np.stack(prompts_of(9, 9))
    made = jf.generate(params, config, rows, COUNT, temperature=0)
    logits = jf.forward(params, config, np.concatenate([rows, made], axis=1))
    np.testing.assert_array_equal(made, logits[:, 8:-1].argmax(-1))
    # Padding on either side changes nothing.
    padded, segments = np.zeros((2, 14), np.int32), np.zeros((2, 14), np.int32)
    padded[0, 5:], segments[0, 5:] = rows[0], 1
    padded[1, :9], segments[1, :9] = rows[1], 1
    again = jf.generate(params, config, padded, COUNT, segment_ids=segments, temperature=0)
    np.testing.assert_array_equal(again, made)


@EACH
def test_packed_rows_equal_separate_rows(pattern):
    params, config = model(pattern)
    first, second = prompts_of(7, 5)
    segments = np.repeat([[1, 2]], (7, 5), axis=1)
    row = np.concatenate([first, second])[None]
    packed = jf.forward(params, config, row, segment_ids=segments)
    np.testing.assert_allclose(packed[:, :7], jf.forward(params, config, first[None]), atol=1e-4)
    np.testing.assert_allclose(packed[:, 7:], jf.forward(params, config, second[None]), atol=1e-4)


@EACH
def test_beams_carry_the_state_of_the_text_they_continue(pattern):
    params, config = model(pattern)
    prompt = np.stack(prompts_of(9, 9))
    found = jf.beam_search(params, config, prompt, 4, beams=3, length_penalty=0.0)
    for row, tokens, scores in zip(prompt, found.tokens, found.scores, strict=True):
        text = np.concatenate([np.broadcast_to(row, (3, 9)), tokens], axis=1)
        logs = jax.nn.log_softmax(jf.forward(params, config, text)[:, 8:-1])
        expected = np.take_along_axis(logs, tokens[..., None], axis=-1).sum((1, 2))
        np.testing.assert_allclose(scores, expected, rtol=1e-4)
    one = jf.beam_search(params, config, prompt, COUNT, beams=1)
    greedy = jf.generate(params, config, prompt, COUNT, temperature=0)
    np.testing.assert_array_equal(one.tokens[:, 0], greedy)


@EACH
def test_a_prompt_takes_the_row_of_a_text_that_has_ended(pattern):
    params, config = model(pattern)
    prompts = prompts_of(9, 3, 17, 5)
    # Several texts of a prompt, which is read once, each go on with a state of their own.
    prompts.insert(1, prompts[0])
    texts = dict(refill_file.refill(params, config, prompts, COUNT, rows=2, temperature=0))
    assert texts == {i: likeliest(params, config, prompt) for i, prompt in enumerate(prompts)}


@EACH
def test_its_tokens_cannot_be_taken_back(pattern):
    params, config = model(pattern)
    with pytest.raises(
        jf.ConfigError, match=rf"layer_pattern='{pattern}' have a state.*jf\.generate"
    ):
        jf.speculate(params, config, np.stack(prompts_of(9)), temperature=0)
    plain = dataclasses.replace(config, layer_pattern="m", recurrent=jf.Recurrent())
    plain_params = jf.init(plain, jax.random.key(0))
    with pytest.raises(jf.ConfigError, match="no token can be taken"):
        jf.speculate(
            plain_params, plain, np.stack(prompts_of(9)), draft=(params, config), temperature=0
        )
