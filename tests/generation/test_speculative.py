"""Speculative decoding: the tokens of greedy decoding, and the distribution of the model, whatever
proposes the tokens."""

import functools
import itertools

import jax
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax
from shapes import SIZES, forward, model, strong, weights_and_tokens

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.generation.decode import start
from jaxformer.generation.sampling import Sampling
from jaxformer.generation.speculative import _speculate, speculate
from jaxformer.generation.weights import prepared

TINY = jf.ModelConfig(vocab_size=5, d_model=16, n_layers=1, n_heads=2, d_ff=24, max_length=64)


@jax.jit
def tiny(seed):
    return strong(jf.init(TINY, jax.random.key(seed)), key=seed, size=0.3)


@functools.cache
def draft_of(name):
    """A draft like the model of this name that often agrees with it."""
    params, config, _ = weights_and_tokens(name)
    return jax.tree.map(lambda w: w * 1.1, params), config


@pytest.mark.parametrize(
    "name, draft, window",
    [
        pytest.param("llama", "itself", 0, marks=pytest.mark.slow),
        ("llama", "another", 6),
        ("gpt2", "look-up", 0),
        pytest.param("gpt2", "another", 0, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_generate(name, draft, window):
    params, config, prompt = weights_and_tokens(name, **({"window": window} if window else {}))
    models = {"itself": (params, config), "another": draft_of(name), "look-up": None}
    # The text fills the context, so that the last rounds propose tokens beyond it.
    prompt, count = prompt[:, :-1], config.max_length - prompt.shape[1] + 1
    real = np.ones_like(prompt)
    real[1, :5] = 0
    rules = {"temperature": 0, "segment_ids": real, "no_repeat_ngram_size": 4, "end_token": 11}
    plain = np.asarray(jf.generate(params, config, prompt, count, **rules))
    made = speculate(params, config, prompt, count, draft=models[draft], ahead=3, **rules)
    np.testing.assert_array_equal(made.tokens, plain)
    lengths = [row.index(11) + 1 if 11 in row else count for row in plain.tolist()]
    assert -(-(max(lengths) - 1) // 4) <= made.rounds < max(lengths)
    if draft == "itself":  # all that it proposes is kept, but for what rounding changes
        assert made.rounds <= -(-(max(lengths) - 1) // 4) + 2


def exact(params, prompt, count):
    """The probability of each text of `count` tokens after the prompt."""
    texts = np.array(list(itertools.product(range(5), repeat=count)))
    rows = np.concatenate([np.repeat(prompt, len(texts), axis=0), texts], axis=1)
    logits = np.asarray(forward(params, TINY, rows))[:, prompt.shape[1] - 1 : -1]
    chosen = np.take_along_axis(log_softmax(logits, axis=-1), texts[..., None], axis=-1)
    return np.exp(chosen[..., 0].sum(1))


@pytest.mark.parametrize(
    "draft, rows", [("another", 2), pytest.param("look-up", 1, marks=pytest.mark.slow)]
)
def test_texts_have_the_distribution_of_the_model(draft, rows):
    params, prompt, count, draws = tiny(0), np.array([[1, 2, 3, 1, 2]]), 3, 4000
    models = [params, tiny(1)] if draft == "another" else [params]
    weights = tuple(prepared(model, TINY) for model in models)
    rows_of = np.repeat(prompt, rows, 0)
    streams = [start(model, TINY, rows_of, count, jax.random.key(0), spare=2) for model in models]
    configs = (TINY,) * len(models)

    @jax.jit
    @jax.vmap
    def texts(key):
        first = streams[0].replace(key=key)
        made = _speculate(weights, configs, Sampling(), 2, count, (first, *streams[1:]))
        return made.tokens, made.accepted

    tokens, accepted = map(np.asarray, texts(jax.random.split(jax.random.key(5), draws)))
    assert 0.1 * draws < accepted.sum() < rows * (count - 1) * draws
    expected = draws * exact(params, prompt, count)
    for row in range(rows):
        codes = tokens[:, row] @ 5 ** np.arange(count)[::-1]
        observed = np.bincount(codes, minlength=5**count)
        likely = expected > 5
        counts = [np.append(x[likely], x[~likely].sum()) for x in (observed, expected)]
        assert stats.chisquare(*counts, sum_check=False).pvalue > 1e-3


def test_rules_and_several_texts_hold_in_rounds():
    params, config, prompt = weights_and_tokens("llama")
    rules = {"key": jax.random.key(2), "temperature": 1.5, "suppress_tokens": (*range(0, 61, 2),)}
    made = speculate(params, config, prompt, 9, n=3, min_p=0.01, frequency_penalty=0.5, **rules)
    tokens = np.asarray(made.tokens)
    assert tokens.shape == (6, 9) and (tokens % 2).all()
    assert len({tuple(row) for row in tokens}) == 6


def test_a_draft_that_cannot_be_has_one_message():
    params, config, prompt = weights_and_tokens("llama")
    other = model("llama", vocab_size=60)
    with pytest.raises(jf.ConfigError, match="vocab_size=60, and the model 61: a draft must have"):
        speculate(params, config, prompt, 4, draft=(params, other), temperature=0)
    with pytest.raises(jf.ConfigError, match="ahead=0 must be from 1 to 64"):
        speculate(params, config, prompt, 4, ahead=0, temperature=0)
    encoder = with_settings(jf.ModelConfig(), {"family": "encoder_decoder", **SIZES})
    with pytest.raises(jf.ConfigError, match="a model has model\\.family="):
        speculate(params, encoder, prompt, 4, temperature=0)
    with pytest.raises(jf.ConfigError, match="needs key="):
        speculate(params, config, prompt, 4)
    scaling = {"rope.scaling": "dynamic", "rope.factor": 2.0, "rope.original_length": 32}
    with pytest.raises(jf.ConfigError, match=r"beyond 32 tokens \(here 37\).*jf.generate"):
        speculate(params, model("llama", **scaling), prompt, 9, ahead=4, temperature=0)
