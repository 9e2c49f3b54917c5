"""Scores of texts against the logits of the model, for rows, segments, padding and sources."""

import jax
import numpy as np
import pytest
from families import params_of
from shapes import SIZES, forward, tokens, weights_and_tokens

import jaxformer as jf

scored = jax.jit(jf.score, static_argnums=1, static_argnames="top")


def test_a_score_is_the_log_probability_of_the_token_after_those_before_it():
    params, config, rows = weights_and_tokens("llama")
    logs = np.asarray(jax.nn.log_softmax(forward(params, config, rows)))
    scores = scored(params, config, rows, top=4)
    expected = np.take_along_axis(logs[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores.log_probs[:, 1:], expected, atol=1e-5)
    assert not scores.log_probs[:, 0].any() and not scores.is_scored[:, 0].any()
    assert scores.is_scored[:, 1:].all()
    order = np.argsort(-logs[:, :-1], axis=-1)[..., :4]
    np.testing.assert_array_equal(scores.alternatives[:, 1:], order)
    likeliest = np.take_along_axis(logs[:, :-1], order, -1)
    np.testing.assert_allclose(scores.alternative_log_probs[:, 1:], likeliest, atol=1e-5)
    assert scored(params, config, rows).alternatives.shape == (*rows.shape, 0)


def test_padding_and_the_first_token_of_a_segment_are_not_scored():
    params, config, rows = weights_and_tokens("gpt2")
    one, other = rows[:1, :7], rows[1:, :5]
    packed = np.concatenate([one, other, np.zeros((1, 3), int)], axis=1)
    segments = np.repeat([[1, 2, 0]], [7, 5, 3], axis=1)
    scores = scored(params, config, packed, segment_ids=segments)
    for text, start in ((one, 0), (other, 7)):
        alone = scored(params, config, text)
        found = scores.log_probs[:, start : start + text.shape[1]]
        np.testing.assert_allclose(found, alone.log_probs, atol=1e-5)
    assert not scores.is_scored[0, [0, 7, 12, 13, 14]].any() and scores.is_scored.sum() == 10


def test_the_likeliest_alternative_is_what_greedy_decoding_writes():
    config = jf.ModelConfig(family="encoder_decoder", **SIZES)
    params = params_of(config)
    source, start = tokens(seed=3), np.full((2, 1), 5)
    new = np.asarray(jf.generate(params, config, start, 6, source=source, temperature=0))
    text = np.concatenate([start, new], axis=1)
    scores = scored(params, config, text, top=1, source=source)
    np.testing.assert_array_equal(scores.alternatives[:, 1:, 0], new)
    likeliest = scores.alternative_log_probs[..., 0]
    np.testing.assert_allclose(likeliest[:, 1:], scores.log_probs[:, 1:], atol=1e-5)


def test_what_cannot_be_scored_has_one_message():
    params, config, rows = weights_and_tokens("gpt2")
    with pytest.raises(jf.ConfigError, match="top=62 must be from 0 to the 61 tokens"):
        jf.score(params, config, rows, top=62)
    encoder = jf.ModelConfig(family="encoder", **SIZES)
    with pytest.raises(jf.ConfigError, match="scores need the head 'language'"):
        jf.score(params_of(encoder), encoder, rows)
