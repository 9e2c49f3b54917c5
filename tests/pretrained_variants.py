"""The settings of tiny models of every architecture that is read and written here, of awkward
sizes."""

import transformers as tf

VOCABULARY, LENGTH, SOURCE, PAD = 71, 14, 11, 1
ROOM = 128  # positions, where 64 tokens are to be generated
THETA = 523.0
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=2, eos_token_id=3)
TEXT = TOKENS | dict(
    hidden_size=42,
    intermediate_size=53,
    num_hidden_layers=2,
    num_attention_heads=6,
    max_position_embeddings=ROOM,
)
LLAMA = TEXT | dict(
    num_key_value_heads=2, head_dim=10, rms_norm_eps=3e-3, rope_parameters=dict(rope_theta=THETA)
)
QWEN = LLAMA | dict(num_hidden_layers=4, rms_norm_eps=2e-3, tie_word_embeddings=True)
QWEN2 = {name: value for name, value in QWEN.items() if name != "head_dim"} | dict(
    hidden_size=48, tie_word_embeddings=False
)
OLMO = {name: value for name, value in LLAMA.items() if name != "head_dim"} | dict(hidden_size=48)
PHI3 = OLMO | dict(hidden_size=60)
COHERE = OLMO | dict(layer_norm_eps=2e-2, logit_scale=0.3)
COHERE.pop("rms_norm_eps")
GLM4 = LLAMA | dict(head_dim=12)
FALCON = TEXT | dict(
    hidden_size=60, layer_norm_epsilon=2e-2, ffn_hidden_size=53, rope_parameters=dict(rope_theta=91)
)
FALCON.pop("intermediate_size")
MPT = TOKENS | dict(d_model=42, n_heads=6, n_layers=2, max_seq_len=ROOM, layer_norm_epsilon=2e-2)
WINDOWED = dict(use_sliding_window=True, sliding_window=5)
GEMMA = LLAMA | dict(num_hidden_layers=4, sliding_window=5, query_pre_attn_scalar=23)
GEMMA |= dict(rms_norm_eps=2e-2, attn_logit_softcapping=1.5, final_logit_softcapping=2.5)
NEOX = TEXT | dict(hidden_size=60, layer_norm_eps=2e-2, rotary_pct=0.4, rotary_emb_base=911)
GPT2 = TOKENS | dict(
    n_embd=42, n_head=6, n_layer=2, n_positions=ROOM, n_inner=51, layer_norm_epsilon=2e-2
)
GPTJ = GPT2 | dict(rotary_dim=4)
GPT_NEO = TOKENS | dict(
    hidden_size=42, num_heads=6, num_layers=3, max_position_embeddings=ROOM, window_size=5
)
GPT_NEO |= dict(attention_types=[[["global", "local"], 1], [["local"], 1]])
GPT_NEO |= dict(intermediate_size=51, layer_norm_epsilon=2e-2)
OPT = TEXT | dict(ffn_dim=53, word_embed_proj_dim=42)
OPT = {name: value for name, value in OPT.items() if name != "intermediate_size"}
BLOOM = TOKENS | dict(hidden_size=42, n_head=6, n_layer=3, layer_norm_epsilon=2e-2)
BERT = TEXT | dict(type_vocab_size=2, layer_norm_eps=2e-2, num_labels=5)
ROBERTA = BERT | dict(type_vocab_size=1)
ELECTRA = BERT | dict(embedding_size=18)
ALBERT = BERT | dict(embedding_size=18, num_hidden_layers=3)
MPNET = {name: value for name, value in BERT.items() if name != "type_vocab_size"}
NOMIC = BERT | dict(hidden_size=48, rope_parameters=dict(rope_theta=THETA, rope_type="default"))
DEBERTA = BERT | dict(
    type_vocab_size=0,
    relative_attention=True,
    position_biased_input=False,
    pos_att_type=["p2c", "c2p"],
    share_att_key=True,
    norm_rel_ebd="layer_norm",
    position_buckets=6,
    max_relative_positions=9,
)
MODERNBERT = TEXT | dict(hidden_size=48, norm_eps=2e-2, local_attention=6, num_labels=5)
MODERNBERT |= dict(
    rope_parameters={
        "full_attention": dict(rope_type="default", rope_theta=THETA),
        "sliding_attention": dict(rope_type="default", rope_theta=91.0),
    }
)
DISTILBERT = TOKENS | dict(
    dim=42, hidden_dim=53, n_layers=2, n_heads=6, max_position_embeddings=ROOM, num_labels=5
)
T5 = TOKENS | dict(
    d_model=44,
    d_kv=9,
    d_ff=53,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=4,
    layer_norm_epsilon=2e-2,
)
T5 |= dict(
    relative_attention_num_buckets=8, relative_attention_max_distance=11, decoder_start_token_id=0
)
ENCODER = {name: value for name, value in T5.items() if name != "num_decoder_layers"}
CLIP = TEXT | dict(projection_dim=37, layer_norm_eps=2e-2)
BART = TOKENS | dict(
    d_model=42,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
)
BART |= dict(
    encoder_ffn_dim=53, decoder_ffn_dim=53, max_position_embeddings=ROOM, decoder_start_token_id=4
)


