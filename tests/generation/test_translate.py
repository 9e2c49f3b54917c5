"""Translation of many texts: each as it would be alone, whatever its batch; and the measure of
it."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from families import params_of
from shapes import strong

import jaxformer as jf
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import padded
from jaxformer.runs.run_evaluation import bleu_metric, translate
from jaxformer.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
CONFIG = jf.ModelConfig(
    family="encoder_decoder",
    vocab_size=260,
    d_model=16,
    n_layers=1,
    n_heads=2,
    d_ff=24,
    max_length=96,
    positions="learned",
)
PARAMS = jax.jit(lambda key: strong(jf.init(CONFIG, key), size=0.4))(jax.random.key(0))
TEXTS = ["ein Hund", "", "zwei Hunde laufen im Park", "a", "Eis", "ein Mann mit Hut", "Ja"]


def alone(text):
    """The best text of a beam search for one source, by the arguments that `translate`
    documents."""
    end = TOKENIZER.end_token
    source = [[*TOKENIZER.encode(text), end]]
    found = beam_search(
        PARAMS,
        CONFIG,
        [[end]],
        63,
        beams=3,
        end_token=end,
        vocab_size=TOKENIZER.vocab_size,
        source=source,
    )
    return TOKENIZER.decode(np.asarray(found.tokens[0, 0]))


def test_each_text_of_many_is_translated_in_its_place_as_it_would_be_alone():
    found = translate(PARAMS, CONFIG, TOKENIZER, TEXTS, beams=3, batch_size=3)
    assert found == [alone(text) for text in TEXTS]
    assert len(set(found)) > 3 and translate(PARAMS, CONFIG, TOKENIZER, []) == []


def test_a_text_that_exceeds_the_model_is_cut_in_words():
    text = "sehr lang " * 12
    with pytest.warns(UserWarning, match=r"1 of 2 texts are cut to the model\.max_length=96"):
        found = translate(PARAMS, CONFIG, TOKENIZER, [text, "a" * 95], beams=2)
    assert found[0] == translate(PARAMS, CONFIG, TOKENIZER, [text[:95]], beams=2)[0]


def test_a_source_longer_than_the_model_is_refused():
    with pytest.raises(jf.ConfigError, match=r"source of 97 tokens exceeds model\.max_length=96"):
        jf.generate(PARAMS, CONFIG, [[1]], 4, temperature=0, source=np.ones((1, 97), int))


def test_a_model_that_is_no_encoder_decoder_does_not_translate():
    config = dataclasses.replace(CONFIG, family="decoder")
    with pytest.raises(jf.ConfigError, match="encoder-decoder"):
        translate(params_of(config), config, TOKENIZER, ["a"])


def test_padding_fills_up_on_the_right():
    tokens, real = padded([[5], [6, 7, 8]])
    assert tokens.tolist() == [[5, 0, 0], [6, 7, 8]] and real.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_bleu_is_that_of_sacrebleu_by_a_tokenizer_that_can_be_chosen(monkeypatch):
    pytest.importorskip("sacrebleu")
    chinese = ["一只狗跑过宽阔的田野。", "两个男人站在那里。", "她在河边读一本书。"]
    assert bleu_metric("zh").corpus_score(chinese, [chinese]).score == pytest.approx(100)
    metric = bleu_metric()
    assert metric.corpus_score(chinese, [chinese]).score == 0
    texts = ["A dog runs across the wide field .", "Two men are standing there ."]
    assert metric.corpus_score(texts, [texts]).score == pytest.approx(100)
    assert "tok:13a" in str(metric.get_signature())
    with pytest.raises(jf.ConfigError, match=r"no BLEU tokenizer 'zhh': choose one of 13a"):
        bleu_metric("zhh")
    monkeypatch.setitem(sys.modules, "MeCab", None)
    with pytest.raises(jf.ConfigError, match=r"'ja-mecab' cannot be used here .* such as char"):
        bleu_metric("ja-mecab")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(jf.ConfigError, match=r'pip install "jaxformer\[translation\]"'):
        bleu_metric()
