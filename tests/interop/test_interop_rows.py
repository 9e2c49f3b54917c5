"""The rows of the configs' mapping one by one, on keys alone: what is left out, what is refused,
what is written."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers as tf
from pretrained_variants import DEBERTA
from transformers.models.auto import configuration_auto

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.config.settings import with_settings
from jaxformer.interop import tensor_table
from jaxformer.interop.architectures import (
    ARCHITECTURES,
    BASES,
    HF_FAMILIES,
    differences,
    read_architecture,
)
from jaxformer.interop.encoder_decoders import DECODER
from jaxformer.interop.fields import FULL, SLIDING, Key
from jaxformer.interop.hf_config import REQUIRED, HFConfig
from jaxformer.interop.pretrained import open_pretrained
from jaxformer.models.transformer import specs

FAMILY = {family.model_type: family for family in HF_FAMILIES}
CLASSES = {kind: tf.CONFIG_MAPPING[kind] for kind in FAMILY}
ENCODER = dict(family="encoder", norm="layer", norm_placement="post", bias="all", activation="gelu")
ENCODER |= {
    "positions": "learned",
    "embedding.norm": True,
    "embedding.token_types": 2,
    "n_heads": 1,
}
NAMES = {"lm_head.weight"}  # as of a T5 that may be untied


def stated(kind, **keys):
    """What transformers' config of these keys says, all defaults filled in."""
    return json.loads(CLASSES[kind].from_dict(keys).to_json_string(use_diff=False))


def needed(kind):
    """The keys that a file of a family has to have, as transformers writes them."""
    listed = DECODER.rows if kind == "t5gemma" else FAMILY[kind].fields
    return {row.hf for row in listed if isinstance(row, Key) and row.needed}


# Keys beside these without which a default config is not that of a file.
STATED = {"num_key_value_heads", "head_dim", "encoder_layers", "max_position_embeddings"}
STATED |= {"num_experts", "num_local_experts", "query_pre_attn_scalar", "rotary_dim"}
STATED |= {"qk_nope_head_dim", "qk_rope_head_dim"}


def sized(kind, **keys):
    """The keys, and what else a file has to have, as of transformers' default config."""
    wanted = needed(kind) | STATED
    if kind in ("gpt_oss", "ministral3"):
        wanted |= {"rope_parameters"}
    if kind in ("kimi_linear", "olmo_hybrid"):
        # Whose recurrent layers have no defaults that are the same at all sizes.
        wanted |= {"layer_types", *(key for key in stated(kind) if key.startswith("linear_"))}
    if kind == "granitemoehybrid":
        # Which a file without experts has not.
        wanted |= {"intermediate_size", "num_experts_per_tok"}

    def of(values):
        return {key: values[key] for key in wanted & values.keys() if values[key] is not None}

    sizes = of(stated(kind))
    for stack in ("encoder", "decoder") if kind == "t5gemma" else ():
        sizes[stack] = of(stated(kind)[stack]) | keys.pop(stack, {})
    return sizes | keys


def read(kind, **keys):
    """Our config of an architecture's keys, the first of its family's architectures."""
    values = HFConfig(sized(kind, **keys), NAMES)
    return FAMILY[kind].read(values, next(iter(FAMILY[kind].architectures)))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_config_of_sizes_alone_is_the_references_default_config(kind):
    for architecture in FAMILY[kind].architectures:
        ours = FAMILY[kind].read(HFConfig(sized(kind), NAMES), architecture)
        hf = FAMILY[kind].read(HFConfig(stated(kind), NAMES), architecture)
        assert differences(ours, hf) == [] and ours.max_length == hf.max_length
        stated_classes = FAMILY[kind].architectures[architecture].get("head.n_classes", 2)
        assert ours.head.n_classes == (stated_classes if ours.output in ("classes", "tags") else 0)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_size_that_a_config_lacks_is_asked_for_by_name(kind):
    sizes = sized(kind)
    table = sizes["decoder"] if kind == "t5gemma" else sizes
    older = {"num_experts", "num_local_experts", "num_decoder_layers"}  # which others stand for
    for key in needed(kind) - older:
        number = table.pop(key)
        with pytest.raises(jf.ConfigError, match=f"{key}=null is not"):
            FAMILY[kind].read(HFConfig(sizes, NAMES), next(iter(FAMILY[kind].architectures)))
        table[key] = number


