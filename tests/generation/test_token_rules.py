"""Each row of the table of rules: its logits against those of transformers or of NumPy, its draws
against the distribution that NumPy computes, and its message for a bad value."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tf
from scipy import stats
from shapes import weights_and_tokens

import jaxformer as jf
from jaxformer.generation.decode import start
from jaxformer.generation.sampling import Sampling, choices, draw, tempered
from jaxformer.generation.text_so_far import TextSoFar

ROOT = Path(__file__).parents[2]
V, PROMPT, NEW, LIMIT = 40, 6, 5, 9
RNG = np.random.default_rng(0)
# A small alphabet, so that tokens and pairs of them repeat.
TEXTS = RNG.integers(0, 8, (3, PROMPT + NEW))
LOGITS = (3 * RNG.normal(size=(3, V))).astype(np.float32)
END = 7


def written(count=NEW):
    prompt = TextSoFar.prompt(
        jnp.asarray(TEXTS[:, :PROMPT]), jnp.ones((3, PROMPT), int), PROMPT + LIMIT, LIMIT
    )
    for token in TEXTS[:, PROMPT : PROMPT + count].T:
        prompt = prompt.add(jnp.asarray(token))
    return prompt


def counted(text, logits, a, b):
    """OpenAI's presence and frequency penalties, over the new tokens."""
    counts = np.stack([np.bincount(row[PROMPT:], minlength=V) for row in text])
    return logits - a * (counts > 0) - b * counts


WORDS = ((3,), (END,), (int(TEXTS[0, -1]), 5), (int(TEXTS[1, -2]), int(TEXTS[1, -1]), 9), (30, 2))


def callers(logits, tokens):
    return logits.at[:, tokens[:, -1]].add(1.0)


# The settings of each rule, and what they should give from texts and logits.
CASES = {
    "repetition_penalty": ({"repetition_penalty": 1.3}, tf.RepetitionPenaltyLogitsProcessor(1.3)),
    "presence_penalty": (
        {"presence_penalty": 0.7},
        lambda text, logits: counted(text, logits, 0.7, 0),
    ),
    "frequency_penalty": (
        {"frequency_penalty": -0.4, "presence_penalty": 1.5},
        lambda text, logits: counted(text, logits, 1.5, -0.4),
    ),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, tf.NoRepeatNGramLogitsProcessor(2)),
    "bad_words": (
        {"bad_words": WORDS, "end_token": END},
        tf.NoBadWordsLogitsProcessor([list(word) for word in WORDS], END),
    ),
    "min_length": (
        {"min_length": PROMPT + NEW + 1, "end_token": END},
        tf.MinLengthLogitsProcessor(PROMPT + NEW + 1, END),
    ),
    "min_new_tokens": (
        {"min_new_tokens": NEW + 1, "end_token": END},
        tf.MinNewTokensLengthLogitsProcessor(PROMPT, NEW + 1, END),
    ),
    "suppress_tokens": ({"suppress_tokens": (1, 30)}, tf.SuppressTokensLogitsProcessor([1, 30])),
    "begin_suppress_tokens": (
        {"begin_suppress_tokens": (1, 30)},
        tf.SuppressTokensAtBeginLogitsProcessor([1, 30], PROMPT),
    ),
    "forced_eos_token_id": (
        {"forced_eos_token_id": END},
        tf.ForcedEOSTokenLogitsProcessor(PROMPT + LIMIT, END),
    ),
    "rule": (
        {"rule": callers},
        lambda text, logits: np.asarray(callers(jnp.asarray(logits), jnp.asarray(text))),
    ),
    "temperature": ({"temperature": 0.6}, tf.TemperatureLogitsWarper(0.6)),
    "top_k": ({"top_k": 7}, tf.TopKLogitsWarper(7)),
    "top_p": ({"top_p": 0.8}, tf.TopPLogitsWarper(0.8)),
    "min_p": ({"min_p": 0.1}, tf.MinPLogitsWarper(0.1)),
}
# The new tokens so far, where they are not NEW.
COUNTS = {"begin_suppress_tokens": 0, "forced_eos_token_id": LIMIT - 1}