EXPERTS = LLAMA | dict(num_local_experts=5, num_experts_per_tok=2, router_aux_loss_coef=0.02)
MIXTRAL = EXPERTS | dict(hidden_size=44)
QWEN_MOE = LLAMA | dict(
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=23, num_hidden_layers=4
)
QWEN_NEXT = LLAMA | dict(
    num_hidden_layers=4,
    head_dim=12,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=23,
    shared_expert_intermediate_size=17,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=7,
    linear_value_head_dim=9,
    linear_conv_kernel_dim=3,
)
OLMOE = OLMO | dict(num_experts=5, num_experts_per_tok=3)
MULTIPLIERS = dict(
    embedding_multiplier=2.5, residual_multiplier=0.6, logits_scaling=1.7, attention_multiplier=0.21
)
GRANITE = {name: value for name, value in EXPERTS.items() if name != "head_dim"} | dict(
    hidden_size=48, **MULTIPLIERS
)
MAMBA2 = dict(
    num_hidden_layers=4,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=5,
    mamba_d_conv=3,
    mamba_chunk_size=4,
)
BAMBA = OLMO | MAMBA2 | dict(attn_layer_indices=[1, 2])
GRANITE_HYBRID = GRANITE | MAMBA2 | dict(shared_intermediate_size=19)
GRANITE_HYBRID |= dict(
    layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2]
)
GPT_OSS = EXPERTS | dict(
    hidden_size=64, intermediate_size=32, num_hidden_layers=3, sliding_window=5
)


DEEPSEEK = {name: value for name, value in LLAMA.items() if name != "head_dim"} | dict(
    hidden_size=44,
    num_key_value_heads=6,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=19,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    kv_lora_rank=16,
    q_lora_rank=20,
    qk_rope_head_dim=8,
    qk_nope_head_dim=10,
    v_head_dim=12,
)


KIMI = {
    name: value
    for name, value in DEEPSEEK.items()
    if name not in ("first_k_dense_replace", "n_routed_experts", "rope_parameters")
} | dict(
    q_lora_rank=None,
    num_local_experts=8,
    n_group=1,
    topk_group=1,
    num_hidden_layers=4,
    linear_head_dim=7,
    linear_num_heads=3,
    linear_conv_kernel_dim=3,
    layer_types=[*["linear_attention"] * 3, "full_attention"],
)
# transformers writes the convolutions as three equal parts, whatever their widths are.
OLMO_HYBRID = OLMO | dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=10,
    linear_value_head_dim=5,
    linear_conv_kernel_dim=3,
)


SMOLLM3 = OLMO | dict(
    num_hidden_layers=5, no_rope_layer_interval=2, no_rope_layers=None, tie_word_embeddings=False
)
OLMO3 = {name: value for name, value in OLMO.items() if name != "rope_parameters"} | dict(
    num_hidden_layers=5, sliding_window=5
)
GRANITE_DENSE = OLMO | MULTIPLIERS
GEMMA1 = LLAMA | dict(num_hidden_layers=3, rms_norm_eps=2e-2)
STABLELM = {name: value for name, value in OLMO.items() if name != "rms_norm_eps"} | dict(
    hidden_size=60, layer_norm_eps=2e-2, num_hidden_layers=3
)
STARCODER2 = {name: value for name, value in OLMO.items() if name != "rms_norm_eps"} | dict(
    norm_epsilon=2e-2
)