@pytest.mark.parametrize("kind", CLASSES)
def test_every_key_of_the_references_config_is_known(kind):
    hf = HFConfig(stated(kind), NAMES)
    FAMILY[kind].read(hf, next(iter(FAMILY[kind].architectures)))
    assert hf.unknown() == []


@pytest.mark.parametrize("kind", CLASSES)
def test_the_rate_of_dropout_is_written_by_keys_that_the_reference_has(kind):
    config = dataclasses.replace(read(kind), dropout=0.28125)
    written = FAMILY[kind].write(config, next(iter(FAMILY[kind].architectures)))
    keys = {key for key, value in written.items() if value == 0.28125}
    assert keys and keys <= stated(kind).keys()
    apart = with_settings(config, {"attention.dropout": 0.15625})
    changed = FAMILY[kind].write(apart, next(iter(FAMILY[kind].architectures)))
    of_weights = {key for key in keys if "att" in key}
    assert changed == written | dict.fromkeys(of_weights, 0.15625)
    # A row without such a key has one rate for all, or (MPT) none that may be a fraction.
    assert of_weights or keys in ({"dropout_rate"}, {"resid_pdrop", "emb_pdrop"})


WINDOWED = dict(use_sliding_window=True, sliding_window=7)
# which layers have a window, by what stood for it before there was layer_types and since
LAYERS = [
    ("qwen2", dict(use_sliding_window=True, num_hidden_layers=30)),
    ("qwen2", dict(use_sliding_window=True, num_hidden_layers=5, max_window_layers=2)),
    ("qwen3", dict(use_sliding_window=True, num_hidden_layers=30, sliding_window=7)),
    ("qwen3", dict(use_sliding_window=False, num_hidden_layers=30, max_window_layers=2)),
    ("gemma2", dict(num_hidden_layers=5)),
    ("olmo3", dict(num_hidden_layers=9)),
    ("ministral", dict(num_hidden_layers=3)),
    ("smollm3", WINDOWED | dict(num_hidden_layers=9)),
    ("smollm3", dict(use_sliding_window=False, sliding_window=7, num_hidden_layers=9)),
    ("smollm3", WINDOWED | dict(num_hidden_layers=2, no_rope_layers=[0, 1])),
    ("gemma3_text", dict(num_hidden_layers=13)),
    ("gemma3_text", dict(num_hidden_layers=7, sliding_window_pattern=3)),
    ("gemma3_text", dict(num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL])),
]


@pytest.mark.parametrize("kind, keys", LAYERS, ids=str)
def test_the_layers_with_a_window_are_the_references(kind, keys):
    config = read(kind, **keys)
    letters = config.window_pattern if config.window else "f"
    pattern = (letters * config.n_layers)[: config.n_layers]
    layers = [SLIDING if letter == "w" else FULL for letter in pattern]
    assert layers == stated(kind, **keys)["layer_types"]