def test_every_rule_has_a_case_and_a_row_of_the_page():
    assert {*Sampling.values} == {*CASES, "end_token"}
    page = (ROOT / "docs/generation.md").read_text(encoding="utf-8")
    assert all(f"\n| `{name}` |" in page for name in Sampling.values)


@functools.cache
def texts(count):
    """Texts with `count` new tokens, which are more than those of TEXTS where that is longer."""
    extra = np.tile(TEXTS[:, :1], (1, max(0, count - NEW)))
    return np.concatenate([TEXTS, extra], axis=1)[:, : PROMPT + count]


def of_rules(settings, count):
    state = written(min(count, NEW))
    for _ in range(count - NEW):
        state = state.add(jnp.asarray(TEXTS[:, 0]))
    return np.asarray(jax.jit(lambda z: choices(z, Sampling(**settings), state))(LOGITS))


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_a_rule_are_those_of_transformers(name):
    settings, expected = CASES[name]
    count = COUNTS.get(name, NEW)
    of_torch = isinstance(expected, tf.LogitsProcessor)
    given = texts(count), LOGITS
    ours = of_rules(settings, count)
    theirs = expected(*map(torch.tensor, given)).numpy() if of_torch else expected(*given)
    assert (theirs != LOGITS).any()  # the case uses the rule
    # The largest logit is subtracted from all at a temperature: the distribution is the same.
    ours, theirs = (z - z.max(axis=1, keepdims=True) for z in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_all_rules_together_are_applied_in_the_order_of_transformers():
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words": ((3,), (30, 2))}
    settings |= {"min_new_tokens": NEW + 2, "end_token": END, "suppress_tokens": (1,)}
    settings |= {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
    processors = tf.LogitsProcessorList(
        [
            tf.RepetitionPenaltyLogitsProcessor(1.3),
            tf.NoRepeatNGramLogitsProcessor(2),
            tf.NoBadWordsLogitsProcessor([[3], [30, 2]], END),
            tf.MinNewTokensLengthLogitsProcessor(PROMPT, NEW + 2, END),
            tf.SuppressTokensLogitsProcessor([1]),
            tf.TemperatureLogitsWarper(1.7),
            tf.TopKLogitsWarper(20),
            tf.TopPLogitsWarper(0.9),
            tf.MinPLogitsWarper(0.05),
        ]
    )
    theirs = processors(torch.tensor(TEXTS), torch.tensor(LOGITS)).softmax(-1).numpy()
    ours = jax.nn.softmax(of_rules(settings, NEW))
    assert (theirs > 0).sum(1).min() > 1 and (theirs > 0).sum(1).max() < 20
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def numpy_probabilities(logits, settings):
    """The distribution of a draw, by its definition."""
    logits = logits.astype(np.float64) / settings.get("temperature", 1.0)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = np.ones(len(p), bool)
    if "top_k" in settings:
        kept[order[settings["top_k"] :]] = False
    if "top_p" in settings:
        before = np.cumsum(p[order]) - p[order]
        kept[order[before >= settings["top_p"]]] = False
    if "min_p" in settings:
        kept &= p >= settings["min_p"] * p.max()
    p = np.where(kept, p, 0)
    return p / p.sum()


SAMPLERS = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}]


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_draws_have_the_distribution_of_their_definition(settings):
    logits, count = LOGITS[0, :12], 20_000
    many = jnp.broadcast_to(logits, (count, len(logits)))
    drawn = jax.jit(lambda z, key: draw(z, key, Sampling(**settings)))(many, jax.random.key(3))
    observed, expected = (
        np.bincount(np.asarray(drawn), minlength=len(logits)),
        count * numpy_probabilities(logits, settings),
    )
    assert not observed[expected == 0].any()
    likely = expected > 5
    totals = [np.append(x[likely], x[~likely].sum()) for x in (observed, expected)]
    totals = [x[totals[1] > 0] for x in totals]
    assert stats.chisquare(*totals).pvalue > 1e-3


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"min_p": 1.5}, r"min_p=1.5 must be from 0 to 1"),
        ({"top_p": 0.0}, r"top_p=0.0 must be above 0 and at most 1"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0 must be above 0"),
        ({"presence_penalty": 3}, r"presence_penalty=3 must be from -2 to 2"),
        ({"frequency_penalty": "a"}, r"frequency_penalty='a' must be from -2 to 2"),
        ({"bad_words": ((),)}, r"bad_words=\(\(\),\) must be a tuple of tuples of token ids"),
        ({"rule": 3}, r"rule=3 must be a function"),
        ({"suppress_tokens": [1]}, r"suppress_tokens=\[1\] must be a tuple of token ids"),
        ({"begin_suppress_tokens": (1.5,)}, r"begin_suppress_tokens=\(1.5,\) must be a tuple"),
        ({"min_length": -1}, r"min_length=-1 must be a whole number, at least 0"),
        ({"min_p": 2, "top_k": -1}, r"top_k=-1 must be .*; min_p=2 must be"),
    ],
    ids=lambda value: "",
)
def test_a_bad_value_has_one_message(settings, said):
    with pytest.raises(jf.ConfigError, match=said):
        Sampling(**settings)


