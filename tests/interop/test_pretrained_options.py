"""No option of a config.json is ignored: what transformers can be told is computed here too, or
refused by name."""

import shutil

import pytest
import transformers as tf
from pretrained import assert_close, batch_for, directory, logits, made, our_logits, rewrite
from pretrained_variants import (
    BART,
    BERT,
    BLOOM,
    COHERE,
    FALCON,
    GEMMA,
    GEMMA1,
    GLM4,
    GPT2,
    GPT_NEO,
    GPT_OSS,
    GPTJ,
    GRANITE,
    GRANITE_DENSE,
    LLAMA,
    LLAMA3,
    LOCAL,
    LONG,
    MIXTRAL,
    MPT,
    NEOX,
    OLMO,
    OLMO3,
    OLMOE,
    OPT,
    PHI3,
    QWEN,
    QWEN_MOE,
    ROBERTA,
    SHORT,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    T5,
    VARIANTS,
    WINDOWED,
    YARN,
    rope,
)

import jaxformer as jf

ACTS = (
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_python",
    "gelu_pytorch_tanh",
    "gelu_accurate",
    "gelu_10",
    "quick_gelu",
)
ACTS += (
    "linear",
    "laplace",
    "leaky_relu",
    "mish",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)
CAUSAL = {
    "gpt2": (tf.GPT2LMHeadModel, GPT2),
    "llama": (tf.LlamaForCausalLM, LLAMA),
    "mistral": (tf.MistralForCausalLM, LLAMA),
    "qwen2": (tf.Qwen2ForCausalLM, QWEN),
    "qwen3": (tf.Qwen3ForCausalLM, QWEN),
    "gemma": (tf.GemmaForCausalLM, GEMMA1),
    "smollm3": (tf.SmolLM3ForCausalLM, SMOLLM3),
    "olmo3": (tf.Olmo3ForCausalLM, OLMO3),
    "granite": (tf.GraniteForCausalLM, GRANITE_DENSE),
    "ministral": (tf.MinistralForCausalLM, LLAMA | dict(sliding_window=5)),
    "stablelm": (tf.StableLmForCausalLM, STABLELM),
    "starcoder2": (tf.Starcoder2ForCausalLM, STARCODER2),
    "gemma2": (tf.Gemma2ForCausalLM, GEMMA),
    "gemma3": (tf.Gemma3ForCausalLM, GEMMA | dict(attn_logit_softcapping=None)),
    "phi3": (tf.Phi3ForCausalLM, PHI3),
    "olmo2": (tf.Olmo2ForCausalLM, OLMO),
    "mixtral": (tf.MixtralForCausalLM, MIXTRAL),
    "qwen3-moe": (tf.Qwen3MoeForCausalLM, QWEN_MOE),
    "olmoe": (tf.OlmoeForCausalLM, OLMOE),
    "granite-moe": (tf.GraniteMoeForCausalLM, GRANITE),
    "gpt-oss": (tf.GptOssForCausalLM, GPT_OSS),
    "gpt-neox": (tf.GPTNeoXForCausalLM, NEOX),
    "bloom": (tf.BloomForCausalLM, BLOOM),
    "cohere": (tf.CohereForCausalLM, COHERE),
    "glm4": (tf.Glm4ForCausalLM, GLM4),
    "falcon": (tf.FalconForCausalLM, FALCON),
    "mpt": (tf.MptForCausalLM, MPT),
    "gptj": (tf.GPTJForCausalLM, GPTJ),
    "gpt-neo": (tf.GPTNeoForCausalLM, GPT_NEO),
    "opt": (tf.OPTForCausalLM, OPT),
    "bert": (tf.BertForMaskedLM, BERT),
    "roberta": (tf.RobertaForMaskedLM, ROBERTA),
    "t5": (tf.T5ForConditionalGeneration, T5),
    "bart": (tf.BartForConditionalGeneration, BART),
    "marian": (tf.MarianMTModel, BART),
    "mbart": (tf.MBartForConditionalGeneration, BART),
    "m2m_100": (tf.M2M100ForConditionalGeneration, BART),
}
MSCALE = dict(mscale=0.7, mscale_all_dim=0.4)
LONGROPE = rope("longrope", None, **LONG)
# family, changes, and the words of which a refusal has to name one
OPTIONS = [
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ("gpt2", dict(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
    ("gpt2", dict(tie_word_embeddings=False), "tie_word_embeddings"),
    ("llama", rope("yarn", 4.0, **YARN, **MSCALE), "mscale"),
    ("llama", rope("yarn", 4.0, **YARN, mscale=0.7), "mscale"),
    ("llama", rope("yarn", 4.0, **YARN, truncate=False), "truncate"),
    ("llama", rope("yarn", None, original_max_position_embeddings=16), "factor"),
    ("llama", rope("yarn", 4.0), "original_max_position_embeddings"),
    ("llama", rope("yarn", 1.0, **YARN), "factor"),
    ("llama", rope("yarn", 1.0, attention_factor=1.2, **YARN), "factor"),
    ("llama", rope("linear", 1.0), "factor"),
    ("llama", SHORT | rope("dynamic", 1.0), "factor"),
    ("llama", rope("proportional", 2.0), "proportional"),
    (
        "llama",
        {"rope_parameters": dict(rope_type="default", rope_theta=91.0, partial_rotary_factor=0.4)},
        "partial_rotary",
    ),
    ("llama", dict(num_key_value_heads=6), "num_key_value_heads"),
    ("llama", dict(hidden_act="gelu", tie_word_embeddings=True), "hidden_act"),
    ("mistral", dict(sliding_window=5, tie_word_embeddings=True), "tie_word_embeddings"),
    ("mistral", dict(sliding_window=5) | rope("linear", 2.0), "rope"),
    ("qwen2", WINDOWED | dict(max_window_layers=0), "max_window_layers"),
    ("qwen2", WINDOWED | dict(max_window_layers=9), "max_window_layers"),
    ("qwen2", rope("yarn", 4.0, **YARN), "rope"),
    ("qwen3", WINDOWED | dict(max_window_layers=2), "max_window_layers"),
    ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("gemma", rope("yarn", 4.0, **YARN), "rope"),
    ("smollm3", WINDOWED, "sliding_window"),
    ("smollm3", dict(no_rope_layers=[1] * 5), "no_rope_layers"),
    ("smollm3", dict(sliding_window=5, layer_types=["sliding_attention"] * 5), "sliding_window"),
    ("smollm3", dict(head_dim=10) | rope("linear", 2.0), "head_dim"),
    ("olmo3", dict(attention_bias=True, head_dim=10), "attention_bias"),
    ("olmo3", dict(layer_types=["full_attention"] * 5), "layer_types"),
    ("olmo3", dict(rope_parameters={"full_attention": LOCAL}), "rope"),
    ("olmo3", dict(rope_parameters={"sliding_attention": LOCAL}), "rope"),
    ("olmo3", dict(rope_parameters={"sliding_attention": rope("linear", 2.0)}), "rope"),
    ("granite", rope("llama3", 3.0, **LLAMA3), "rope"),
    ("granite", dict(head_dim=10, logits_scaling=3), "head_dim"),
    ("ministral", dict(layer_types=["sliding_attention", "full_attention"]), "layer_types"),
    ("ministral", dict(layer_types=["full_attention"] * 2), "layer_types"),
    ("stablelm", dict(qk_layernorm=True), "qk_layernorm"),
    ("stablelm", dict(use_parallel_residual=True), "use_parallel_residual"),
    ("stablelm", rope("linear", 2.0, partial_rotary_factor=0.4), "rope"),
    ("starcoder2", rope("yarn", 4.0, **YARN), "rope"),
    ("starcoder2", dict(head_dim=10), "head_dim"),
    ("gemma2", dict(attention_bias=True), "attention_bias"),
    ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (
        "gemma2",
        dict(
            layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"]
        ),
        "layer_types",
    ),
    ("gemma2", rope("linear", 2.0), "rope"),
    ("gemma2", dict(query_pre_attn_scalar=10, num_key_value_heads=6), "query_pre_attn_scalar"),
    (
        "gemma3",
        dict(attn_logit_softcapping=1.5),
        "attn_logit_softcapping",
    ),  # which transformers 5 reads and does not apply
    ("gemma3", dict(attention_bias=True), "attention_bias"),
    ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("gemma3", dict(layer_types=["full_attention"] * 4), "layer_types"),
    ("gemma3", dict(layer_types=["sliding_attention"] * 4), "layer_types"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": dict(rope_type="default", rope_theta=77.0)}},
        "rope",
    ),
    (
        "gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": rope("yarn", 4.0, **YARN)["rope_parameters"],
                "sliding_attention": rope("linear", 2.0)["rope_parameters"],
            },
        },
        "rope",
    ),
    ("phi3", dict(sliding_window=5), "sliding_window"),
    ("phi3", dict(resid_pdrop=0.3), "resid_pdrop"),
    ("phi3", LONGROPE, "rope"),
    ("phi3", LONGROPE | dict(original_max_position_embeddings=300), "factor"),
    ("olmo2", dict(attention_bias=True), "attention_bias"),
    ("olmo2", rope("yarn", 4.0, **YARN), "rope"),
    ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise"),
    ("mixtral", dict(num_experts_per_tok=5) | rope("linear", 2.0), "num_experts_per_tok"),
    ("mixtral", dict(hidden_act="gelu_new"), "hidden_act"),
    ("qwen3-moe", dict(use_sliding_window=True, sliding_window=5), "use_sliding_window"),
    ("qwen3-moe", dict(decoder_sparse_step=3, mlp_only_layers=[1]), "decoder_sparse_step"),
    ("qwen3-moe", dict(mlp_only_layers=[0, 1, 2, 3]), "mlp_only_layers"),
    ("qwen3-moe", dict(decoder_sparse_step=9), "decoder_sparse_step"),
    ("olmoe", dict(clip_qkv=0.5), "clip_qkv"),
    ("olmoe", dict(attention_bias=True), "attention_bias"),
    ("granite-moe", dict(attention_multiplier=1), "attention_multiplier"),
    ("granite-moe", dict(head_dim=10, num_local_experts=2), "head_dim"),
    ("gpt-oss", dict(swiglu_limit=0.5), "swiglu_limit"),
    ("gpt-oss", dict(swiglu_alpha=1.2), "swiglu_alpha"),
    ("gpt-oss", dict(layer_types=["full_attention"] * 3), "layer_types"),
    ("gpt-oss", {"rope_parameters": None}, "rope"),
    ("gpt-oss", rope("linear", 2.0), "rope"),
    ("gpt-neox", dict(rotary_pct=0.3), "rotary_pct"),
    ("gpt-neox", dict(rotary_pct=0.4, rope_scaling=dict(rope_type="linear", factor=3.0)), "rope"),
    ("gpt-neox", dict(hidden_act="gelu_new"), "hidden_act"),
    (
        "bloom",
        dict(apply_residual_connection_post_layernorm=True),
        "apply_residual_connection_post_layernorm",
    ),
    ("bloom", dict(slow_but_exact=True, pretraining_tp=2), "slow_but_exact"),
    ("cohere", dict(use_qk_norm=True), "use_qk_norm"),
    ("cohere", dict(logit_scale=1.0, hidden_act="gelu"), "hidden_act"),
    ("cohere", rope("yarn", 4.0, **YARN), "rope"),
    ("glm4", rope("yarn", 4.0, **YARN, partial_rotary_factor=0.5), "rope"),
    ("glm4", rope("default", None, partial_rotary_factor=0.34), "rope"),
    ("falcon", dict(alibi=True), "alibi"),
    ("falcon", dict(num_kv_heads=2), "num_kv_heads"),
    ("falcon", dict(activation="silu"), "activation"),
    ("falcon", dict(new_decoder_architecture=True, multi_query=False), "multi_query"),
    ("falcon", rope("yarn", 4.0, **YARN), "rope"),
    ("mpt", dict(attn_config=dict(clip_qkv=0.1)), "clip_qkv"),
    ("mpt", dict(attn_config=dict(alibi_bias_max=16)), "alibi_bias_max"),
    ("mpt", dict(attn_config=dict(qk_ln=True)), "qk_ln"),
    ("mpt", dict(n_heads=3, learned_pos_emb=False), "learned_pos_emb"),
    ("mpt", dict(logit_scale=0.5), "logit_scale"),
    ("mpt", dict(no_bias=False), "no_bias"),
    ("gptj", dict(rotary_dim=6), "rotary_dim"),
    ("gptj", dict(n_inner=None, activation_function="quick_gelu"), "activation_function"),
    ("gpt-neo", dict(window_size=1), "window_size"),
    ("gpt-neo", dict(attention_types=[[["local"], 3]], intermediate_size=None), "attention_types"),
    ("opt", dict(word_embed_proj_dim=30), "word_embed_proj_dim"),
    ("opt", dict(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("bert", dict(tie_word_embeddings=False), "tie_word_embeddings"),
    ("bert", dict(is_decoder=True), "is_decoder"),
    ("bert", dict(type_vocab_size=1), "type_vocab_size"),
    ("bert", dict(chunk_size_feed_forward=7), "chunk_size_feed_forward"),
    ("roberta", dict(hidden_act="relu"), "hidden_act"),
    ("roberta", dict(is_decoder=True), "is_decoder"),
    ("roberta", dict(tie_word_embeddings=False), "tie_word_embeddings"),
    ("t5", dict(feed_forward_proj="gated-silu"), "feed_forward_proj"),
    ("t5", dict(feed_forward_proj="gated-relu"), "feed_forward_proj"),
    ("t5", dict(feed_forward_proj="gelu"), "feed_forward_proj"),
    ("t5", dict(num_layers=1, num_decoder_layers=None), "num_decoder_layers"),
    ("bart", dict(encoder_ffn_dim=47), "ffn_dim"),
    ("bart", dict(decoder_attention_heads=3), "attention_heads"),
    ("bart", dict(tie_word_embeddings=False), "embed_tokens"),
    ("marian", dict(decoder_attention_heads=3), "attention_heads"),
    ("marian", dict(share_encoder_decoder_embeddings=False), "share_encoder_decoder_embeddings"),
    (
        "marian",
        dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=75),
        "share_encoder_decoder_embeddings",
    ),
    ("marian", dict(tie_word_embeddings=False), "embed_tokens"),
    ("marian", dict(d_model=33, encoder_attention_heads=3, decoder_attention_heads=3), "d_model"),
    ("mbart", dict(decoder_ffn_dim=47), "ffn_dim"),
    ("m2m_100", dict(max_position_embeddings=9), "max_position_embeddings"),
]
OPTIONS += [("gpt2", dict(activation_function=act), "activation_function") for act in ACTS]
OPTIONS += [("llama", dict(hidden_act=act), "hidden_act") for act in ACTS]
OPTIONS += [("bert", dict(hidden_act=act), "hidden_act") for act in ("gelu_new", "tanh", "mish")]


def spelled(option):
    return f"{option[0]} " + " ".join(f"{key}={value}" for key, value in option[1].items())


@pytest.mark.parametrize("option", OPTIONS, ids=spelled)
def test_an_option_is_computed_as_the_reference_does_or_refused_by_name(option, tmp_path):
    family, changes, word = option
    architecture, settings = CAUSAL[family]
    model = made(architecture, settings | changes, seed=5)
    model.save_pretrained(tmp_path)
    try:
        loaded = jf.load(tmp_path)
    except jf.ConfigError as error:
        assert word in str(error) and "config.json" in str(error)
        return
    batch = batch_for(model)
    assert_close(our_logits(loaded, batch), logits(model, batch), batch)


def with_key(family, key, value, tmp_path):
    name = next(name for name in VARIANTS if name.startswith(family))
    place = shutil.copytree(directory(name), tmp_path / "model")
    rewrite(place, **{key: value})
    return place


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("bert", "position_embedding_type", "relative_key"),
        ("roberta", "position_embedding_type", "relative_key_query"),
    ],
)
def test_an_option_of_older_years_that_changes_logits_is_refused(family, key, value, tmp_path):
    with pytest.raises(jf.ConfigError, match=key) as told:
        jf.load(with_key(family, key, value, tmp_path))
    assert "config.json" in str(told.value)


def test_a_key_that_neither_knows_is_told(tmp_path):
    with pytest.warns(UserWarning, match="attention_multiplier"):
        jf.load(with_key("llama", "attention_multiplier", 0.3, tmp_path))