YARN = dict(rope_type="yarn", factor=1.0)
REFUSED = [
    ("marian", dict(decoder_vocab_size=75, vocab_size=71), "decoder_vocab_size=75"),
    ("qwen3", dict(num_hidden_layers=2, layer_types=[FULL, "chunked_attention"]), "layer_types"),
    ("gemma2", dict(num_hidden_layers=3, layer_types=["full_attention"]), "3 of"),
    ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("smollm3", dict(no_rope_layers=[1, 0]), "36 of 0 and 1"),
    ("smollm3", dict(no_rope_layers=[2] * 36), "no_rope_layers"),
    ("smollm3", dict(no_rope_layer_interval=0), "no_rope_layer_interval=0"),
    ("smollm3", dict(num_hidden_layers=1, layer_types=[SLIDING]), "use_sliding_window"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ("llama", dict(rope_parameters=dict(rope_type="proportional", factor=2.0)), "proportional"),
    ("llama", dict(rope_parameters=dict(partial_rotary_factor=0.4)), "partial_rotary"),
    ("llama", dict(rope_parameters=YARN | dict(attention_factor=1.2)), r"rope_parameters\.factor"),
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=1.0)), "factor=1.0"),
    ("olmo3", dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear"))), "rope_type"),
    ("gemma3_text", dict(attn_logit_softcapping=1.5), "attn_logit_softcapping"),
    ("gpt_oss", dict(swiglu_alpha=1.2), "swiglu_alpha"),
    ("mpt", dict(attn_config=dict(alibi_bias_max=16)), "alibi_bias_max"),
    ("mpt", dict(no_bias=False), "no_bias"),
    ("roberta", dict(position_embedding_type="relative_key_query"), "position_embedding_type"),
    ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
    ("mixtral", dict(num_experts_per_tok=None), "num_experts_per_tok=null"),
    ("qwen3_moe", dict(use_sliding_window=True), "use_sliding_window"),
    ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step=0"),
    ("qwen3_moe", dict(mlp_only_layers=["0"]), "a list of numbers of layers"),
    ("qwen3_next", dict(layer_types=["sliding_attention"] * 48), "layer_types="),
    ("qwen3_next", dict(layer_types=["linear_attention"]), '48 of", "full_attention", "linear'),
    ("qwen3_next", dict(full_attention_interval=0), "full_attention_interval=0"),
    ("kimi_linear", dict(q_lora_rank=8), "q_lora_rank=8 is not supported"),
    ("kimi_linear", dict(mla_use_nope=False), "mla_use_nope=false"),
    ("kimi_linear", dict(linear_attn_config={"head_dim": 8}), "full_attn_layers"),
    ("kimi_linear", dict(mlp_layer_types=["sparse", "dense"] * 13), "mlp_layer_types="),
    ("olmo_hybrid", dict(layer_types=7), "layer_types=7"),
    ("qwen3_next", dict(shared_expert_intermediate_size=0), "needs model.experts.shared_ff"),
    ("bamba", dict(time_step_limit=[0.0, 0.5]), r"time_step_limit=\[0.0, 0.5\] is not"),
    ("bamba", dict(mamba_d_head=63), "mamba_d_head=63"),
    ("bamba", dict(mamba_proj_bias=True), "mamba_proj_bias=true"),
    ("bamba", dict(attn_layer_indices=[99]), "numbers below 32"),
    ("bamba", dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
    ("granitemoehybrid", dict(layer_types=["mamba"]), '32 of", "full_attention"'),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv=8.0"),
    ("gpt_oss", dict(swiglu_limit=5.0), "swiglu_limit=5.0"),
    ("gpt_oss", dict(hidden_act="gelu"), "hidden_act"),
    ("gpt_oss", dict(quantization_config={"quant_method": "gptq"}), "mxfp4"),
    ("mixtral", dict(quantization_config={"quant_method": "mxfp4"}), "quantization_config"),
    ("bloom", dict(apply_residual_connection_post_layernorm=True), "post_layernorm=true"),
    ("bloom", dict(slow_but_exact=True), "slow_but_exact"),
    ("cohere", dict(logit_scale=None), "logit_scale=null"),
    ("cohere", dict(logit_scale=0), "logit_scale=0"),
    ("falcon", dict(alibi=True), "alibi=true"),
    ("falcon", dict(new_decoder_architecture=True, parallel_attn=False), "parallel_attn=false"),
    ("falcon", dict(new_decoder_architecture=True, num_ln_in_parallel_attn=3), "parallel_attn=3"),
    ("falcon", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn=2"),
    ("falcon", dict(multi_query=False, num_kv_heads=2), "num_kv_heads=2"),
    ("mpt", dict(attn_config=dict(alibi=False)), "alibi=false"),
    ("mpt", dict(attn_config=dict(clip_qkv=6.0)), "clip_qkv=6.0"),
    ("mpt", dict(attn_config=dict(qk_ln=True)), "qk_ln=true"),
    ("mpt", dict(attn_config=dict(softmax_scale=0.0)), "softmax_scale=0.0"),
    ("mpt", dict(attn_config=dict(rotary=True)), "attn_config.rotary=true"),
    ("mpt", dict(attn_config=7), "attn_config=7"),
    ("mpt", dict(logit_scale="inv_sqrt_d_model"), "logit_scale"),
    ("mpt", dict(expansion_ratio=3), "expansion_ratio=3"),
    ("gptj", dict(rotary_dim=None), "rotary_dim=null"),
    ("gptj", dict(n_embd=24, n_head=4, rotary_dim=8), "rotary_dim=8"),
    ("gpt_neo", dict(num_layers=3), r"attention_types=\[\[\[.global"),
    ("gpt_neo", dict(attention_types=[[["global", "sparse"], 12]]), "attention_types"),
    ("gpt_neo", dict(attention_types=[["global", 24]]), "attention_types"),
    ("gpt_neo", dict(attention_types=[[["global"], 10**9]]), "attention_types"),
    ("opt", dict(word_embed_proj_dim=512, hidden_size=1024), "word_embed_proj_dim=512"),
    ("opt", dict(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine"),
    ("opt", dict(_remove_final_layer_norm=True), "_remove_final_layer_norm"),
    ("bert", dict(position_embedding_type="relative_key"), "position_embedding_type"),
    ("roberta", dict(hidden_act="relu"), "hidden_act"),
    ("roberta", dict(pad_token_id=511, max_position_embeddings=512), "pad_token_id"),
    ("electra", dict(hidden_act="relu"), "hidden_act"),
    ("albert", dict(embedding_size=48, hidden_size=48), "embedding_size"),
    ("albert", dict(inner_group_num=2), "inner_group_num"),
    ("albert", dict(num_hidden_groups=5), "num_hidden_groups"),
    ("deberta-v2", dict(conv_kernel_size=3), "conv_kernel_size"),
    ("deberta-v2", dict(pos_att_type=["c2p"]), "pos_att_type"),
    ("deberta-v2", DEBERTA | dict(pos_att_type="c2p"), "pos_att_type"),
    ("deberta-v2", DEBERTA | dict(share_att_key=False), "share_att_key"),
    ("deberta-v2", DEBERTA | dict(norm_rel_ebd="none"), "norm_rel_ebd"),
    ("deberta-v2", DEBERTA | dict(position_buckets=-1), "position_buckets"),
    ("deberta-v2", dict(embedding_size=64), "embedding_size"),
    ("mpnet", dict(relative_attention_num_buckets=16), "relative_attention_num_buckets"),
    ("mpnet", dict(pad_token_id=0), "pad_token_id"),
    ("nomic_bert", dict(hidden_act="tanh"), "hidden_act"),
    ("modernbert", dict(attention_bias=True), "attention_bias"),
    ("modernbert", dict(norm_bias=True), "norm_bias"),
    ("modernbert", dict(decoder_bias=False), "decoder_bias"),
    ("modernbert", dict(hidden_activation="silu"), "hidden_activation"),
    ("modernbert", dict(global_attn_every_n_layers=0), "global_attn_every_n_layers"),
    ("modernbert", dict(num_hidden_layers=3, layer_types=["full_attention"]), "3 of"),
    ("modernbert", dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rope_type"),
    ("clip_text_model", dict(hidden_act="mish"), "hidden_act"),
    ("bart", dict(normalize_before=True), "normalize_before"),
    ("bart", dict(add_final_layer_norm=True), "add_final_layer_norm"),
    ("bart", dict(normalize_embedding=False), "normalize_embedding"),
    ("bart", dict(decoder_ffn_dim=7), "decoder_ffn_dim"),
    ("marian", dict(normalize_embedding=True), "normalize_embedding"),
    ("t5gemma", dict(encoder=dict(hidden_size=64)), r"encoder\.hidden_size=64 is not supported"),
    ("t5gemma", dict(encoder=dict(rope_parameters=dict(rope_theta=5.0))), r"encoder\.rope_theta=5"),
    ("t5gemma", dict(encoder=dict(layer_types=["full_attention"] * 26)), r"encoder\.layer_types"),
    ("t5gemma", dict(encoder=dict(state_size=3)), r"encoder\.state_size=3"),
    ("deepseek_v3", dict(quantization_config={"quant_method": "fp8"}), "quantization_config=.*fp8"),
    ("deepseek_v3", dict(num_key_value_heads=8), "num_key_value_heads=8 .* supported: 128"),
    ("deepseek_v3", dict(scoring_func="softmax"), 'scoring_func="softmax" is not supported'),
    ("deepseek_v3", dict(topk_method="group_limited_greedy"), "topk_method="),
    ("deepseek_v3", dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported"),
    ("deepseek_v3", dict(n_shared_experts=0), 'n_shared_experts=0 .* "a whole number from 1"'),
    ("deepseek_v3", dict(head_dim=56), "head_dim=56 is not supported"),
    ("deepseek_v3", dict(rope_scaling=dict(type="linear", factor=2.0, mscale=1.0)), "mscale=1.0"),
]


@pytest.mark.parametrize("kind, keys, reason", REFUSED, ids=str)
def test_a_key_that_is_not_computed_is_refused_by_name(kind, keys, reason):
    with pytest.raises(jf.ConfigError, match=reason):
        read(kind, **keys)


@pytest.mark.parametrize(
    "pattern, dense, keys",
    [
        ("e", 2, [0, 1]),
        ("ed", 0, [1, 3]),
        ("de", 3, [0, 1, 2]),
        ("e", 0, []),
        ("d", 0, [0, 1, 2, 3]),
    ],
)
def test_layers_without_experts_are_written_by_their_numbers(pattern, dense, keys):
    config = read("qwen3_moe", num_hidden_layers=4, hidden_size=64, num_attention_heads=4)
    config = with_settings(config, {"experts.pattern": pattern, "experts.dense_layers": dense})
    family, name = FAMILY["qwen3_moe"], "Qwen3MoeForCausalLM"
    written = family.write(config, name)
    assert written["mlp_only_layers"] == keys and written["decoder_sparse_step"] == 1
    assert differences(family.read(HFConfig(written, ()), name), config) == []


NEEDED = {  # keys of any family that change what is computed
    "quantization_config": {"quant_method": "gptq"},
    "is_decoder": True,
    "add_cross_attention": True,
    "tie_encoder_decoder": True,
    "pruned_heads": {"0": [1]},
    "cross_attention_hidden_size": 24,
}


def test_a_key_of_any_family_that_changes_what_is_computed_is_refused_by_name():
    for key, value in NEEDED.items():
        with pytest.raises(jf.ConfigError, match=key):
            read("gpt2", **{key: value})
    assert NEEDED.keys() == REQUIRED.keys()


def test_a_model_type_names_its_architecture_where_it_has_one_and_else_asks_for_it():
    found = read_architecture(Path("config.json"), {"model_type": "gpt2"})
    assert found == (FAMILY["gpt2"], "GPT2LMHeadModel")
    with pytest.raises(jf.ConfigError, match="BertForMaskedLM"):
        read_architecture(Path("config.json"), {"model_type": "bert"})


def test_no_model_type_of_transformers_is_read_as_the_class_of_another_one():
    """The tensors of near relatives (Gemma and Llama, OLMo and OLMo 2) have the same names."""
    kinds = [*configuration_auto.CONFIG_MAPPING_NAMES]
    assert {*FAMILY, "gemma", "olmo", "phi3", "xlm-roberta", "mbart", "mt5"} <= {*kinds}
    types = {name: family.model_type for name, family in ARCHITECTURES.items()}
    types |= {base: types[name] for base, name in BASES.items()}
    for index, kind in enumerate(kinds):
        # Each with a seventh of the classes.
        for name, expected in [*types.items()][index % 7 :: 7]:
            keys = {"model_type": kind, "architectures": ["NoSuchModel", name]}
            if kind == expected:
                assert read_architecture(Path(), keys)[0].model_type == kind
                continue
            with pytest.raises(jf.ConfigError, match=r"Download config\.json again") as told:
                read_architecture(Path(), keys)
            assert f'model_type="{kind}"' in str(told.value) and name in str(told.value)


def test_a_t5_that_is_not_scaled_is_tied_where_no_other_output_layer_is_stored():
    keys = sized("t5", tie_word_embeddings=False)
    for names, tied in (((), True), (NAMES, False)):
        config = FAMILY["t5"].read(HFConfig(keys, names), "T5ForConditionalGeneration")
        assert (config.tied_head, config.head.scale) == (tied, "none")


def test_dynamic_scaling_stretches_the_length_by_its_factor_and_writes_the_one_before_it():
    keys = dict(
        max_position_embeddings=96,
        rope_theta=9.0,
        rope_scaling=dict(rope_type="dynamic", factor=2.5),
    )
    config = read("llama", **keys)
    assert (config.max_length, config.rope.original_length) == (240, 96)
    written = FAMILY["llama"].write(config, "LlamaForCausalLM")
    assert {key: written[key] for key in keys} == keys


@pytest.mark.parametrize("scale", [0.0625, 0.3, 9.99, 0.7071067811865476])
def test_the_factor_of_the_logits_is_written_as_it_was_read(scale):
    config = read("cohere", logit_scale=scale)
    assert config.head.divisor == pytest.approx(1 / scale, rel=1e-14)
    written = FAMILY["cohere"].write(config, "CohereForCausalLM")
    assert written["logit_scale"] == pytest.approx(scale, rel=1e-14)
    assert read("cohere", **written).head.divisor == config.head.divisor


TINIEST = dict(vocab_size=9, d_model=4, n_layers=1, n_heads=1, d_ff=4)


class Spoken:
    """A tokenizer that knows of every role of a token."""

    def ids(self):
        return {"eos_token_id": 3, "decoder_start_token_id": 5, "forced_bos_token_id": 6}

    def save(self, path):
        path.write_text("{}")


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_how_a_target_begins_is_said_of_models_that_write_one_alone(family, tmp_path):
    of_t5 = {}
    if family == "encoder_decoder":
        of_t5 = {"positions": "t5", "attention.scale": 1.0, "activation": "relu"}
    config = with_settings(jf.ModelConfig(), {**TINIEST, "family": family, **of_t5})
    jf.save_pretrained(tmp_path, jf.init(config, jax.random.key(0)), config, Spoken())
    fields = json.loads((tmp_path / "config.json").read_text())
    roles = {key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert roles == {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": None}
    begins = (5, 6) if of_t5 else (None, None)
    keys = ("decoder_start_token_id", "forced_bos_token_id")
    assert tuple(map(fields.get, keys)) == begins


def test_labels_are_in_the_order_of_their_numbers_beyond_ten(tmp_path):
    sizes = ENCODER | TINIEST | dict(max_length=3)
    config = with_settings(
        jf.ModelConfig(),
        {**sizes, "head.kind": "classes", "head.n_classes": 12, "head.pooler": True},
    )
    labels = tuple(f"of {number}" for number in range(12))
    jf.save_pretrained(tmp_path, jf.init(config, jax.random.key(0)), config, labels=labels)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert open_pretrained(tmp_path).labels == labels and fields["label2id"] == {
        label: i for i, label in enumerate(labels)
    }
    jf.save_pretrained(tmp_path, jf.init(config, jax.random.key(0)), config)
    assert open_pretrained(tmp_path).labels == tuple(tf.BertConfig(num_labels=12).id2label.values())


UNTIED = {"bert": tf.BertForMaskedLM, "roberta": tf.RobertaForMaskedLM}


@pytest.mark.parametrize("kind", UNTIED)
def test_an_output_layer_of_its_own_is_written_by_the_references_names_both_of_its_biases(
    kind, tmp_path
):
    keys = dict(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    keys |= dict(vocab_size=9, max_position_embeddings=8, tie_word_embeddings=False)
    config = FAMILY[kind].read(HFConfig(keys, NAMES), UNTIED[kind].__name__)
    jf.save_pretrained(tmp_path, jf.init(config, jax.random.key(0)), config)
    model, told = UNTIED[kind].from_pretrained(tmp_path, output_loading_info=True)
    assert not model.config.tie_word_embeddings
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def drawn(config):
    """Random leaves by path."""
    rng = np.random.default_rng(0)
    return {
        path: rng.normal(size=spec.shape).astype(np.float32)
        for path, spec in rows(specs(config)).items()
    }


def reader(plan, config, stored):
    """What reads a part of a leaf, and the list of the (tensor, size) that it reads for it."""
    asked = []

    def read_rows(name, rows):
        asked.append((name, stored[name][rows].size))
        return stored[name][rows]

    names = {name: name for name in stored}
    return tensor_table.leaf_reader(plan, specs(config), names, read_rows), asked


CUTS = [slice(None), slice(2, 6), slice(3, 4)]


def test_a_part_of_a_leaf_is_that_part_of_its_tensors():
    """As each device of a mesh asks for its own: of a table, a matrix of the head, a vector, and
    layers. Of a table no other rows are read."""
    sizes = dict(vocab_size=7, d_model=6, n_layers=7, d_ff=7, max_length=7)
    config = with_settings(jf.ModelConfig(), {**ENCODER, **sizes, "tied_head": True})
    leaves = drawn(config)
    plan = FAMILY["bert"].tensors(config)
    stored = {tensor.name: tensor_table.joined_tensor(tensor, leaves) for tensor in plan}
    part, asked = reader(plan, config, stored)
    assert not tensor_table.paths_without_tensor(plan, specs(config))
    for path, leaf in leaves.items():
        whole = [slice(None)] * (leaf.ndim - 1)
        for cut in CUTS:
            for index in ((cut, *whole), (*whole, cut)):
                found = part(path, index, np.float32)
                assert found.dtype == np.float32, (path, index)
                assert np.array_equal(found, leaf[index]), (path, index)
    table_reads = [size for name, size in asked if name.endswith("word_embeddings.weight")]
    assert table_reads == [count * config.d_model for count in (7, 7, 4, 7, 1, 7)]


TINY = dict(vocab_size=7, hidden_size=8, num_hidden_layers=3, num_attention_heads=2)
TINY |= dict(num_key_value_heads=1, intermediate_size=6, num_local_experts=4, num_experts_per_tok=2)
EXPERTS = {
    "mixtral": {},
    "granitemoeshared": dict(shared_intermediate_size=5),
    "gpt_oss": {},
    "qwen3_moe": dict(mlp_only_layers=[0], moe_intermediate_size=5),
    "olmoe": {},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_part_of_the_experts_is_that_part_of_their_tensors(kind):
    """As each device of a mesh that divides experts asks for its own: it reads no others."""
    config = read(kind, **TINY | EXPERTS[kind])
    leaves = drawn(config)
    plan = FAMILY[kind].tensors(config)
    assert not tensor_table.paths_without_tensor(plan, specs(config))
    stored = {tensor.name: tensor_table.joined_tensor(tensor, leaves) for tensor in plan}
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        tensor.name: tensor.shape for tensor in plan
    }
    part, asked = reader(plan, config, stored)
    for path, leaf in leaves.items():
        for index in itertools.product([slice(None), slice(1, 3)], repeat=min(2, leaf.ndim)):
            asked.clear()
            cut = (*index, *[slice(None)] * (leaf.ndim - len(index)))
            assert np.array_equal(part(path, cut, np.float32), leaf[cut]), (path, cut)
            if "experts.down" in path:
                # One expert at a time, and those asked for.
                matrix = leaf[0, 0].size
                assert [size for _, size in asked] == [matrix] * (leaf[index].size // matrix)


def test_values_beyond_float16_are_refused_where_they_are_read_and_written(tmp_path):
    config = with_settings(jf.ModelConfig(), TINIEST)
    params = jf.init(config, jax.random.key(0))
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[2].set(1e5)
    jf.save_pretrained(tmp_path, params, config, dtype="bfloat16")
    beyond = "beyond the range of float16"
    with pytest.raises(jf.ConfigError, match=rf"final_norm\.scale has values {beyond}"):
        jf.load(tmp_path, dtype="float16")
    with pytest.raises(jf.ConfigError, match=beyond):
        jf.save_pretrained(tmp_path / "out", params, config, dtype="float16")
