"""Beam search: against all texts there are, against greedy decoding, and its scores against the
model's own."""

import functools
import itertools

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import PAD, inputs, loaded, reference
from products import slow_but
from scipy.special import log_softmax
from shapes import forward, strong

import jaxformer as jf
from jaxformer.generation.beam import beam_search, beam_search_steps

SMALL = dict(vocab_size=5, d_model=16, n_layers=1, n_heads=2, d_ff=24, max_length=64)
FAMILIES = {
    "decoder": jf.ModelConfig(**SMALL),
    "encoder_decoder": jf.ModelConfig(family="encoder_decoder", **SMALL),
}
ALL = 4**3 * 5  # beams that drop nothing: all texts of four tokens with no end before the last
END = 2


@functools.partial(jax.jit, static_argnums=0)
def drawn(config, seed):
    return strong(jf.init(config, jax.random.key(seed)), key=seed, size=0.4)


def tiny(family, seed=0):
    """Params with decided opinions, prompts [3, 2] and, for an encoder-decoder, sources [3, 4]."""
    config, rng = FAMILIES[family], np.random.default_rng(seed)
    params = drawn(config, seed)
    sources = {"source": rng.integers(0, 5, (3, 4))} if family == "encoder_decoder" else {}
    return params, config, rng.integers(0, 5, (3, 2)), sources


def log_probabilities(params, config, prompt, texts, sources):
    """Of each token of texts [M, n] after one prompt [T]: [M, n], by full forward passes."""
    both = np.concatenate([np.repeat(prompt[None], len(texts), 0), texts], axis=1)
    many = {name: np.repeat(row[None], len(texts), 0) for name, row in sources.items()}
    logits = np.asarray(forward(params, config, both, **many))[:, len(prompt) - 1 : -1]
    return np.take_along_axis(log_softmax(logits, axis=-1), texts[..., None], axis=-1)[..., 0]


def lengths_of(texts, end):
    """Tokens up to the end token, counted in; all where there is none."""
    ended = texts == end
    return np.where(ended.any(1), ended.argmax(1) + 1, texts.shape[1])


def exhaustive(params, config, prompt, sources, n, alpha, end):
    """(text, score) of every text there is, best first; after the end token the rest repeats it."""
    texts = np.array(list(itertools.product(range(5), repeat=n)))
    lengths = lengths_of(texts, end)
    logs = log_probabilities(params, config, prompt, texts, sources)
    inside = np.arange(n) < lengths[:, None]
    scores = (logs * inside).sum(1) / ((5 + lengths) / 6) ** alpha
    found = {tuple(np.where(inside[i], text, end)): scores[i] for i, text in enumerate(texts)}
    return sorted(found.items(), key=lambda item: -item[1])


def test_with_room_for_all_texts_the_best_of_all_are_found():
    alpha = 1.5
    params, config, prompt, sources = tiny("encoder_decoder")
    rules = {"beams": ALL, "keep": 10, "length_penalty": alpha, "end_token": END}
    found = beam_search(params, config, prompt, 4, **sources, **rules)
    assert found.tokens.shape == (3, 10, 4) and found.scores.shape == (3, 10)
    for row in range(3):
        own = {name: source[row] for name, source in sources.items()}
        texts, scores = zip(
            *exhaustive(params, config, prompt[row], own, 4, alpha, END)[:10], strict=True
        )
        np.testing.assert_allclose(found.scores[row], scores, atol=1e-4)
        np.testing.assert_array_equal(found.tokens[row], texts)


@pytest.mark.parametrize("family, end", [("decoder", END), ("encoder_decoder", None)])
def test_one_beam_without_a_penalty_is_greedy(family, end):
    for seed in range(4):
        params, config, prompt, sources = tiny(family, seed)
        rules = {"end_token": end} | sources
        found = beam_search(params, config, prompt, 12, beams=1, length_penalty=0.0, **rules)
        greedy = jf.generate(params, config, prompt, 12, temperature=0, **rules)
        np.testing.assert_array_equal(found.tokens[:, 0], greedy)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_log_probabilities_of_the_model_over_the_penalty(family):
    params, config, prompt, sources = tiny(family, 5)
    alpha = 0.8
    found = beam_search(
        params, config, prompt, 9, beams=4, length_penalty=alpha, end_token=END, **sources
    )
    for row, (texts, scores) in enumerate(
        zip(np.asarray(found.tokens), np.asarray(found.scores), strict=True)
    ):
        own = {name: source[row] for name, source in sources.items()}
        lengths = lengths_of(texts, END)
        logs = log_probabilities(params, config, prompt[row], texts, own)
        wanted = (logs * (np.arange(9) < lengths[:, None])).sum(1) / ((5 + lengths) / 6) ** alpha
        np.testing.assert_allclose(scores, wanted, atol=1e-4)
        assert (np.diff(scores) <= 0).all() and len({tuple(text) for text in texts}) == 4
        assert all(
            (text[length:] == END).all() for text, length in zip(texts, lengths, strict=True)
        )


