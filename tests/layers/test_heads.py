"""The heads, each against its formula, and the one loss that serves them all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES, alone, params_of

import jaxformer as jf
from jaxformer.arrays.params import Spec, normal, rows
from jaxformer.config.settings import with_settings
from jaxformer.layers.head import HEADS as HEAD_ROWS
from jaxformer.layers.head import HeadKind, head_formula, output_layer, pooled, readout
from jaxformer.layers.linear import linear
from jaxformer.layers.masks import layout_of
from jaxformer.losses.heads import head_loss
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden, specs

ENCODER, CLASSES = {"family": "encoder"}, {"head.kind": "classes", "head.n_classes": 3}
TAGS, MASKED = {"head.kind": "tags", "head.n_classes": 5}, ENCODER | {"tied_head": True}
BERT = {"norm": "layer", "norm_placement": "post", "activation": "gelu", "bias": "all"}
BERT |= {
    "embedding.token_types": 2,
    "head.next_sentence": True,
    "positions": "learned",
    "embedding.norm": True,
}
NARROW = {"embedding.width": 10, "embedding.norm": True, "positions": "learned"}
SCALED = {"head.scale": "rsqrt", "head.soft_cap": 1.5}
HEADS = {
    "language": {},
    "language, tied, scaled, capped": {"tied_head": True} | SCALED,
    "language of a source": {"family": "encoder_decoder", "bias": "all"},
    "masked": ENCODER,
    "masked, tied, no norm": MASKED | {"norm": "none", "activation": "tanh"},
    "masked, tied, narrow": MASKED | NARROW,
    "BERT": MASKED | BERT,
    "classes": ENCODER | CLASSES,
    "classes of the mean": ENCODER | CLASSES | {"head.pooling": "mean"},
    "classes of a decoder": CLASSES,
    "classes by relu": ENCODER | CLASSES | {"head.pooler_activation": "relu"},
    "tags": ENCODER | TAGS | {"head.soft_cap": 1.5},
    "tags of a decoder": TAGS,
    "tags behind a dense layer": ENCODER | TAGS | {"head.class_layers": "dense"},
    "classes of a decoder behind a norm": CLASSES | {"head.class_layers": "dense_norm"},
}
# Heads that no objective trains.
VECTORS = {"projection": {"head.kind": "projection", "head.width": 7}}


@functools.cache
def case(name):
    """(params, config, batch): two rows of tokens, the second with two of padding."""
    config = with_settings(jf.ModelConfig(), SIZES | (HEADS | VECTORS)[name])
    batch = {name: rows[:2] for name, rows in alone(config).items()}
    batch["segment_ids"] = np.array([[1] * 6, [1] * 4 + [0] * 2])
    batch |= {"source_segment_ids": np.ones((2, 6), int)} if "source" in batch else {}
    return params_of(config), config, batch


def residual(params, config, batch):
    inputs = inputs_of(batch)
    return hidden(params, config, inputs).x, inputs.layout


def sums(params, config, batch):
    found = head_loss(params, config, jax.tree.map(jnp.asarray, batch))
    return found["loss"][0], found.get("nats", found["loss"])[0]


def softmax_nats(logits, targets):
    return -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), np.asarray(targets)[..., None], -1
    )[..., 0]


GELU = functools.partial(jax.nn.gelu, approximate=False)


@pytest.mark.parametrize("name", [*HEADS, *VECTORS])
def test_the_logits_are_the_formula_of_the_head(name):
    params, config, batch = case(name)
    x, _ = residual(params, config, batch)
    if config.output in ("classes", "projection"):
        real = batch["segment_ids"] != 0
        share = {
            "first": np.eye(6)[[0, 0]],
            "last": np.eye(6)[[5, 3]],
            "mean": real / real.sum(1, keepdims=True),
        }[config.pooled]
        x = np.einsum("bt,btd->bd", share, x)[:, None]
    dense = params.get("pooler", params.get("head", {}))
    if config.output in ("classes", "tags") and "dense" in dense:
        act = {"tanh": np.tanh, "relu": jax.nn.relu}[config.head.pooler_activation]
        x = act(x @ dense["dense"] + dense["dense_bias"])
        if config.head.class_layers == "dense_norm":
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * dense["norm"]["scale"]
    if config.output == "masked":
        act = {"swiglu": jax.nn.silu, "tanh": jnp.tanh, "gelu": GELU}[config.activation]
        x = np.asarray(act(x @ params["head"]["dense"] + params["head"]["dense_bias"]))
        if config.norm == "rms":
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["head"]["norm"]["scale"]
        if config.norm == "layer":
            centred = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = centred * params["head"]["norm"]["scale"] + params["head"]["norm"]["bias"]
    matrix = params["embed"]["tokens"] if config.tied_head else params["head"]["weight"]
    x = x / 4 if config.head.scale == "rsqrt" else x
    logits = np.einsum("btd,vd->btv", x, matrix) + params.get("head", {}).get("bias", 0)
    logits = 1.5 * np.tanh(logits / 1.5) if config.head.soft_cap else logits
    expected = logits[:, 0] if config.output in ("classes", "projection") else logits
    found = jf.forward(params, config, **batch)
    assert found.shape == expected.shape and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def targets_of(config, seed=0):
    """Targets and weights as the data gives them: a few hidden tokens, a class a row, or all tokens
    but padding."""
    rng = np.random.default_rng(seed)
    one = config.output == "classes"
    targets = rng.integers(0, config.head.n_classes or 37, (2, 1 if one else 6))
    weights = np.ones((2, 1)) if one else np.array([[1] * 6, [1] * 4 + [0] * 2])
    if config.output == "masked":
        weights = np.array([[0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]])
    return {"targets": targets, "weights": weights.astype(np.float32)}


@pytest.mark.parametrize("name", HEADS)
def test_the_output_layer_gives_the_logits_and_the_loss_is_their_weighted_cross_entropy(name):
    params, config, batch = case(name)
    x, layout = residual(params, config, batch)
    layer = output_layer(params, config, readout(params, config, x, layout))
    logits = np.einsum("btd,vd->btv", layer.rows, layer.matrix)
    logits = logits if layer.bias is None else logits + np.asarray(layer.bias)
    logits = 1.5 * np.tanh(logits / 1.5) if config.head.soft_cap else logits
    expected = jf.forward(params, config, **batch)
    expected = expected[:, None] if config.output == "classes" else expected
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    width = config.embedded_width if config.output == "masked" else config.d_model
    assert layer.rows.shape[-1] == layer.matrix.shape[-1] == width
    has_bias = config.output != "language"
    assert ("bias" in params.get("head", {})) == (layer.bias is not None) == has_bias

    goal = targets_of(config)
    nats_of_logits = (goal["weights"] * softmax_nats(expected, goal["targets"])).sum()
    if config.head.next_sentence:
        goal["next_sentence"] = np.ones((2, 1), int)
        goal["next_sentence_weights"] = np.zeros((2, 1), np.float32)
    for found in sums(params, config, batch | goal):
        np.testing.assert_allclose(found, nats_of_logits, rtol=1e-4)


@pytest.mark.parametrize("weights", [[1, 1], [1, 0], [0, 0]], ids=str)
def test_the_objective_of_next_sentence_is_added_and_nats_are_those_of_the_words(weights):
    params, config, batch = case("BERT")
    goal = targets_of(config) | {"next_sentence": np.array([[1], [0]])}
    goal["next_sentence_weights"] = np.array(weights, np.float32)[:, None]
    x, _ = residual(params, config, batch)
    pool = np.tanh(x[:, 0] @ params["pooler"]["dense"] + params["pooler"]["dense_bias"])
    logits = pool @ params["next_sentence"]["weight"].T + params["next_sentence"]["bias"]
    extra = (np.array(weights) * softmax_nats(logits, np.array([1, 0]))).sum()
    nats_of_words = softmax_nats(jf.forward(params, config, **batch), goal["targets"])
    words = (goal["weights"] * nats_of_words).sum()
    objective, nats = sums(params, config, batch | goal)
    np.testing.assert_allclose(nats, words, rtol=1e-4)
    np.testing.assert_allclose(objective, words + extra, rtol=1e-4)


def test_pooling_picks_the_token_or_the_mean():
    x = jnp.arange(24, dtype=jnp.float32).reshape(2, 6, 2)
    layout = layout_of(jnp.zeros((2, 6), jnp.int32), None, jnp.array([[0, 1, 1, 1, 0, 0], [1] * 6]))
    expected = {"first": [2, 12], "last": [6, 22], "mean": [4, 17]}
    for pooling, firsts in expected.items():
        config = with_settings(
            jf.ModelConfig(), SIZES | ENCODER | CLASSES | {"head.pooling": pooling}
        )
        np.testing.assert_allclose(pooled({}, config, x, layout)[:, 0, 0], firsts)


def test_the_rows_of_the_heads_are_those_that_are_used():
    found = {}
    for name in HEADS:
        paths = rows(specs(case(name)[1]))
        found[name] = {path for path in paths if path.startswith(("head", "pooler", "next"))}
    dense = {"dense", "dense_bias"}
    assert found["language"] == {"head.weight"} and found["language, tied, scaled, capped"] == set()
    assert found["masked"] == {f"head.{leaf}" for leaf in dense | {"weight", "bias", "norm.scale"}}
    assert found["masked, tied, no norm"] == {f"head.{leaf}" for leaf in dense | {"bias"}}
    assert found["BERT"] == {
        f"head.{leaf}" for leaf in dense | {"bias", "norm.scale", "norm.bias"}
    } | {f"pooler.{leaf}" for leaf in dense} | {"next_sentence.weight", "next_sentence.bias"}
    assert found["classes"] == {"head.weight", "head.bias"} | {f"pooler.{leaf}" for leaf in dense}
    assert found["classes of a decoder"] == found["tags"] == {"head.weight", "head.bias"}


@pytest.mark.parametrize("head", ["classes", "tags"])
def test_a_head_of_classes_wants_to_know_how_many(head):
    config = with_settings(jf.ModelConfig(), SIZES | {"family": "encoder", "head.kind": head})
    with pytest.raises(jf.ConfigError, match=r"head.n_classes=0 .* give their number"):
        jf.init(config, jax.random.key(0))


@pytest.mark.parametrize("head", ["masked", "classes", "tags"])
def test_a_model_that_writes_no_text_refuses_to_generate(head):
    config = with_settings(
        jf.ModelConfig(), SIZES | {"family": "encoder", "head.kind": head, "head.n_classes": 3}
    )
    with pytest.raises(jf.ConfigError, match=f"'{head}' does not write text"):
        jf.generate(params_of(config), config, [[1, 2]], 3, temperature=0)


def test_a_head_from_outside_the_package_is_a_row(monkeypatch):
    """A head with a bottleneck of 4 numbers before the matrix."""

    def head_specs(config):
        matrix = functools.partial(Spec, init=normal(0.5), inputs=("embed",))
        shape = (config.vocab_size, config.d_model)
        return {
            "weight": matrix(shape, ("vocab", "embed")),
            "down": matrix((config.d_model, 4), ("embed", "narrow")),
            "up": Spec((4, config.d_model), ("narrow", "embed"), normal(0.5), inputs=("narrow",)),
        }

    def narrow(params, config, x, layout):
        down = linear("BTD,DW->BTW", params["head"], "down", x)
        return linear("BTW,WD->BTD", params["head"], "up", down)

    row = HeadKind(head_specs, narrow, lambda config: ("h = x W_down W_up",), of_tokens=True)
    monkeypatch.setitem(HEAD_ROWS, "narrow", row)
    config = with_settings(jf.ModelConfig(), SIZES | {"head.kind": "narrow"})
    params, (_, _, batch) = params_of(config), case("language")
    x, _ = residual(params, config, batch)
    bottleneck = x @ params["head"]["down"] @ params["head"]["up"]
    expected = bottleneck @ params["head"]["weight"].T
    np.testing.assert_allclose(jf.forward(params, config, **batch), expected, rtol=1e-4, atol=1e-4)
    goal = targets_of(config)
    nats = (goal["weights"] * softmax_nats(expected, goal["targets"])).sum()
    np.testing.assert_allclose(sums(params, config, batch | goal)[1], nats, rtol=1e-4)
    assert head_formula(config)[0] == "h = x W_down W_up" and "h W_headᵀ" in head_formula(config)[1]
    tied = specs(dataclasses.replace(config, tied_head=True))
    assert {*tied["head"]} == {"down", "up"}


def test_the_logits_are_divided_and_the_embeddings_and_sublayers_multiplied():
    """Of a model whose sublayers add next to nothing: the logits of the scaled embeddings."""
    small = with_settings(
        jf.ModelConfig(), {**SIZES, "norm_placement": "output", "residual_multiplier": 1e-6}
    )
    config = with_settings(small, {"embedding.multiplier": 3.0, "head.divisor": 2.5})
    tokens = alone(config)["tokens"]
    params = params_of(config) | {"final_norm": {"scale": jnp.ones(config.d_model)}}
    x = 3 * params["embed"]["tokens"][tokens]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    expected = np.einsum("btd,vd->btv", x, params["head"]["weight"]) / 2.5
    np.testing.assert_allclose(jf.forward(params, config, tokens), expected, atol=1e-4)
