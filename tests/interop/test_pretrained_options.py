"""No option of a config.json is ignored: what transformers can be told is computed here too, or
refused by name (test_interop_rows.py)."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import assert_close, batch_for, directory, logits, made, our_logits, rewrite
from pretrained_variants import (
    BART,
    GEMMA,
    LLAMA,
    LOCAL,
    PHI3,
    QWEN,
    QWEN_MOE,
    STARCODER2,
    VARIANTS,
    WINDOWED,
    YARN,
    rope,
)
from transformers.activations import ACT2FN

import jaxformer as jf
from jaxformer.interop.architectures import ARCHITECTURES
from jaxformer.interop.hf_config import HFConfig
from jaxformer.layers.ffn import ACTIVATIONS

# Beside those of tests/pretrained_variants.py.
CAUSAL = VARIANTS | {
    "mistral": (tf.MistralForCausalLM, LLAMA),
    "qwen3": (tf.Qwen3ForCausalLM, QWEN),
    "ministral": (tf.MinistralForCausalLM, LLAMA | dict(sliding_window=5)),
    "starcoder2": (tf.Starcoder2ForCausalLM, STARCODER2),
    "gemma3": (tf.Gemma3ForCausalLM, GEMMA | dict(attn_logit_softcapping=None)),
    "phi3": (tf.Phi3ForCausalLM, PHI3),
    "qwen3-moe": (tf.Qwen3MoeForCausalLM, QWEN_MOE),
    "marian": (tf.MarianMTModel, BART),
}
MSCALE = dict(mscale=0.7, mscale_all_dim=0.4)
# What no variant of tests/pretrained_variants.py has. (What is refused: test_interop_rows.py.)
OPTIONS = [
    ("llama", rope("yarn", 4.0, **YARN, **MSCALE)),
    ("mistral", dict(sliding_window=5, tie_word_embeddings=True)),
    ("gemma3", {"rope_parameters": {"full_attention": dict(rope_type="default", rope_theta=77.0)}}),
    ("gpt-neox", dict(rotary_pct=0.3)),
    # Slow from here on.
    ("gpt2", dict(tie_word_embeddings=False)),
    ("llama", rope("yarn", 4.0, **YARN, mscale=0.7)),
    ("llama", rope("yarn", 4.0, **YARN, truncate=False)),
    ("llama", rope("yarn", None, original_max_position_embeddings=16)),
    ("llama", rope("yarn", 4.0)),
    ("llama", rope("linear", 1.0)),
    ("mistral", dict(sliding_window=5) | rope("linear", 2.0)),
    ("qwen2", WINDOWED | dict(max_window_layers=0)),
    ("qwen3", WINDOWED | dict(max_window_layers=2)),
    ("smollm3", dict(no_rope_layers=[1] * 5)),
    ("olmo3", dict(layer_types=["full_attention"] * 5)),
    ("olmo3", dict(rope_parameters={"full_attention": LOCAL})),
    ("olmo3", dict(rope_parameters={"sliding_attention": LOCAL})),
    ("granite", dict(head_dim=10, logits_scaling=3)),
    ("ministral", dict(layer_types=["sliding_attention", "full_attention"])),
    ("starcoder2", dict(head_dim=10)),
    ("gemma2", dict(layer_types=["full_attention"] * 2 + ["sliding_attention", "full_attention"])),
    ("gemma2", dict(query_pre_attn_scalar=10, num_key_value_heads=6)),
    ("gemma3", dict(layer_types=["sliding_attention"] * 4)),
    ("phi3", dict(sliding_window=5)),
    ("mixtral", dict(num_experts_per_tok=5) | rope("linear", 2.0)),
    ("qwen3-moe", dict(mlp_only_layers=[0, 1, 2, 3])),
    ("granite-moe", dict(head_dim=10, num_local_experts=2)),
    ("gpt-oss", dict(layer_types=["full_attention"] * 3)),
    ("gpt-oss", {"rope_parameters": None}),
    ("glm4", rope("default", None, partial_rotary_factor=0.34)),
    ("falcon", dict(num_kv_heads=2)),
    ("falcon", dict(new_decoder_architecture=True, multi_query=False)),
    ("gptj", dict(rotary_dim=6)),
    ("gpt-neo", dict(attention_types=[[["local"], 3]], intermediate_size=None)),
    ("bert masked", dict(tie_word_embeddings=False)),
    ("bert masked", dict(type_vocab_size=1)),
    ("t5", dict(feed_forward_proj="gated-silu")),
    ("t5", dict(num_layers=1, num_decoder_layers=None)),
    ("marian", dict(d_model=33, encoder_attention_heads=3, decoder_attention_heads=3)),
    ("m2m_100", dict(max_position_embeddings=9)),
]
CASES = [
    pytest.param(*option, id=f"{option[0]} {option[1]}", marks=[pytest.mark.slow] * (at >= 4))
    for at, option in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_an_option_is_computed_as_the_reference_does(family, changes, tmp_path):
    architecture, settings = CAUSAL[family]
    model = made(architecture, settings | changes, seed=5)
    model.save_pretrained(tmp_path)
    batch = batch_for(model)
    assert_close(our_logits(jf.load(tmp_path), batch), logits(model, batch), batch)


GPT2_SIZES = ("n_embd", "n_layer", "n_head")
LLAMA_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@pytest.mark.parametrize("name", ACT2FN)
def test_an_activation_is_the_references_or_refused_by_name(name):
    gpt2, llama = ARCHITECTURES["GPT2LMHeadModel"], ARCHITECTURES["LlamaForCausalLM"]
    x = np.linspace(-4, 4, 81, dtype=np.float32)
    reference = ACT2FN[name]
    sizes = dict.fromkeys(("vocab_size", *GPT2_SIZES, *LLAMA_SIZES), 2)
    sizes |= {"n_embd": 8, "hidden_size": 8, "max_position_embeddings": 8, "n_positions": 8}
    sizes |= {"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-6}
    for family, key in ((gpt2, "activation_function"), (llama, "hidden_act")):
        try:
            config = family.read(HFConfig(sizes | {key: name}), next(iter(family.architectures)))
        except jf.ConfigError as error:
            assert f'{key}="{name}"' in str(error)
            continue
        activation = ACTIVATIONS[config.activation]
        expected = reference(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(activation(jnp.asarray(x)), expected, atol=2e-6)


def test_a_key_that_neither_knows_is_told(tmp_path):
    place = shutil.copytree(directory("llama"), tmp_path / "model")
    rewrite(place, attention_multiplier=0.3)
    with pytest.warns(UserWarning, match="attention_multiplier"):
        jf.load(place)
