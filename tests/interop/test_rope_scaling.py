"""Scalings of RoPE, as config.json states them, against the functions of transformers that compute
their frequencies and attention factors."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers as tf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.interop.architectures import ARCHITECTURES, find_architecture
from jaxformer.interop.hf_config import HFConfig
from jaxformer.layers.positions import FREQUENCIES

ORIGINAL = "original_max_position_embeddings"
# Numbers for 48 pairs, as many as Phi-3-mini has.
SHORT, LONG = (np.geomspace(1, last, 48).round(4).tolist() for last in (2.8, 64.0))
# Name: rope_parameters, max_position_embeddings and head_dim.
SCALINGS = {
    "linear": (dict(rope_type="linear", factor=2.5), 64, 16),
    "dynamic": (dict(rope_type="dynamic", factor=2.0), 64, 16),
    "dynamic, a wide head": (dict(rope_type="dynamic", factor=6.0, rope_theta=5e5), 64, 128),
    "yarn": (dict(rope_type="yarn", factor=4.0, **{ORIGINAL: 64}), 256, 16),
    "yarn of DeepSeek-V3": (
        dict(rope_type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
        | {ORIGINAL: 4096},
        163840,
        64,
    ),
    "yarn of gpt-oss": (
        dict(rope_type="yarn", factor=32.0, rope_theta=150000, truncate=False)
        | {"beta_fast": 32.0, "beta_slow": 1.0, ORIGINAL: 4096},
        131072,
        64,
    ),
    "yarn, one mscale": (
        dict(rope_type="yarn", factor=8.0, mscale=0.5, mscale_all_dim=0, **{ORIGINAL: 1024}),
        8192,
        64,
    ),
    "llama3 of Llama 3.1": (
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
        | {"rope_theta": 5e5, ORIGINAL: 8192},
        131072,
        128,
    ),
    "longrope": (
        dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, **{ORIGINAL: 4096}),
        131072,
        96,
    ),
    "longrope, stated factors": (
        dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, **{ORIGINAL: 64})
        | {"factor": 3.0, "attention_factor": 1.19},
        256,
        96,
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [1, 65, 5000])
def test_frequencies_and_attention_factors_are_those_of_transformers(name, length):
    stated, longest, width = SCALINGS[name]
    kind = stated["rope_type"]
    before = {ORIGINAL: stated[ORIGINAL]} if kind == "longrope" else {}
    reference = (tf.Phi3Config if before else tf.LlamaConfig)(
        hidden_size=2 * width,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 10_000.0} | stated,
        **before,
    )
    expected, scale = ROPE_INIT_FUNCTIONS[kind](reference, "cpu", seq_len=length)
    architecture = "Phi3ForCausalLM" if before else "LlamaForCausalLM"
    config = ARCHITECTURES[architecture].read(HFConfig(reference.to_dict()), architecture)
    assert config.rope.scaling == kind
    frequencies = jax.jit(FREQUENCIES[kind], static_argnums=0)(config, jnp.arange(length)[None])
    np.testing.assert_allclose(np.squeeze(frequencies), expected.numpy(), rtol=3e-6)
    np.testing.assert_allclose(config.rope_scale, scale, rtol=1e-12)


def test_every_scaling_is_compared_with_transformers():
    assert {stated["rope_type"] for stated, *_ in SCALINGS.values()} == {*FREQUENCIES} - {"none"}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "GPTNeoX", "StableLm", "Olmo3", "Gemma3"]
)
def test_rope_scaling_beside_rope_parameters_is_followed_as_transformers_does(name, key):
    """What model cards tell people to add to a config.json."""
    plain = {"rope_type": "default", "rope_theta": 7e5}
    kind = dict(sliding_attention=dict(plain), full_attention=dict(plain))
    class_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    keys = getattr(tf, class_name)().to_dict()
    keys["rope_parameters"] = kind if name in ("Gemma3", "Olmo3") else plain
    keys["rope_scaling"] = {key: "linear", "factor": 4.0}
    theirs = getattr(tf, class_name).from_dict(copy.deepcopy(keys)).rope_parameters
    theirs = theirs.get("full_attention", theirs)
    architecture = f"{name}ForCausalLM"
    config = ARCHITECTURES[architecture].read(HFConfig(keys), architecture)
    assert config.rope.theta == theirs["rope_theta"]
    expected = ("none", 1) if theirs["rope_type"] == "default" else ("linear", 4)
    assert (config.rope.scaling, config.rope.factor) == expected


LONGROPE = {"rope.scaling": "longrope", "rope.short_factor": "1 1", "rope.long_factor": "1 2"}


@pytest.mark.parametrize("older", ["longrope", "su"])
def test_phi3_is_written_with_the_three_keys_of_older_files_and_read_from_them(older):
    """transformers 4 refuses a rope_scaling of Phi-3 with any other key."""
    family = ARCHITECTURES["Phi3ForCausalLM"]
    file = dict(
        vocab_size=8,
        hidden_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling=dict(type=older, short_factor=SHORT, long_factor=LONG),
    )
    config = family.read(HFConfig(file), "Phi3ForCausalLM")
    assert (config.rope.factor, config.rope.original_length) == (32.0, 4096)
    written = family.write(config, "Phi3ForCausalLM")
    assert written["rope_scaling"] == file["rope_scaling"] | {"type": "longrope"}
    assert written[ORIGINAL] == 4096


@pytest.mark.parametrize(
    "fields, obstacle",
    [
        ({"rope.scaling": "llama3"}, 'rope_type="llama3" is not supported'),
        # The file has no key for the width of a head, and divisors for that of d_model / n_heads.
        (LONGROPE | dict(head_dim=4), "must be 6 numbers"),
        (LONGROPE | {"head_dim": 4, "d_model": 16, "rope.original_length": 99}, None),
    ],
)
def test_phi3_is_written_where_transformers_reads_it(fields, obstacle):
    sizes = {"vocab_size": 8, "d_model": 48, "n_heads": 4, "rope.factor": 2.0}
    config = with_settings(ModelConfig(), sizes | fields)
    family = ARCHITECTURES["Phi3ForCausalLM"]
    if obstacle:
        with pytest.raises(ConfigError, match=obstacle):
            find_architecture(config, "Phi3ForCausalLM")
    else:
        assert find_architecture(config, "Phi3ForCausalLM")[0] is family
