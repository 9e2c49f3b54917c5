"""Directories as they were published over the years: other names, copies and buffers among the
tensors, other keys in config.json. They are the same models."""

import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import (
    assert_close,
    directory,
    filled,
    inputs,
    loaded,
    logits,
    made,
    our_logits,
    reference,
    rewrite,
)
from pretrained_variants import BERT, THETA, VARIANTS
from published import both
from safetensors.torch import load_file, save_file

import jaxformer as jf
from jaxformer.interop.pretrained import pretrained_config

ONE = "model.safetensors"
SIDES = ("encoder", "decoder")


def copies(source, *names):
    return lambda held: held | {name: held[source].clone() for name in names}


def extra(shapes):
    return lambda held: held | {name: torch.ones(shape) for name, shape in shapes.items()}


def less(word):
    return lambda held: {name: w for name, w in held.items() if word not in name}


def flipped(name, source):
    """Another tensor of this name."""
    return lambda held: held | {name: held[source].flip(0).contiguous()}


# Others are those of tests/published.py.
FILES = {
    "gpt2 with its head": ("gpt2", copies("transformer.wte.weight", "lm_head.weight")),
    "bert with copies": (
        "bert masked",
        both(
            copies("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            copies("cls.predictions.bias", "cls.predictions.decoder.bias"),
            extra({"bert.embeddings.position_ids": (1, 128)}),
        ),
    ),
    "marian with copies and sinusoids": (
        "marian",
        both(
            copies("model.shared.weight", "model.encoder.embed_tokens.weight"),
            copies("model.shared.weight", "model.decoder.embed_tokens.weight"),
            extra({f"model.{side}.embed_positions.weight": (128, 42) for side in SIDES}),
        ),
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.xdist_group(FILES[c][0])) for c in FILES]
)
def test_files_as_they_were_published_hold_the_same_model(case, tmp_path):
    name, change = FILES[case]
    place = shutil.copytree(directory(name), tmp_path / "model")
    held = change(load_file(place / ONE))
    assert set(held) != set(load_file(place / ONE))
    save_file(held, place / ONE)
    model = jf.load(place)
    assert filled(model.config) == filled(loaded(name).config)
    jax.tree.map(np.testing.assert_array_equal, model.params, loaded(name).params)


def test_a_masked_bert_whose_file_has_the_other_heads_loads_without_them(tmp_path):
    """As bert-base-uncased is: it calls itself BertForMaskedLM, and holds a pooler and the
    next-sentence head."""
    name = "bert pre-training"
    place = shutil.copytree(directory(name), tmp_path / "model")
    rewrite(place, architectures=["BertForMaskedLM"])
    batch = inputs(name)
    assert_close(our_logits(jf.load(place), batch), logits(reference(name), batch), batch)


# What a file may lack or contradict: computed as transformers does, or refused by the tensor's
# name.
DOUBTFUL = {
    "bart without its bias": ("bart", less("final_logits_bias"), "final_logits_bias"),
    "marian without its bias": ("marian", less("final_logits_bias"), "final_logits_bias"),
    "tied with another head": (
        "llama tied, heads from width",
        flipped("lm_head.weight", "model.embed_tokens.weight"),
        "lm_head.weight",
    ),
    "t5 with one copy that differs": (
        "t5",
        flipped("encoder.embed_tokens.weight", "shared.weight"),
        "encoder.embed_tokens.weight",
    ),
    "tied, the head alone": (
        "llama tied, heads from width",
        lambda held: {name.replace("model.embed_tokens", "lm_head"): w for name, w in held.items()},
        "embed_tokens",
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_a_doubtful_file_is_read_as_the_reference_reads_it_or_refused_by_the_tensors_name(
    case, tmp_path
):
    name, change, word = DOUBTFUL[case]
    place = shutil.copytree(directory(name), tmp_path / "model")
    save_file(change(load_file(place / ONE)), place / ONE, {"format": "pt"})
    try:
        model = jf.load(place)
    except jf.ConfigError as error:
        assert word in str(error) and ONE in str(error)
        return
    hf = VARIANTS[name][0].from_pretrained(place, attn_implementation="eager").eval()
    assert_close(our_logits(model, inputs(name)), logits(hf, inputs(name)), inputs(name))


OLD = dict(torch_dtype="float32", rope_parameters=None, dtype=None, rope_theta=THETA)
OLD_GEMMA = OLD | dict(rope_local_base_freq=91.0)
SCALES = dict(
    factor=3.0, low_freq_factor=0.2, high_freq_factor=1.3, original_max_position_embeddings=8
)
CONFIGS = [  # keys as config.json had them before transformers 5; None takes one away
    ("llama linear", OLD | dict(rope_scaling=dict(type="linear", factor=2.5))),
    ("llama llama3", OLD | dict(rope_scaling=dict(rope_type="llama3", **SCALES))),
    ("qwen2", OLD | dict(layer_types=None, use_sliding_window=False, sliding_window=32768)),
    ("gemma3", OLD_GEMMA | dict(rope_scaling=dict(rope_type="linear", factor=3.0))),
    ("gemma3 by its own pattern", OLD_GEMMA | dict(layer_types=None, sliding_window_pattern=6)),
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.xdist_group(case[0])) for case in CONFIGS],
)
def test_a_config_with_the_keys_of_older_years_is_the_same_config(name, changes, tmp_path):
    place = shutil.copytree(directory(name), tmp_path / "model")
    rewrite(place, **changes)
    assert filled(pretrained_config(place)) == filled(loaded(name).config)


def test_t5_v1_1_as_transformers_5_writes_it_again_is_the_same_model(tmp_path):
    """Written again it says tie_word_embeddings, which v1.1 is not, and scale_decoder_outputs
    beside a head of its own."""
    model = reference("t5 v1.1")
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["tie_word_embeddings"] and not fields["scale_decoder_outputs"]
    batch = inputs("t5 v1.1")
    assert_close(our_logits(jf.load(tmp_path), batch), logits(model, batch), batch)


def test_labels_are_read(tmp_path):
    labels = dict(num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    made(tf.BertForSequenceClassification, BERT | labels).save_pretrained(tmp_path)
    assert jf.load(tmp_path).labels == ("bad", "fair", "good")
    keys = json.loads((tmp_path / "config.json").read_text())
    for wrong in ([1], {"0": "a", "2": "b", "3": "c"}, {"zero": "a"}):
        (tmp_path / "config.json").write_text(json.dumps(keys | {"id2label": wrong}))
        with pytest.raises(jf.ConfigError, match=r"config.json: id2label is .* its number from"):
            jf.load(tmp_path)