def test_a_text_follows_penalties_and_a_rule_of_the_caller():
    params, config, prompt = weights_and_tokens("llama")

    def forward_only(logits, tokens):
        """Only tokens above the newest one, as long as there are any."""
        allowed = jnp.arange(logits.shape[-1]) > tokens[:, -1:]
        return jnp.where(allowed | ~allowed.any(1, keepdims=True), logits, -jnp.inf)

    made = np.asarray(
        jf.generate(params, config, prompt[:, :3] % 9, 8, temperature=0, rule=forward_only)
    )
    before = np.concatenate([prompt[:, 2:3] % 9, made[:, :-1]], axis=1)
    assert ((made > before) | (before == config.vocab_size - 1)).all()
    free = np.asarray(jf.generate(params, config, prompt, 30, temperature=0))
    varied = np.asarray(
        jf.generate(params, config, prompt, 30, temperature=0, frequency_penalty=2.0)
    )
    assert max(map(len, map(set, free))) < min(map(len, map(set, varied)))
    with pytest.raises(jf.ConfigError, match=r"returned an array \[2\]"):
        jf.generate(params, config, prompt, 2, temperature=0, rule=lambda z, _: z[:, 0])


def test_a_rule_that_is_off_leaves_the_program_as_it_is():
    params, config, prompt = weights_and_tokens("gpt2")
    stream = start(params, config, prompt, 4, jax.random.key(0))

    def program(rules):
        return jax.jit(lambda logits, written: choices(logits, rules, written)).lower(
            stream.logits, stream.written
        )

    plain = jax.jit(lambda logits, written: tempered(logits, 1.0))
    plain = plain.lower(stream.logits, stream.written).as_text()
    assert program(Sampling()).as_text() == plain
    assert program(Sampling(min_p=0.1)).as_text() != program(Sampling()).as_text()


def test_n_texts_of_a_prompt_are_draws_of_their_own_and_read_it_once():
    params, config, prompt = weights_and_tokens("llama")
    rules = {"key": jax.random.key(4), "temperature": 0.8, "top_k": 20}
    made = np.asarray(jf.generate(params, config, prompt, 9, n=3, **rules))
    assert made.shape == (6, 9) and len({tuple(row) for row in made}) == 6
    repeated = np.asarray(jf.generate(params, config, np.repeat(prompt, 3, axis=0), 9, **rules))
    np.testing.assert_array_equal(made, repeated)