@pytest.mark.parametrize("family, side", [("decoder", "left"), ("encoder_decoder", "right")])
def test_padded_rows_of_a_batch_are_searched_as_they_would_be_alone(family, side):
    params, config, prompt, sources = tiny(family, 3)
    prompt = np.concatenate([prompt, prompt[:, ::-1]], axis=1)

    def padded(rows, lengths):
        real = np.arange(rows.shape[1]) < np.array(lengths)[:, None]
        real = real if side == "right" else real[:, ::-1]
        out = np.zeros_like(rows)
        for row, length in enumerate(lengths):
            out[row, real[row]] = rows[row, :length]
        return out, real.astype(np.int32)

    rules = {"beams": 3, "end_token": END, "max_new_tokens": 10}
    lengths, source_lengths = (4, 2, 3), (2, 4, 1)
    tokens, real = padded(prompt, lengths)
    both = {}
    if sources:
        both["source"], both["source_segment_ids"] = padded(sources["source"], source_lengths)
    found = beam_search(params, config, tokens, segment_ids=real, **both, **rules)
    for row in (1, 2):
        own = {"source": sources["source"][row : row + 1, : source_lengths[row]]} if sources else {}
        alone = beam_search(params, config, prompt[row : row + 1, : lengths[row]], **own, **rules)
        np.testing.assert_array_equal(found.tokens[row], alone.tokens[0])
        np.testing.assert_allclose(found.scores[row], alone.scores[0], atol=1e-4)


def test_keeping_fewer_texts_gives_the_first_of_them():
    params, config, prompt, _ = tiny("decoder", 1)
    rules = {"beams": 5, "end_token": END, "length_penalty": 1.0}
    all_kept, best = (
        beam_search(params, config, prompt, 20, keep=keep, **rules) for keep in (0, 1)
    )
    np.testing.assert_array_equal(best.tokens[:, 0], all_kept.tokens[:, 0])
    np.testing.assert_allclose(best.scores[:, 0], all_kept.scores[:, 0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_steps_of_a_search_tell_how_its_texts_were_found(family):
    """Every candidate has the log-probability of the model; who follows the chosen ones finds the
    texts that the search returns."""
    params, config, prompt, sources = tiny(family, 1)
    n, b, alpha = 6, 3, 0.6
    rules = {"beams": b, "length_penalty": alpha, "end_token": END}
    found, steps = beam_search_steps(params, config, prompt, n, **sources, **rules)
    alone = beam_search(params, config, prompt, n, **sources, **rules)
    jax.tree.map(np.testing.assert_array_equal, found, alone)
    steps = type(steps)(*map(np.asarray, steps))
    assert 0 < steps.done <= n and np.isneginf(steps.log_probabilities[steps.done :]).all()
    for row in range(3):
        live, over, dead = [()] * b, {}, 0
        own = {name: source[row] for name, source in sources.items()}
        for i in range(steps.done):
            logs, scores = steps.log_probabilities[i, row], steps.scores[i, row]
            real = np.isfinite(logs)
            dead += (~real).sum()
            pairs = zip(steps.parents[i, row], steps.tokens[i, row], strict=True)
            texts = [(*live[parent], int(token)) for parent, token in pairs]
            wanted = log_probabilities(params, config, prompt[row], np.array(texts), own).sum(1)
            np.testing.assert_allclose(logs[real], wanted[real], atol=1e-4)
            for text, score, log in zip(texts, scores, logs, strict=True):
                if np.isfinite(score):
                    assert text[-1] == END and abs(score - log / ((6 + i) / 6) ** alpha) < 1e-5
                    over[text] = score
            live = [texts[place] for place in steps.chosen[i, row]]
            assert not any(END in text for text in live)
        assert dead  # of the first step, where one live text has five tokens alone
        for text, score in zip(found.tokens[row].tolist(), found.scores[row], strict=True):
            short = tuple(text[: text.index(END) + 1] if END in text else text)
            assert abs(over[short] - score) < 1e-5 if END in text else short in live


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"beams": 0}, "beams=0 must be from 1 to 1,024"),
        ({"beams": 2, "keep": 3}, "keep=3 must be from 0 to beams=2"),
        ({"temperature": 0.5, "top_k": 3}, "beam_search has no temperature, top_k"),
        ({"stop_strings": ("a",)}, "beam_search has no stop_strings"),
        ({"early_stopping": "always"}, "early_stopping='always' must be True, False or 'never'"),
        ({"length_divisor": "words"}, "length_divisor='words' must be one of gnmt, tokens"),
        ({"length_penalty": -1.0}, "length_penalty=-1.0 must be from 0 to 10"),
        ({"length_penalty": float("inf")}, "length_penalty=inf must be from 0 to 10"),
        ({"max_new_tokens": 63}, "max_length=64"),
        ({"source": np.zeros((3, 2), int)}, "source= is for an encoder-decoder"),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_words(changes, said):
    params, config, prompt, _ = tiny("decoder")
    with pytest.raises(jf.ConfigError, match=said):
        beam_search(params, config, prompt, **({"max_new_tokens": 4} | changes))


