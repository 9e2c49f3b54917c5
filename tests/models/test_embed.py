"""Vectors of texts: pooled by hand and by transformers, and the same wherever padding stands."""

import io
import json

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from family_runs import TOKENIZER, printed, write_run
from pretrained import folder, inputs, made
from pretrained_variants import BERT
from shapes import made as params_of
from shapes import model, tokens

import jaxformer as jf
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden

embed = jax.jit(jf.embed, static_argnums=1, static_argnames=("pooling", "normalize"))
ENCODER = model("llama", family="encoder", **{"head.kind": "none"})
DECODER = model("llama", **{"head.kind": "none"})


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_a_vector_is_pooled_over_the_tokens_that_are_no_padding(pooling):
    params, rows = params_of(ENCODER), tokens(3)
    real = np.ones_like(rows)
    real[0, :4], real[1, 15:] = 0, 0
    batch = {"tokens": rows, "segment_ids": real}
    stream = jax.jit(lambda params: hidden(params, ENCODER, inputs_of(batch)).x)
    x = np.asarray(stream(params), np.float64)
    pick = {
        "mean": lambda row, some: row[some == 1].mean(0),
        "first": lambda row, some: row[some == 1][0],
        "last": lambda row, some: row[some == 1][-1],
    }[pooling]
    expected = np.stack([pick(row, some) for row, some in zip(x, real, strict=True)])
    options = {"pooling": pooling, "segment_ids": real}
    vectors = embed(params, ENCODER, rows, normalize=False, **options)
    assert vectors.dtype == np.float32 and vectors.shape == (3, 32)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(embed(params, ENCODER, rows, **options), unit, atol=1e-6)


@pytest.mark.parametrize("config, left", [(ENCODER, 5), (DECODER, 5), (model("gpt2"), 0)])
def test_padding_and_neighbors_change_no_vector(config, left):
    params, short = params_of(config), tokens(1, 11, seed=3)
    rows, real = tokens(2), np.ones((2, 24), np.int32)
    real[1] = 0
    real[1, left : left + 11] = 1
    rows[1, left : left + 11] = short
    alone = embed(params, config, short)
    np.testing.assert_allclose(embed(params, config, rows, segment_ids=real)[1:], alone, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_a_row_of_padding_has_the_vector_zero_and_a_finite_gradient(pooling):
    real = np.array([[1] * 24, [0] * 24])
    rows = tokens(2)

    def total(params):
        return jf.embed(params, ENCODER, rows, segment_ids=real, pooling=pooling).sum(), None

    params = params_of(ENCODER)
    vectors = embed(params, ENCODER, rows, segment_ids=real, pooling=pooling)
    assert np.asarray(vectors)[0].any() and not np.asarray(vectors)[1].any()
    gradient = jax.jit(jax.grad(total, has_aux=True))(params)[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_auto_is_the_pooling_of_the_model_or_else_the_mean():
    params, rows = params_of(ENCODER), tokens(2)
    mean, last = (embed(params, ENCODER, rows, pooling=name) for name in ("mean", "last"))
    by_last = model("llama", family="encoder", **{"head.kind": "none", "head.pooling": "last"})
    np.testing.assert_array_equal(embed(params, ENCODER, rows), mean)
    np.testing.assert_array_equal(embed(params, by_last, rows), last)


@pytest.mark.parametrize(
    "config, options, message",
    [
        (model("llama", family="encoder_decoder"), {}, "has no vector of a text"),
        (ENCODER, {"pooling": "max"}, "is not one of auto, first, last, mean"),
        (DECODER, {"pooling": "first"}, "sees itself alone"),
        (DECODER, {"segment_ids": np.array([[1] * 12 + [2] * 12] * 2)}, "several texts in a row"),
        (ENCODER, {"token_types": tokens(2)}, "model.embedding.token_types, which is 0"),
    ],
)
def test_what_has_no_vector_is_refused(config, options, message):
    with pytest.raises(jf.ConfigError, match=message):
        jf.embed(params_of(ENCODER), config, tokens(2), **options)


def test_vectors_of_a_bert_are_those_of_transformers():
    """As sentence-transformers computes them: the mean of the last states, of length 1."""
    theirs = made(tf.BertModel, BERT, seed=5)
    theirs.save_pretrained(folder("bert", "vectors"))
    ours, batch = jf.load(folder("bert", "vectors")), inputs("bert masked")
    with torch.no_grad():
        arrays = {name: torch.from_numpy(rows) for name, rows in batch.items()}
        states = theirs(**arrays).last_hidden_state
    mask = torch.from_numpy(batch["attention_mask"])[..., None]
    means = (states * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(means, dim=1).numpy()
    vectors = embed(
        ours.params,
        ours.config,
        batch["input_ids"],
        segment_ids=batch["attention_mask"],
        token_types=batch["token_type_ids"],
    )
    np.testing.assert_allclose(vectors, expected, atol=2e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {name: write_run(tmp_path_factory.mktemp(name) / "run", name) for name in ("masked",)}


def test_the_command_prints_the_vectors_of_texts(runs, capsys, monkeypatch):
    texts = ["the cat", "a small dog by the river"]
    line = ["embed", runs["masked"]]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    lines = [json.loads(entry) for entry in printed(capsys, *line).splitlines()]
    assert [entry["text"] for entry in lines] == texts
    loaded = jf.load(runs["masked"])
    cls, sep = (TOKENIZER.special(role) for role in ("cls", "sep"))
    for entry in lines:
        row = np.array([[cls, *TOKENIZER.encode(entry["text"]), sep]])
        expected = embed(loaded.params, loaded.config, row, token_types=np.zeros_like(row))
        np.testing.assert_allclose(entry["vector"], expected[0], atol=1e-6)