T5GEMMA_STACK = {name: value for name, value in GEMMA.items() if name != "num_hidden_layers"}


def t5gemma(encoder=None, decoder=None, **more):
    """The settings of both stacks, and those of the model."""
    stacks = {
        "encoder": T5GEMMA_STACK | dict(num_hidden_layers=2) | (encoder or {}),
        "decoder": T5GEMMA_STACK | dict(num_hidden_layers=3) | (decoder or {}),
    }
    return TOKENS | dict(decoder_start_token_id=4) | stacks | more


def rope(kind, factor, **more):
    return {"rope_parameters": dict(rope_theta=THETA) | dict(rope_type=kind, factor=factor) | more}


YARN = dict(
    original_max_position_embeddings=64, beta_fast=3.0, beta_slow=0.5, rope_theta=50.0
)  # a ramp from pair 1 to 4
LLAMA3 = dict(original_max_position_embeddings=8, low_freq_factor=0.2, high_freq_factor=1.3)
SHORT = dict(
    max_position_embeddings=LENGTH - 4
)  # the input is longer than the positions that the model was made for
LONG = dict(short_factor=[1.0, 1.05, 1.25, 1.5, 2.5], long_factor=[1.0, 2.0, 4.5, 9.0, 11.5])
LONG_IN_PART = dict(short_factor=[1.0, 1.5, 2.5], long_factor=[1.0, 4.5, 11.5])
BEFORE = dict(original_max_position_embeddings=10)  # rows of 9 to 14 tokens: within it and beyond
BEFORE_SHORT = dict(original_max_position_embeddings=4)
LOCAL = dict(rope_type="default", rope_theta=91.0)

