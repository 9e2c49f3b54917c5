"""The objective contrastive: its loss by the formula, its rows, what its negatives are over
microbatches and meshes, and that it learns to rank pairs."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import optax
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import CACHE
from forced_devices import on_eight_devices
from page_blocks import ROOT
from shapes import made, model

import jaxformer as jf
from jaxformer.config import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import RowFormat, prepare
from jaxformer.data.templates import ContrastiveTemplate
from jaxformer.report import read_metrics
from jaxformer.runs.objectives import task_of
from jaxformer.runs.resolve import resolve_without_data
from jaxformer.tokenizer import MARKS, byte_tokenizer

CONFIG = model("llama", family="encoder", n_layers=1, **{"head.kind": "none"})
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 61, (6, 2, 10), dtype=np.int32)
SEGMENTS = (np.arange(10) < RNG.integers(3, 11, (6, 2, 1))).astype(np.int32)
embed = jax.jit(jf.embed, static_argnums=1)
BATCH = {"tokens": TOKENS, "segment_ids": SEGMENTS}


def by_formula(params, batch, temperature, width=None, same=()):
    """The losses of the pairs in float64, and how often the nearest positive is the right one, by
    the first `width` numbers of the vectors; the pairs of `same` are no negatives."""
    anchors, positives = (
        np.asarray(
            embed(params, CONFIG, batch["tokens"][:, i], segment_ids=batch["segment_ids"][:, i]),
            np.float64,
        )
        for i in (0, 1)
    )
    anchors, positives = (
        vectors[:, :width] / np.linalg.norm(vectors[:, :width], axis=1, keepdims=True)
        for vectors in (anchors, positives)
    )
    scores = anchors @ positives.T / temperature
    for pair in same:
        scores[pair] = -np.inf
    of_rows, of_columns = (np.log(np.exp(scores).sum(axis)) for axis in (1, 0))
    right = scores.argmax(1) == np.arange(len(scores))
    return (of_rows + of_columns) / 2 - np.diagonal(scores), right


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_the_loss_is_that_of_the_formula_and_filling_weighs_nothing(temperature):
    params = made(CONFIG)
    nats, right = by_formula(params, BATCH, temperature)
    loss = jax.jit(jf.loss_of("contrastive", CONFIG, temperature=temperature))
    filled = {name: np.pad(rows, ((0, 3), (0, 0), (0, 0))) for name, rows in BATCH.items()}
    for batch in (BATCH, filled):
        sums = loss(params, batch, None)
        assert sums["loss"][1] == sums["accuracy"][1] == 6
        np.testing.assert_allclose(sums["loss"][0], nats.sum(), rtol=2e-5)
        assert sums["accuracy"][0] == right.sum()


def test_equal_texts_are_no_negatives_and_vectors_may_be_cut():
    """Two anchors are equal up to what their padding holds, and two positives; the loss is the mean
    over the widths (arXiv:2205.13147)."""
    params = made(CONFIG)
    tokens, segments = TOKENS.copy(), SEGMENTS.copy()
    segments[:2, 0] = np.arange(10) < 7
    tokens[1, 0, :7] = tokens[0, 0, :7]
    tokens[4, 1], segments[4, 1] = tokens[3, 1], segments[3, 1]
    batch = {"tokens": tokens, "segment_ids": segments}
    same = [(0, 1), (1, 0), (3, 4), (4, 3)]
    wanted = [by_formula(params, batch, 0.1, width, same)[0].sum() for width in (4, 8, None)]
    loss = jax.jit(jf.loss_of("contrastive", CONFIG, temperature=0.1, widths=(4, 8)))
    np.testing.assert_allclose(loss(params, batch, None)["loss"][0], np.mean(wanted), rtol=2e-5)
    with pytest.raises(jf.ConfigError, match=r"widths=\(99,\) must be between 1 and"):
        jf.loss_of("contrastive", CONFIG, widths=(99,))(params, batch, None)


HARD = {
    "tokens": RNG.integers(0, 61, (6, 4, 10), dtype=np.int32),
    "segment_ids": (np.arange(10) < RNG.integers(3, 11, (6, 4, 1))).astype(np.int32),
}


def vectors_of(params, batch):
    """The vectors [B, 2 + N, D] of all texts of a batch."""
    rows = [batch[name].reshape(-1, 10) for name in ("tokens", "segment_ids")]
    return embed(params, CONFIG, rows[0], segment_ids=rows[1]).reshape(
        *batch["tokens"].shape[:2], -1
    )


@pytest.mark.parametrize("width", [None, 8])
def test_hard_negatives_are_those_of_every_anchor_as_in_sentence_transformers(width):
    """The value, and the gradient by way of that with respect to the vectors."""
    losses = pytest.importorskip("sentence_transformers.losses")
    theirs = losses.MultipleNegativesRankingLoss(
        None, scale=10, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )
    params = made(CONFIG)
    vectors, pull = jax.vjp(lambda params: vectors_of(params, HARD), params)
    leaf = torch.tensor(np.asarray(vectors), requires_grad=True)
    expected = theirs.compute_loss_from_embeddings(list(leaf.unbind(1)), None)
    options = {}
    if width:
        options["widths"] = (width,)
        cut = theirs.compute_loss_from_embeddings(list(leaf[..., :width].unbind(1)), None)
        expected = (expected + cut) / 2
    expected.backward()
    loss = jf.loss_of("contrastive", CONFIG, temperature=0.1, **options)
    found, slopes = jax.value_and_grad(lambda params: loss(params, HARD, None)["loss"][0])(params)
    assert float(found) == pytest.approx(6 * expected.item(), rel=2e-5)
    (wanted,) = pull(6 * leaf.grad.numpy())
    for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * float(np.abs(b).max()) + 1e-7)


def test_a_negative_that_is_missing_or_the_positive_of_an_anchor_is_none():
    params = made(CONFIG)
    batch = {name: rows.copy() for name, rows in HARD.items()}
    batch["segment_ids"][2, 3] = 0  # missing
    for name in batch:  # the positive of pair 0 is a negative of pair 4
        batch[name][4, 2] = batch[name][0, 1]
    vectors = np.asarray(vectors_of(params, batch), np.float64)
    anchors, positives = vectors[:, 0], vectors[:, 1]
    # Sides one after the other: the negatives 2 of all pairs, then the negatives 3.
    negatives = vectors[:, 2:].swapaxes(0, 1).reshape(12, -1)
    scores = np.exp(anchors @ np.concatenate([positives, negatives]).T / 0.1)
    scores[:, 6 + 6 + 2] = 0
    scores[0, 6 + 4] = 0
    nats = np.log(scores.sum(1)) + np.log(scores[:, :6].sum(0)) - 2 * np.log(scores.diagonal())
    filled = {name: np.pad(rows, ((0, 2), (0, 0), (0, 0))) for name, rows in batch.items()}
    for each in (batch, filled):
        sums = jf.loss_of("contrastive", CONFIG, temperature=0.1)(params, each, None)
        np.testing.assert_allclose(sums["loss"][0], nats.sum() / 2, rtol=2e-5)
        assert sums["accuracy"][0] == (scores.argmax(1) == np.arange(6)).sum()


def test_the_gradient_is_finite_beside_rows_that_only_fill_the_batch():
    filled = {name: np.pad(rows, ((0, 2), (0, 0), (0, 0))) for name, rows in BATCH.items()}
    loss = jf.loss_of("contrastive", CONFIG)
    gradient = jax.jit(jax.grad(lambda params: loss(params, filled, None)["loss"][0]))
    leaves = jax.tree.leaves(gradient(made(CONFIG)))
    assert all(np.isfinite(leaf).all() for leaf in leaves) and any(leaf.any() for leaf in leaves)


def test_negatives_are_those_of_a_microbatch():
    params = made(CONFIG)
    step = jf.make_step(jf.loss_of("contrastive", CONFIG), optax.sgd(0.0), microbatches=2)
    metrics = step(jf.init_state(params, optax.sgd(0.0)), BATCH)[1]
    halves = [
        by_formula(params, {name: rows[piece::2] for name, rows in BATCH.items()}, 0.05)[0]
        for piece in (0, 1)
    ]
    np.testing.assert_allclose(metrics["loss"], np.concatenate(halves).mean(), rtol=2e-5)


def test_a_row_is_two_texts_in_their_own_frames_cut_and_padded():
    tokenizer = byte_tokenizer(MARKS)
    template = ContrastiveTemplate(RowFormat(8, 8, marks=True, token_types=2), tokenizer)
    ids = [np.array(tokenizer.encode(text), np.int32) for text in ("abc", "abcdefghij")]
    row = template.row([template.arrays(*ids)])
    cls, sep = (tokenizer.special(role) for role in ("cls", "sep"))
    assert row["tokens"].tolist() == [
        [cls, *ids[0].tolist(), sep, 0, 0, 0],
        [cls, *ids[1][:6].tolist(), sep],
    ]
    assert row["segment_ids"].tolist() == [[1] * 5 + [0] * 3, [1] * 8]
    assert not row["token_types"].any() and row["token_types"].shape == (2, 8)
    assert template.sizes(np.array([[3, 10]])).tolist() == [[5, 12]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["list", "fields"])
def test_records_have_negatives_in_a_list_or_in_fields_of_their_own(kind, suffix, tmp_path):
    """More than the limit, of which the first are read, fewer, or none."""
    lists = [["c", "d", "e"], ["f"], []]
    settings = {"negatives_field": "negatives", "negatives": 2}
    if kind == "fields":
        settings = {"negatives_field": "negative_1+negative_2"}
    records = []
    for texts in lists:
        first, second, *_ = [*texts, None, None]
        records.append({"source": "a", "target": "b", "negatives": texts})
        records[-1] |= {"negative_1": first, "negative_2": second}
    path = tmp_path / f"train.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    data = DataConfig(
        train=str(path),
        validation_fraction=0,
        objective="contrastive",
        sequence_length=8,
        cache_dir=str(tmp_path),
        **settings,
    )
    config = model("llama", family="encoder", max_length=64, **{"head.kind": "none"})
    rows = prepare(data, TokenizerConfig(kind="bytes"), task_of(config, data), seed=0).train
    # What was stored for another number is not taken.
    fewer = dataclasses.replace(data, negatives_field=settings["negatives_field"], negatives=1)
    for rows_of, shape in ((data, (4, 8)), (fewer, (3, 8))):
        task = task_of(config, rows_of)
        made_rows = prepare(rows_of, TokenizerConfig(kind="bytes"), task, seed=0).train
        assert made_rows[0]["tokens"].shape == shape
    for number, negatives in enumerate(lists):
        row = rows[number]
        expected = ["a", "b", *[*negatives, "", ""][:2]]
        sides = zip(row["tokens"], row["segment_ids"], strict=True)
        texts = [byte_tokenizer(MARKS).decode(ids[real > 0]) for ids, real in sides]
        assert texts == expected
        assert row["segment_ids"].any(axis=1).tolist() == [text != "" for text in expected]


def test_negatives_of_another_objective_are_refused():
    data = DataConfig(objective="mlm", negatives_field="negatives")
    with pytest.raises(jf.ConfigError, match=r"data.negatives_field='negatives' names texts that"):
        task_of(model("llama", family="encoder"), data)
    with pytest.raises(jf.ConfigError, match=r"data.negatives=2 is how many are read"):
        DataConfig(negatives=2)


def test_auto_microbatches_are_one_whatever_the_memory(monkeypatch):
    monkeypatch.setattr("jaxformer.runs.resolve.CPU_ACTIVATIONS", 1.0)
    for objective, head, expected in (("contrastive", "none", 1), ("mlm", "auto", 16)):
        model_of = model("llama", family="encoder", **{"head.kind": head})
        run = RunConfig(model=model_of, data=DataConfig(objective=objective, sequence_length=16))
        resolved, batch = resolve_without_data(run, jf.make_mesh(devices=jax.devices()[:1]))
        assert resolved.run.train.microbatches == expected
        if objective == "contrastive":
            assert batch["tokens"].shape == (16, 2, 16)
            assert resolved.tokens_per_step == 16 * 2 * 16
            hard = dataclasses.replace(run.data, negatives_field="negative_1+negative_2")
            run = dataclasses.replace(run, data=hard)
            resolved, batch = resolve_without_data(run, jf.make_mesh(devices=jax.devices()[:1]))
            assert batch["tokens"].shape == (16, 4, 16)
            assert resolved.tokens_per_step == 16 * 4 * 16


COUNTS = {"ein": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five"}
COLORS = {"rote": "red", "blaue": "blue", "gelbe": "yellow", "alte": "old", "neue": "new"}
THINGS = {"Hüte": "hats", "Hunde": "dogs", "Bäume": "trees", "Steine": "stones", "Boote": "boats"}


def write_pairs(folder):
    """Phrases and their translations, of which each fifth is held out."""
    pairs = list(itertools.product(COUNTS, COLORS, THINGS))
    np.random.default_rng(0).shuffle(pairs)
    tables = (COUNTS, COLORS, THINGS)
    for name, some in (("train", pairs[25:]), ("held", pairs[:25])):
        lines = [
            {
                "anchor": " ".join(words),
                "positive": " ".join(
                    table[word] for table, word in zip(tables, words, strict=True)
                ),
            }
            for words in some
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_a_small_encoder_learns_to_rank_pairs_it_has_not_seen(tmp_path):
    """Of the shape of MiniLM: post-norm, learned positions, biases, and the mean of the tokens."""
    write_pairs(tmp_path)
    settings = {
        "run.dir": tmp_path / "run",
        "run.progress": "none",
        "run.tracker": "none",
        "run.compilation_cache": f"{CACHE}/xla",
        "model.family": "encoder",
        "model.head.kind": "none",
        "model.d_model": 32,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "model.norm": "layer",
        "model.norm_placement": "post",
        "model.embedding.norm": True,
        "model.positions": "learned",
        "model.activation": "gelu",
        "model.bias": "all",
        "model.max_length": 32,
        "data.train": tmp_path / "train.jsonl",
        "data.validation": tmp_path / "held.jsonl",
        "data.source_field": "anchor",
        "data.target_field": "positive",
        "data.sequence_length": 24,
        "data.cache_dir": f"{CACHE}/data",
        "tokenizer.vocab_size": 400,
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 10,
        "train.steps": 120,
        "train.batch_size": 25,
        "train.eval_every": 0,
        "train.contrastive_temperature": 0.1,
        "train.contrastive_widths": "16",
    }
    run = jf.load_config(
        ROOT / "configs/quickstart.py", [f"{name}={value}" for name, value in settings.items()]
    )
    jf.train(run)
    last = [entry for entry in read_metrics(tmp_path / "run") if "val_loss" in entry][-1]
    assert last["val_accuracy"] >= 0.9 and last["val_loss"] < 1.0
    loaded = jf.load(tmp_path / "run")
    assert loaded.config.output == "none"


@pytest.mark.slow
def test_a_step_over_a_mesh_has_the_negatives_of_the_whole_batch():
    report = on_eight_devices("contrastive_devices.py")
    assert len(report) == 4
    for name, errors in report.items():
        assert errors["figures"] < 2e-6 and errors["params"] < 2e-6, (name, errors)