NEW, KEPT, WIDTH = 12, 3, 4


@functools.cache
def model_and_rows(name):
    """A model of transformers, its params and config here, the rows that it reads, and the tokens
    that it writes most."""
    rows = {key: inputs(name, seed=4)[key] for key in ("input_ids", "attention_mask")}
    if name == "llama":  # padding of a decoder is on the left
        rows = {"input_ids": rows["input_ids"][:, :6], "attention_mask": np.ones((3, 6), int)}
    texts, _ = theirs(name, rows, num_beams=1, num_return_sequences=1, no_repeat_ngram_size=2)
    ends = np.argsort(-np.bincount(texts.ravel()))[:2]
    return rows, [int(token) for token in ends]


def theirs(name, rows, **settings):
    """New tokens [rows, n] of transformers, and their scores (None where greedy)."""
    how = tf.GenerationConfig(
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=PAD,
        decoder_start_token_id=3,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    model = reference(name)
    before, model.generation_config = model.generation_config, how
    start = 1 if model.config.is_encoder_decoder else rows["input_ids"].shape[1]
    with torch.no_grad():
        made = model.generate(**{key: torch.from_numpy(value) for key, value in rows.items()})
    model.generation_config = before
    return made.sequences[:, start:].numpy(), getattr(made, "sequences_scores", None)


def searched(name, rows, settings):
    """What our search finds for the rows of a model of transformers."""
    params, config = loaded(name).params, loaded(name).config
    if name == "llama":
        return beam_search(params, config, rows["input_ids"], NEW, **settings)
    source = {"source": rows["input_ids"], "source_segment_ids": rows["attention_mask"]}
    return beam_search(params, config, [[3]] * 3, NEW, **source, **settings)


SEARCHES = [
    ("llama", 1.0, False, {}, 2),
    ("llama", 0.3, True, {"repetition_penalty": 1.4}, 1),
    ("marian", 0.3, "never", {}, 2),
    ("marian", 1.0, True, {}, 1),
    ("marian", 0.0, False, {"bad_words_ids": [[9, 8]], "min_length": 4}, 2),
]


@pytest.mark.parametrize(
    "name, penalty, early, rules, ends", slow_but(SEARCHES, SEARCHES[1], SEARCHES[2])
)
def test_the_best_texts_are_those_of_transformers(name, penalty, early, rules, ends):
    rows, common = model_and_rows(name)
    end = common[:ends]
    stated = {"num_beams": WIDTH, "num_return_sequences": KEPT, "length_penalty": penalty}
    stated |= {"early_stopping": early, "eos_token_id": end, "no_repeat_ngram_size": 2} | rules
    tokens, scores = theirs(name, rows, **stated)
    ours = {"beams": WIDTH, "keep": KEPT, "length_penalty": penalty, "early_stopping": early}
    ours |= {"length_divisor": "tokens", "end_token": tuple(end), "no_repeat_ngram_size": 2}
    ours |= {key.removesuffix("_ids"): value for key, value in rules.items()}
    if "bad_words" in ours:
        ours["bad_words"] = tuple(map(tuple, ours["bad_words"]))
    found = searched(name, rows, ours)

    def cut(text):
        """A text up to its end."""
        size = min((i + 1 for i, token in enumerate(text) if token in end), default=len(text))
        return text[:size]

    expected = [cut(row) for row in tokens.tolist()]
    assert [cut(row) for row in np.asarray(found.tokens).reshape(-1, NEW).tolist()] == expected
    np.testing.assert_allclose(np.asarray(found.scores).ravel(), scores, atol=2e-4)
    assert len({*map(len, expected)}) > 1  # texts of several lengths are compared
