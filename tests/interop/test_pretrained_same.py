"""When two configs are the same function: what an export may leave out, and what it has to
refuse."""

import dataclasses

import jax
import pytest

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.interop.architectures import differences

DECODER = dict(vocab_size=9, d_model=4, n_layers=2, n_heads=1, d_ff=4)
ENCODER = DECODER | {
    "n_layers": 1,
    "max_length": 3,
    "family": "encoder",
    "norm": "layer",
    "embedding.token_types": 2,
}
ENCODER |= dict(norm_placement="post", bias="all", positions="learned", activation="gelu")
ENCODER |= {"embedding.norm": True}
SOURCE = DECODER | dict(family="encoder_decoder", positions="sinusoidal")
SAME = [  # settings of a model, and others of the same function
    (DECODER, {"dropout": 0.1, "attention.dropout": 0.1, "init": "xavier", "max_length": 7}),
    (
        DECODER,
        {"dtype": "bfloat16", "layer_loop": "scan", "remat": "full", "attention.kernel": "xla"},
    ),
    (DECODER, {"n_kv_heads": 1, "attention.scale": 0.5, "rope.original_length": 5}),
    (DECODER, dict(window_pattern="wf")),
    (DECODER, dict(window=3, window_pattern="f")),
    (DECODER, dict(bias="none")),
    (DECODER | dict(window=3, window_pattern="wf"), dict(window_pattern="wfwf")),
    (DECODER | dict(window=3), {"rope.window_theta": 10_000.0}),
    (DECODER | dict(bias="ffn"), dict(bias="ffn_norm")),
    (DECODER | {"rope.pattern": "pn"}, {"rope.pattern": "pnpn"}),
    (DECODER | dict(positions="none"), {"positions": "rope", "rope.pattern": "n"}),
    (SOURCE, dict(n_encoder_layers=2)),
    (SOURCE | dict(window=3), dict(source_window=3)),
    (SOURCE | dict(window_pattern="f"), dict(source_window=3)),
    (SOURCE, {"rope.theta": 3.0, "relative.buckets": 8}),
    (DECODER, {"embedding.sinusoids": "half"}),
    (ENCODER, {"head.pooling": "mean"}),
    (ENCODER | dict(n_layers=4), dict(layer_groups=4)),
    (ENCODER, {"head.pooler_activation": "relu", "head.width": 3, "embedding.width": 4}),
    (ENCODER | {"head.kind": "tags", "head.n_classes": 2}, {"head.dense_bias": False}),
    (DECODER, {"relative.bias": "layer"}),
    (DECODER | dict(positions="learned"), {"embedding.positions": "learned"}),
    (ENCODER | {"head.next_sentence": True}, {"head.pooler": True}),
    (
        ENCODER | {"head.kind": "classes", "head.n_classes": 2},
        {"head.pooler": True, "tied_head": True},
    ),
    (ENCODER | {"head.kind": "classes", "head.n_classes": 2}, {"head.class_layers": "dense"}),
    (ENCODER, {"head.class_layers": "dense"}),
]
OTHER = [  # and others that are not
    (DECODER, {"norm_eps": 1e-6, "rope.theta": 3.0, "window": 3, "tied_head": True}),
    (DECODER, {"rope.pattern": "pn"}),
    (DECODER, {"attention.scale": 0.4, "bias": "ffn", "head.soft_cap": 3.0}),
    (DECODER | dict(window=3), {"rope.window_theta": 3.0}),
    (SOURCE, dict(n_encoder_layers=1)),
    (SOURCE, dict(source_window=3)),
    (SOURCE | dict(window=3), dict(source_window=4)),
    (SOURCE, {"embedding.source": "separate"}),
    (SOURCE, {"embedding.sinusoids": "half"}),
    (ENCODER, dict(max_length=4)),
    (ENCODER, {"head.pooler": True}),
    (ENCODER | dict(n_layers=4), dict(layer_groups=2)),
    (ENCODER, {"embedding.width": 2}),
    (ENCODER, {"head.dense_bias": False}),
    (ENCODER | {"head.kind": "classes", "head.n_classes": 2}, {"head.pooler_activation": "relu"}),
    (DECODER | {"head.kind": "projection"}, {"head.width": 3}),
    (DECODER | dict(positions="t5"), {"relative.bias": "layer"}),
    (DECODER, dict(unnormed_layers=1)),
    (DECODER | dict(positions="t5"), {"embedding.positions": "learned"}),
    (DECODER | dict(positions="t5"), dict(positions="disentangled")),
    (ENCODER | {"head.kind": "classes", "head.n_classes": 2}, {"head.pooling": "mean"}),
    (ENCODER | {"head.kind": "tags", "head.n_classes": 2}, {"head.class_layers": "dense"}),
    (ENCODER | {"head.kind": "tags", "head.n_classes": 2}, {"head.n_classes": 3}),
]


@pytest.mark.parametrize("settings, change", SAME, ids=str)
def test_settings_that_change_no_logit_keep_no_model_from_being_written(settings, change):
    assert (
        differences(
            with_settings(jf.ModelConfig(), settings),
            with_settings(jf.ModelConfig(), settings | change),
        )
        == []
    )


@pytest.mark.parametrize("settings, change", OTHER, ids=str)
def test_settings_that_change_logits_are_named(settings, change):
    told = differences(
        with_settings(jf.ModelConfig(), settings | change),
        with_settings(jf.ModelConfig(), settings),
    )
    assert {f"model.{name}" for name in change} <= {said.partition("=")[0] for said in told}


@pytest.mark.parametrize("explicit", [False, True])
def test_two_configs_are_the_same_function_whatever_mesh_is_set(explicit):
    config = with_settings(jf.ModelConfig(), DECODER)
    with jax.set_mesh(jf.make_mesh(explicit=explicit)):
        assert differences(config, dataclasses.replace(config, n_kv_heads=1)) == []
    assert differences(config, dataclasses.replace(config, head_dim=4)) == []
