"""When two configs are the same function: what an export may leave out, and what it has to
refuse."""

import dataclasses

import jax
import pytest

import jaxformer as jf
from jaxformer.interop.architectures import differences

DECODER = dict(vocab_size=9, d_model=4, n_layers=2, n_heads=1, d_ff=4)
ENCODER = DECODER | dict(n_layers=1, max_length=3, family="encoder", norm="layer", token_types=2)
ENCODER |= dict(norm_placement="post", bias="all", positions="learned", activation="gelu")
ENCODER |= dict(embedding_norm=True)
SOURCE = DECODER | dict(family="encoder_decoder", positions="sinusoidal")
SAME = [  # settings of a model, and others of the same function
    (DECODER, dict(dropout=0.1, attention_dropout=0.1, init="xavier", max_length=7)),
    (DECODER, dict(dtype="bfloat16", layer_loop="scan", remat="full", attention_kernel="xla")),
    (DECODER, dict(n_kv_heads=1, attention_scale=0.5, rope_original_length=5)),
    (DECODER, dict(window_pattern="wf")),
    (DECODER, dict(window=3, window_pattern="f")),
    (DECODER, dict(bias="none")),
    (DECODER | dict(window=3, window_pattern="wf"), dict(window_pattern="wfwf")),
    (DECODER | dict(window=3), dict(rope_window_theta=10_000.0)),
    (DECODER | dict(bias="ffn"), dict(bias="ffn_norm")),
    (DECODER | dict(position_pattern="pn"), dict(position_pattern="pnpn")),
    (DECODER | dict(positions="none"), dict(positions="rope", position_pattern="n")),
    (SOURCE, dict(n_encoder_layers=2)),
    (SOURCE | dict(window=3), dict(source_window=3)),
    (SOURCE | dict(window_pattern="f"), dict(source_window=3)),
    (SOURCE, dict(rope_theta=3.0, relative_buckets=8)),
    (DECODER, dict(sinusoids="half")),
    (ENCODER, dict(pooling="mean")),
    (ENCODER | dict(n_layers=4), dict(layer_groups=4)),
    (ENCODER, dict(pooler_activation="relu", projection_width=3, embedding_width=4)),
    (ENCODER | dict(head="tags", n_classes=2), dict(head_dense_bias=False)),
    (DECODER, dict(relative_bias="layer")),
    (DECODER | dict(positions="learned"), dict(position_embedding="learned")),
    (ENCODER | dict(next_sentence=True), dict(pooler=True)),
    (ENCODER | dict(head="classes", n_classes=2), dict(pooler=True, tied_head=True)),
    (ENCODER | dict(head="classes", n_classes=2), dict(class_head="dense")),
    (ENCODER, dict(class_head="dense")),
]
OTHER = [  # and others that are not
    (DECODER, dict(norm_eps=1e-6, rope_theta=3.0, window=3, tied_head=True)),
    (DECODER, dict(position_pattern="pn")),
    (DECODER, dict(attention_scale=0.4, bias="ffn", logit_soft_cap=3.0)),
    (DECODER | dict(window=3), dict(rope_window_theta=3.0)),
    (SOURCE, dict(n_encoder_layers=1)),
    (SOURCE, dict(source_window=3)),
    (SOURCE | dict(window=3), dict(source_window=4)),
    (SOURCE, dict(source_embedding="separate")),
    (SOURCE, dict(sinusoids="half")),
    (ENCODER, dict(max_length=4)),
    (ENCODER, dict(pooler=True)),
    (ENCODER | dict(n_layers=4), dict(layer_groups=2)),
    (ENCODER, dict(embedding_width=2)),
    (ENCODER, dict(head_dense_bias=False)),
    (ENCODER | dict(head="classes", n_classes=2), dict(pooler_activation="relu")),
    (DECODER | dict(head="projection"), dict(projection_width=3)),
    (DECODER | dict(positions="t5"), dict(relative_bias="layer")),
    (DECODER, dict(unnormed_layers=1)),
    (DECODER | dict(positions="t5"), dict(position_embedding="learned")),
    (DECODER | dict(positions="t5"), dict(positions="disentangled")),
    (ENCODER | dict(head="classes", n_classes=2), dict(pooling="mean")),
    (ENCODER | dict(head="tags", n_classes=2), dict(class_head="dense")),
    (ENCODER | dict(head="tags", n_classes=2), dict(n_classes=3)),
]


@pytest.mark.parametrize("settings, change", SAME, ids=str)
def test_settings_that_change_no_logit_keep_no_model_from_being_written(settings, change):
    assert differences(jf.ModelConfig(**settings), jf.ModelConfig(**settings | change)) == []


@pytest.mark.parametrize("settings, change", OTHER, ids=str)
def test_settings_that_change_logits_are_named(settings, change):
    told = differences(jf.ModelConfig(**settings | change), jf.ModelConfig(**settings))
    assert {f"model.{name}" for name in change} <= {said.partition("=")[0] for said in told}


@pytest.mark.parametrize("explicit", [False, True])
def test_two_configs_are_the_same_function_whatever_mesh_is_set(explicit):
    config = jf.ModelConfig(**DECODER)
    with jax.set_mesh(jf.make_mesh(explicit=explicit)):
        assert differences(config, dataclasses.replace(config, n_kv_heads=1)) == []
    assert differences(config, dataclasses.replace(config, head_dim=4)) == []