VARIANTS = {
    "gpt2": (tf.GPT2LMHeadModel, GPT2),
    "gpt2 relu, scores as they are": (
        tf.GPT2LMHeadModel,
        GPT2 | dict(activation_function="relu", scale_attn_weights=False, n_inner=None),
    ),
    "llama": (tf.LlamaForCausalLM, LLAMA),
    "llama tied, heads from width": (
        tf.LlamaForCausalLM,
        LLAMA
        | dict(tie_word_embeddings=True, head_dim=None, hidden_size=48, num_key_value_heads=1),
    ),
    "llama attention bias": (tf.LlamaForCausalLM, LLAMA | dict(attention_bias=True)),
    "llama feed-forward bias": (tf.LlamaForCausalLM, LLAMA | dict(mlp_bias=True)),
    "llama all biases": (tf.LlamaForCausalLM, LLAMA | dict(attention_bias=True, mlp_bias=True)),
    "llama past its length": (tf.LlamaForCausalLM, LLAMA | SHORT),
    "llama linear": (tf.LlamaForCausalLM, LLAMA | rope("linear", 2.5)),
    "llama dynamic within": (tf.LlamaForCausalLM, LLAMA | rope("dynamic", 2.5)),
    "llama dynamic beyond": (tf.LlamaForCausalLM, LLAMA | SHORT | rope("dynamic", 2.5)),
    "llama yarn": (tf.LlamaForCausalLM, LLAMA | rope("yarn", 4.0, **YARN)),
    "llama yarn attention factor": (
        tf.LlamaForCausalLM,
        LLAMA | rope("yarn", 4.0, attention_factor=1.3, **YARN),
    ),
    "llama yarn by parts of pairs": (
        tf.LlamaForCausalLM,
        LLAMA | rope("yarn", 4.0, **YARN, truncate=False, mscale=0.7, mscale_all_dim=0.4),
    ),
    "llama llama3": (tf.LlamaForCausalLM, LLAMA | rope("llama3", 3.0, **LLAMA3)),
    "mistral": (tf.MistralForCausalLM, LLAMA | dict(sliding_window=5, hidden_size=44)),
    "mistral no window": (
        tf.MistralForCausalLM,
        LLAMA | dict(sliding_window=None, hidden_size=48, head_dim=None),
    ),
    "phi3": (tf.Phi3ForCausalLM, PHI3 | rope("default", None, partial_rotary_factor=0.6)),
    "phi3 longrope": (tf.Phi3ForCausalLM, PHI3 | rope("longrope", None, **LONG) | BEFORE),
    "phi3 longrope in part": (
        tf.Phi3ForCausalLM,
        PHI3
        | rope("longrope", None, **LONG_IN_PART, partial_rotary_factor=0.6)
        | BEFORE
        | dict(sliding_window=5, tie_word_embeddings=True),
    ),
    "phi3 longrope factor": (
        tf.Phi3ForCausalLM,
        PHI3 | rope("longrope", 3.0, **LONG, attention_factor=1.3) | BEFORE,
    ),
    "qwen2": (tf.Qwen2ForCausalLM, QWEN),
    "qwen2 window above layer 1": (
        tf.Qwen2ForCausalLM,
        QWEN2 | WINDOWED | dict(max_window_layers=1),
    ),
    "qwen3": (tf.Qwen3ForCausalLM, QWEN | dict(tie_word_embeddings=False)),
    "qwen3 bias, window by layer types": (
        tf.Qwen3ForCausalLM,
        QWEN
        | WINDOWED
        | dict(attention_bias=True, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "gemma2": (tf.Gemma2ForCausalLM, GEMMA),
    "gemma2 untied": (
        tf.Gemma2ForCausalLM,
        GEMMA | dict(tie_word_embeddings=False, num_hidden_layers=3),
    ),
    "gemma2 uncapped": (
        tf.Gemma2ForCausalLM,
        GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        GEMMA
        | dict(
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ]
        )
        | dict(attn_logit_softcapping=None)
        | dict(
            rope_parameters={
                "full_attention": rope("linear", 3.0)["rope_parameters"],
                "sliding_attention": LOCAL,
            }
        ),
    ),
    "gemma3 by its own pattern": (
        tf.Gemma3ForCausalLM,
        GEMMA
        | dict(
            num_hidden_layers=7,
            tie_word_embeddings=False,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        )
        | dict(
            rope_parameters={
                "full_attention": dict(rope_type="default", rope_theta=THETA),
                "sliding_attention": LOCAL,
            }
        ),
    ),
    "olmo2": (tf.Olmo2ForCausalLM, OLMO),
    "olmo2 all heads, tied": (
        tf.Olmo2ForCausalLM,
        OLMO | dict(num_key_value_heads=6, hidden_size=36, tie_word_embeddings=True),
    ),
    "gemma": (tf.GemmaForCausalLM, GEMMA1),
    "gemma untied, bias": (
        tf.GemmaForCausalLM,
        GEMMA1
        | rope("linear", 2.5)
        | dict(tie_word_embeddings=False, attention_bias=True, hidden_act="gelu"),
    ),
    "smollm3": (tf.SmolLM3ForCausalLM, SMOLLM3),
    "smollm3 tied, bias, scaled": (
        tf.SmolLM3ForCausalLM,
        SMOLLM3
        | rope("yarn", 4.0, **YARN)
        | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
        | dict(no_rope_layers=[0, 1, 1, 0, 1, 1, 1]),
    ),
    "smollm3 window": (
        tf.SmolLM3ForCausalLM,
        SMOLLM3
        | WINDOWED
        | dict(layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]),
    ),
    "smollm3 without positions": (
        tf.SmolLM3ForCausalLM,
        SMOLLM3 | dict(no_rope_layers=[0] * 5, rope_parameters=dict(rope_theta=10_000.0)),
    ),
    "olmo3": (tf.Olmo3ForCausalLM, OLMO3),
    "olmo3 yarn, two bases": (
        tf.Olmo3ForCausalLM,
        OLMO3
        | dict(layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"])
        | dict(
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": rope("yarn", 4.0, **YARN)["rope_parameters"],
                "sliding_attention": LOCAL,
            },
        ),
    ),
    "granite": (tf.GraniteForCausalLM, GRANITE_DENSE),
    "granite tied, bias": (
        tf.GraniteForCausalLM,
        GRANITE_DENSE | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "ministral": (
        tf.MinistralForCausalLM,
        LLAMA
        | dict(num_hidden_layers=4, sliding_window=5)
        | dict(layer_types=["full_attention", *["sliding_attention"] * 3]),
    ),
    "ministral no window": (
        tf.MinistralForCausalLM,
        LLAMA | dict(layer_types=["full_attention"] * 2, tie_word_embeddings=True),
    ),
    "ministral3": (
        tf.Ministral3ForCausalLM,
        LLAMA
        | rope("yarn", 4.0, **YARN | BEFORE_SHORT, llama_4_scaling_beta=0.7)
        | dict(hidden_size=44, tie_word_embeddings=True),
    ),
    "ministral3 unscaled, window": (
        tf.Ministral3ForCausalLM,
        LLAMA
        | rope("default", None, **BEFORE_SHORT, llama_4_scaling_beta=0.7)
        | dict(hidden_size=48, head_dim=8, sliding_window=5),
    ),
    "stablelm": (tf.StableLmForCausalLM, STABLELM | dict(partial_rotary_factor=0.4)),
    "stablelm bias, tied": (
        tf.StableLmForCausalLM,
        STABLELM | dict(use_qkv_bias=True, tie_word_embeddings=True, hidden_act="relu"),
    ),
    "stablelm in parallel, normed heads": (
        tf.StableLmForCausalLM,
        STABLELM | dict(use_parallel_residual=True, qk_layernorm=True),
    ),
    "starcoder2": (tf.Starcoder2ForCausalLM, STARCODER2 | dict(sliding_window=5)),
    "starcoder2 untied, no bias": (
        tf.Starcoder2ForCausalLM,
        STARCODER2 | dict(tie_word_embeddings=False, use_bias=False, hidden_act="relu"),
    ),
    "mixtral": (tf.MixtralForCausalLM, MIXTRAL),
    "mixtral window": (
        tf.MixtralForCausalLM,
        MIXTRAL | dict(sliding_window=5, num_experts_per_tok=1, tie_word_embeddings=True),
    ),
    "qwen3-moe": (tf.Qwen3MoeForCausalLM, QWEN_MOE | dict(norm_topk_prob=True)),
    "qwen3-moe dense layers": (
        tf.Qwen3MoeForCausalLM,
        QWEN_MOE
        | dict(num_hidden_layers=5, mlp_only_layers=[0, 3], attention_bias=True)
        | dict(tie_word_embeddings=True),
    ),
    "qwen3-moe every second layer": (
        tf.Qwen3MoeForCausalLM,
        QWEN_MOE | dict(decoder_sparse_step=2),
    ),
    "qwen3-next": (
        tf.Qwen3NextForCausalLM,
        QWEN_NEXT | rope("default", None, partial_rotary_factor=0.5),
    ),
    "qwen3-next dense layers, bias": (
        tf.Qwen3NextForCausalLM,
        QWEN_NEXT
        | dict(num_hidden_layers=5, mlp_only_layers=[0, 3], attention_bias=True)
        | dict(tie_word_embeddings=True, norm_topk_prob=False, linear_num_key_heads=6)
        | dict(layer_types=["full_attention", *["linear_attention"] * 2] + ["full_attention"] * 2),
    ),
    "bamba": (tf.BambaForCausalLM, BAMBA),
    "bamba bias, one group, tied": (
        tf.BambaForCausalLM,
        BAMBA
        | dict(attention_bias=True, mlp_bias=True, mamba_n_groups=1, tie_word_embeddings=True),
    ),
    "granite-hybrid": (tf.GraniteMoeHybridForCausalLM, GRANITE_HYBRID),
    "granite-hybrid dense, rope, tied": (
        tf.GraniteMoeHybridForCausalLM,
        GRANITE_HYBRID
        | dict(num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=True),
    ),
    "olmoe": (tf.OlmoeForCausalLM, OLMOE),
    "olmoe renormalized": (
        tf.OlmoeForCausalLM,
        OLMOE | dict(norm_topk_prob=True, num_key_value_heads=6, hidden_size=36),
    ),
    "granite-moe": (tf.GraniteMoeForCausalLM, GRANITE),
    "granite-moe tied, bias": (
        tf.GraniteMoeForCausalLM,
        GRANITE | dict(tie_word_embeddings=True, attention_bias=True),
    ),
    "granite-moe-shared": (
        tf.GraniteMoeSharedForCausalLM,
        GRANITE | dict(shared_intermediate_size=19),
    ),
    "gpt-oss": (tf.GptOssForCausalLM, GPT_OSS),
    "gpt-oss yarn": (
        tf.GptOssForCausalLM,
        GPT_OSS
        | rope("yarn", 4.0, **YARN, truncate=False)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "gpt-oss no attention bias": (
        tf.GptOssForCausalLM,
        GPT_OSS | dict(attention_bias=False, tie_word_embeddings=True, num_experts_per_tok=4),
    ),
    "deepseek-v3": (tf.DeepseekV3ForCausalLM, DEEPSEEK),
    "deepseek-v3 yarn": (
        tf.DeepseekV3ForCausalLM,
        DEEPSEEK
        | rope("yarn", 4.0, **YARN, mscale=1.0, mscale_all_dim=1.0)
        | dict(first_k_dense_replace=0, routed_scaling_factor=1.5, norm_topk_prob=False),
    ),
    "deepseek-v3 yarn of two factors": (
        tf.DeepseekV3ForCausalLM,
        DEEPSEEK
        | rope("yarn", 4.0, **YARN, mscale=0.7, mscale_all_dim=0.4)
        | dict(n_group=1, topk_group=1, tie_word_embeddings=True),
    ),
    "deepseek-v3 no query rank, bias": (
        tf.DeepseekV3ForCausalLM,
        DEEPSEEK | dict(q_lora_rank=None, attention_bias=True, rope_interleave=False),
    ),
    "deepseek-v3 dense": (
        tf.DeepseekV3ForCausalLM,
        DEEPSEEK | dict(first_k_dense_replace=3, attention_bias=True),
    ),
    "kimi-linear": (tf.KimiLinearForCausalLM, KIMI),
    "kimi-linear groups, dense": (
        tf.KimiLinearForCausalLM,
        KIMI
        | dict(n_group=4, topk_group=2, attention_bias=True, norm_topk_prob=False)
        | dict(mlp_layer_types=["dense"] * 2 + ["sparse"] * 2)
        | dict(layer_types=["full_attention", *["linear_attention"] * 2, "full_attention"]),
    ),
    "olmo-hybrid": (tf.OlmoHybridForCausalLM, OLMO_HYBRID),
    "olmo-hybrid without positions": (
        tf.OlmoHybridForCausalLM,
        OLMO_HYBRID
        | dict(
            rope_parameters=dict(rope_theta=None, rope_type="default"),
            linear_allow_neg_eigval=False,
            attention_bias=True,
        )
        | dict(tie_word_embeddings=True, linear_num_key_heads=4, linear_key_head_dim=5)
        | dict(layer_types=["linear_attention", "full_attention"] * 2),
    ),
    "gpt-neox": (tf.GPTNeoXForCausalLM, NEOX),
    "gpt-neox in turn": (
        tf.GPTNeoXForCausalLM,
        NEOX | dict(use_parallel_residual=False, rotary_pct=1.0, tie_word_embeddings=True),
    ),
    "gpt-neox no attention bias": (
        tf.GPTNeoXForCausalLM,
        NEOX | dict(attention_bias=False, hidden_act="relu"),
    ),
    "bloom": (tf.BloomForCausalLM, BLOOM),
    "bloom 4 heads": (
        tf.BloomForCausalLM,
        BLOOM | dict(n_head=4, hidden_size=36, tie_word_embeddings=False),
    ),
    "cohere": (tf.CohereForCausalLM, COHERE),
    "cohere untied, bias": (
        tf.CohereForCausalLM,
        COHERE
        | dict(tie_word_embeddings=False, attention_bias=True, num_key_value_heads=6)
        | dict(hidden_size=60, logit_scale=7.0)
        | rope("linear", 2.5),
    ),
    "cohere normed heads": (tf.CohereForCausalLM, COHERE | dict(use_qk_norm=True)),
    "glm4": (tf.Glm4ForCausalLM, GLM4),
    "glm4 tied, no bias": (
        tf.Glm4ForCausalLM,
        GLM4
        | dict(tie_word_embeddings=True, attention_bias=False, num_key_value_heads=6)
        | rope("default", None, partial_rotary_factor=1.0),
    ),
    "falcon": (tf.FalconForCausalLM, FALCON),
    "falcon groups, two norms": (
        tf.FalconForCausalLM,
        FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
    ),
    "falcon groups, one norm, bias": (
        tf.FalconForCausalLM,
        FALCON
        | dict(new_decoder_architecture=True, num_kv_heads=3, bias=True)
        | dict(num_ln_in_parallel_attn=1, ffn_hidden_size=None, activation="gelu_new"),
    ),
    "falcon in turn, all heads": (
        tf.FalconForCausalLM,
        FALCON | dict(parallel_attn=False, multi_query=False) | rope("linear", 2.5),
    ),
    "falcon in turn, one key head, bias": (
        tf.FalconForCausalLM,
        FALCON | dict(parallel_attn=False, bias=True),
    ),
    "falcon all heads, one norm": (tf.FalconForCausalLM, FALCON | dict(multi_query=False)),
    "mpt": (tf.MptForCausalLM, MPT),
    "mpt 4 heads, untied": (
        tf.MptForCausalLM,
        MPT
        | dict(n_heads=4, d_model=36, tie_word_embeddings=False)
        | dict(attn_config=dict(softmax_scale=0.3)),
    ),
    "gptj": (tf.GPTJForCausalLM, GPTJ),
    "gptj tied, relu": (
        tf.GPTJForCausalLM,
        GPTJ | dict(tie_word_embeddings=True, activation_function="relu", n_head=3, rotary_dim=14),
    ),
    "gpt-neo": (tf.GPTNeoForCausalLM, GPT_NEO),
    "gpt-neo no window, untied": (
        tf.GPTNeoForCausalLM,
        GPT_NEO | dict(attention_types=[[["global"], 3]], tie_word_embeddings=False),
    ),
    "opt": (tf.OPTForCausalLM, OPT),
    "opt norms behind": (
        tf.OPTForCausalLM,
        OPT | dict(do_layer_norm_before=False, tie_word_embeddings=False),
    ),
    "opt no bias": (tf.OPTForCausalLM, OPT | dict(enable_bias=False, activation_function="gelu")),
    "bert masked": (tf.BertForMaskedLM, BERT),
    "bert masked, three types, relu": (
        tf.BertForMaskedLM,
        BERT | dict(type_vocab_size=3, hidden_act="relu"),
    ),
    "bert pre-training": (tf.BertForPreTraining, BERT),
    "bert classes": (tf.BertForSequenceClassification, BERT),
    "bert tags": (tf.BertForTokenClassification, BERT),
    "roberta masked": (tf.RobertaForMaskedLM, ROBERTA),
    "roberta classes": (tf.RobertaForSequenceClassification, ROBERTA | dict(type_vocab_size=2)),
    "roberta tags": (tf.RobertaForTokenClassification, ROBERTA),
    "xlm-roberta masked": (tf.XLMRobertaForMaskedLM, ROBERTA),
    "xlm-roberta classes": (tf.XLMRobertaForSequenceClassification, ROBERTA),
    "distilbert masked": (tf.DistilBertForMaskedLM, DISTILBERT),
    "distilbert classes, relu": (
        tf.DistilBertForSequenceClassification,
        DISTILBERT | dict(activation="relu"),
    ),
    "distilbert tags": (tf.DistilBertForTokenClassification, DISTILBERT),
    "electra masked": (tf.ElectraForMaskedLM, ELECTRA),
    "electra classes": (tf.ElectraForSequenceClassification, ELECTRA),
    "electra classes, one width": (
        tf.ElectraForSequenceClassification,
        ELECTRA | dict(embedding_size=42),
    ),
    "electra discriminator": (tf.ElectraForPreTraining, ELECTRA | dict(initializer_range=0.3)),
    "electra tags": (tf.ElectraForTokenClassification, ELECTRA),
    "albert masked": (tf.AlbertForMaskedLM, ALBERT),
    "albert pre-training, two groups": (
        tf.AlbertForPreTraining,
        ALBERT | dict(num_labels=2, num_hidden_groups=2, num_hidden_layers=4, hidden_act="relu"),
    ),
    "albert classes": (tf.AlbertForSequenceClassification, ALBERT),
    "albert tags": (tf.AlbertForTokenClassification, ALBERT | dict(num_hidden_groups=3)),
    "deberta masked": (tf.DebertaV2ForMaskedLM, DEBERTA),
    "deberta classes, learned positions too": (
        tf.DebertaV2ForSequenceClassification,
        DEBERTA | dict(position_biased_input=True, type_vocab_size=2, pooler_hidden_act="tanh"),
    ),
    "deberta tags": (tf.DebertaV2ForTokenClassification, DEBERTA | dict(position_buckets=8)),
    "deberta masked, no positions": (
        tf.DebertaV2ForMaskedLM,
        BERT | dict(position_biased_input=False),
    ),
    "mpnet masked": (tf.MPNetForMaskedLM, MPNET),
    "mpnet classes": (tf.MPNetForSequenceClassification, MPNET),
    "mpnet tags": (tf.MPNetForTokenClassification, MPNET),
    "nomic-bert masked": (tf.NomicBertForMaskedLM, NOMIC),
    "nomic-bert classes, yarn": (
        tf.NomicBertForSequenceClassification,
        NOMIC | rope("yarn", 4.0, **YARN) | dict(hidden_act="gelu", head_dim=10),
    ),
    "nomic-bert tags": (tf.NomicBertForTokenClassification, NOMIC),
    "modernbert": (tf.ModernBertForMaskedLM, MODERNBERT | dict(num_hidden_layers=8)),
    "modernbert by layer types": (
        tf.ModernBertForMaskedLM,
        MODERNBERT
        | dict(num_hidden_layers=3)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "modernbert classes": (tf.ModernBertForSequenceClassification, MODERNBERT),
    "modernbert tags": (tf.ModernBertForTokenClassification, MODERNBERT),
    "t5": (tf.T5ForConditionalGeneration, T5),
    "t5 v1.1": (
        tf.T5ForConditionalGeneration,
        T5
        | dict(
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            num_layers=3,
            num_decoder_layers=2,
        ),
    ),
    "t5 encoder": (tf.T5EncoderModel, ENCODER),
    "mt5": (tf.MT5ForConditionalGeneration, T5),
    "mt5 encoder": (tf.MT5EncoderModel, ENCODER),
    "mt5 untied": (tf.MT5ForConditionalGeneration, T5 | dict(tie_word_embeddings=False)),
    "umt5": (tf.UMT5ForConditionalGeneration, T5),
    "umt5 encoder": (tf.UMT5EncoderModel, ENCODER),
    "clip": (tf.CLIPTextModel, CLIP),
    "clip projection": (tf.CLIPTextModelWithProjection, CLIP),
    "bart": (tf.BartForConditionalGeneration, BART),
    "marian": (tf.MarianMTModel, BART | dict(scale_embedding=True, activation_function="swish")),
    "marian unscaled": (
        tf.MarianMTModel,
        BART | dict(d_model=36, activation_function="relu", decoder_layers=1),
    ),
    "pegasus": (tf.PegasusForConditionalGeneration, BART | dict(scale_embedding=True)),
    "mbart": (tf.MBartForConditionalGeneration, BART | dict(scale_embedding=True)),
    "m2m_100": (tf.M2M100ForConditionalGeneration, BART),
    "m2m_100 unscaled, odd width": (
        tf.M2M100ForConditionalGeneration,
        BART
        | dict(scale_embedding=False, activation_function="gelu", decoder_layers=2)
        | dict(d_model=45, encoder_attention_heads=3, decoder_attention_heads=3),
    ),
    "t5gemma": (tf.T5GemmaForConditionalGeneration, t5gemma()),
    "t5gemma untied, deep encoder, bias": (
        tf.T5GemmaForConditionalGeneration,
        t5gemma(
            dict(num_hidden_layers=3, sliding_window=3, attention_bias=True),
            dict(num_hidden_layers=2, attention_bias=True),
            tie_word_embeddings=False,
        ),
    ),
}
FAMILY = {  # one variant for each family, where one shows what all have
    name.split()[0]: name for name in reversed(VARIANTS)
}
FURTHER_VARIANTS = VARIANTS.keys() - {*FAMILY.values()}
