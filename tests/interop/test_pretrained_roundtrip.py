"""What transformers saved, read and written again, is what transformers saved, and transformers
reads it."""

import functools
import json

import jax
import numpy as np
import torch
import transformers as tf
from pretrained import (
    directory,
    each,
    expected_logits,
    filled,
    folder,
    inputs,
    loaded,
    logits,
    reference,
    tensors,
    with_eos_of,
)
from pretrained_variants import VARIANTS

import jaxformer as jf
from jaxformer.interop.architectures import ARCHITECTURES
from jaxformer.interop.pretrained import pretrained_config
from jaxformer.interop.tensor_table import matched


@functools.cache
def saved(name, dtype=None):
    place, model = folder(name, f"ours {dtype}"), loaded(name)
    jf.save_pretrained(
        place, model.params, model.config, model.tokenizer, **({"dtype": dtype} if dtype else {})
    )
    return place


def reread(place):
    """transformers' model of a directory, by the class that its config.json names, once nothing was
    missing or left over."""
    fields = json.loads((place / "config.json").read_text())
    model, told = getattr(tf, fields["architectures"][0]).from_pretrained(
        place, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(
        told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), told
    for parameter in model.parameters():
        # The addresses of mapped files are of no multiple of 64 bytes, and torch then adds in
        # another order.
        parameter.data = parameter.data.clone()
    return model.eval()


def assert_same_leaves(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map_with_path(
        lambda path, a, b: np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path)),
        found,
        expected,
    )


def assert_same_tensors(found, expected):
    assert {name: (w.shape, w.dtype) for name, w in found.items()} == {
        n: (w.shape, w.dtype) for n, w in expected.items()
    }
    assert [name for name, w in expected.items() if not torch.equal(found[name], w)] == []


# Those of which transformers writes other names than were published, and reads both.
RENAMED = ("kimi-linear", "olmo-hybrid")
# One of each way in which an architecture stores its leaves.
USUAL = {"llama", "gpt2", "gpt-neox", "phi3", "deepseek-v3", "gpt-oss"}
USUAL |= {"bert masked", "t5", "marian"}


@each(VARIANTS, slow=VARIANTS.keys() - USUAL)
def test_the_tensors_written_are_bit_for_bit_those_that_transformers_wrote(name):
    """And both read them: the same config here, the same logits there."""
    found, expected = tensors(saved(name)), tensors(directory(name))
    if name.startswith(RENAMED):
        places = matched(expected, found, "", ARCHITECTURES[type(reference(name)).__name__].renamed)
        assert len(places) == len(expected)
        expected = {name: expected[there] for name, there in places.items()}
    assert_same_tensors(found, expected)
    assert filled(pretrained_config(saved(name))) == filled(loaded(name).config)
    model = with_eos_of(reread(saved(name)), reference(name))
    expected = expected_logits(name)
    assert np.abs(logits(model, inputs(name)) - expected).max() <= 1e-6 * expected.std()


# A tensor for each layer, those that several leaves share, experts, a table that is computed.
STORED = ["llama", "gpt2", "gpt-oss", "marian"]


@each(STORED, slow=STORED[2:])
def test_bfloat16_is_written_as_transformers_would_and_read_as_float32(name):
    expected = {word: w.to(torch.bfloat16) for word, w in tensors(directory(name)).items()}
    assert_same_tensors(tensors(saved(name, "bfloat16")), expected)
    assert reread(saved(name, "bfloat16")).dtype == torch.bfloat16
    again = jf.load(saved(name, "bfloat16"))
    assert filled(again.config) == filled(loaded(name).config)
    rounded = jax.tree.map(
        lambda leaf: np.asarray(leaf.astype("bfloat16").astype("float32")), loaded(name).params
    )
    assert_same_leaves(again.params, rounded)


@each(STORED, slow=STORED[2:])
def test_shards_are_read_as_one_file_is_and_written_for_transformers(name):
    model, hf, ours = loaded(name), folder(name, "theirs sharded"), folder(name, "ours sharded")
    reference(name).save_pretrained(hf, max_shard_size="20KB")
    sharded = jf.load(hf)
    assert sharded.config == model.config
    assert_same_leaves(sharded.params, model.params)
    jf.save_pretrained(ours, model.params, model.config, model.tokenizer, shard_bytes=20_000)
    indices = [json.loads((at / "model.safetensors.index.json").read_text()) for at in (ours, hf)]
    files = {path.name for path in ours.glob("*.safetensors")}
    assert {*indices[0]["weight_map"].values()} == files and len(files) > 2
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
    assert_same_tensors(tensors(ours), tensors(directory(name)))
    reread(ours)
