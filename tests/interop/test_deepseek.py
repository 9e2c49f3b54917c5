"""What of DeepSeek-V3's config.json and files is special: YaRN's factor of the scores, layers that
predict further tokens, and what is refused by name."""

import json
import math

import jax
import numpy as np
import pytest
from families import LATENT, SIZES
from pretrained import directory, loaded, tensors
from safetensors.torch import load_file, save_file

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.interop.architectures import find_architecture
from jaxformer.interop.experts import DEEPSEEK_V3
from jaxformer.interop.hf_config import HFConfig

ARCHITECTURE = "DeepseekV3ForCausalLM"
# The config.json of deepseek-ai/DeepSeek-V3, but for its keys that change no logit, and those that
# are the defaults of its class.
PUBLISHED = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def read(**keys):
    hf = HFConfig(PUBLISHED | keys, ())
    config = DEEPSEEK_V3.read(hf, ARCHITECTURE)
    assert not hf.unknown()
    return config


def test_the_published_config_is_read_and_written_back():
    config = read()
    assert (config.head_width, config.latent.rope_head_dim, config.value_width) == (192, 64, 128)
    assert (config.latent.kv_rank, config.latent.query_rank, config.rope.pairing) == (
        512,
        1536,
        "interleaved",
    )
    assert (config.experts.n, config.experts.shared_ff, config.experts.dense_layers) == (
        256,
        2048,
        3,
    )
    assert (config.experts.router, config.experts.router_bias, config.experts.scale) == (
        "sigmoid",
        "balanced",
        2.5,
    )
    m = 0.1 * math.log(40) + 1
    np.testing.assert_allclose(config.attention.scale, 192**-0.5 * m * m, rtol=1e-12)
    assert config.rope_scale == 1
    written = DEEPSEEK_V3.write(config, ARCHITECTURE)
    assert find_architecture(config, ARCHITECTURE)[0] is DEEPSEEK_V3
    different = {key for key in PUBLISHED if written.get(key) != PUBLISHED[key]}
    assert different == {"aux_loss_alpha", "ep_size", "seq_aux", "num_nextn_predict_layers"} | {
        "rope_scaling"
    }
    scaling = PUBLISHED["rope_scaling"] | {"rope_type": "yarn", "attention_factor": 1.0}
    scaling |= {"truncate": True}
    assert written["rope_scaling"].items() <= scaling.items()


@pytest.mark.parametrize(
    "mscales", [{}, {"mscale_all_dim": 0.707}, {"mscale": 0.5, "mscale_all_dim": 0.7071067811}]
)
def test_the_factor_of_the_scores_survives_a_round_trip(mscales):
    scaling = dict(rope_type="yarn", factor=7.3, original_max_position_embeddings=64)
    config = read(num_hidden_layers=4, n_routed_experts=16, rope_scaling=scaling | mscales)
    assert find_architecture(config, ARCHITECTURE)[0] is DEEPSEEK_V3
    written = DEEPSEEK_V3.write(config, ARCHITECTURE)["rope_scaling"]
    assert written.get("mscale_all_dim") == pytest.approx(mscales.get("mscale_all_dim"), rel=1e-7)


def with_layer(place, layer):
    """Adds a layer that predicts a further token to a directory of DeepSeek-V3."""
    (file,) = place.glob("*.safetensors")
    held = load_file(file)
    first = held["model.layers.0.input_layernorm.weight"].clone()
    save_file(held | {f"model.layers.{layer}.enorm.weight": first}, file, {"format": "pt"})


def test_the_published_layer_that_predicts_further_is_left_out_and_others_refused(tmp_path):
    before = loaded("deepseek-v3")
    jf.save_pretrained(tmp_path, before.params, before.config)
    with_layer(tmp_path, 61)
    after = jf.load(tmp_path)
    for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with_layer(tmp_path, 3)
    with pytest.raises(jf.ConfigError, match=r"model\.layers\.3\.enorm\.weight: in .* no such"):
        jf.load(tmp_path)


def test_a_latent_model_of_ours_without_experts_is_a_deepseek_of_dense_layers(tmp_path):
    config = with_settings(jf.ModelConfig(), SIZES | LATENT | {"latent.query_rank": 0})
    jf.save_pretrained(tmp_path, jf.init(config, jax.random.key(0)), config)
    keys = json.loads((tmp_path / "config.json").read_text())
    assert keys["architectures"] == [ARCHITECTURE] and keys["q_lora_rank"] is None
    assert keys["first_k_dense_replace"] == 2 and "n_routed_experts" not in keys
    assert jf.load(tmp_path).config.feed_forward == "ffn"


def test_keys_and_values_of_a_head_are_below_each_other_in_one_tensor():
    layer = loaded("deepseek-v3").params["blocks"]["0"]["latent"]
    tensor = tensors(directory("deepseek-v3"))["model.layers.0.self_attn.kv_b_proj.weight"]
    assert layer["k"].shape == (1, 16, 6, 10) and layer["v"].shape == (1, 16, 6, 12)
    np.testing.assert_array_equal(layer["k"][0, :, 2], tensor[44:54].T)
    np.testing.assert_array_equal(layer["v"][0, :, 2], tensor[54:66].T)
