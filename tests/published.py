"""config.json as authors published them, whole, with the sizes made small, and what their files of
weights hold beside the model's own tensors: by the names and in the types that they have there."""

import re

import torch

ROOM, WIDTH = 64, 24
CASES = {}


def case(name, hub, tensors=lambda held: held):
    """A config.json, and what makes the tensors of the model those of the published file."""
    CASES[name] = (hub, tensors)


def less(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def both(*changes):
    def changed(held):
        for change in changes:
            held = change(held)
        return held

    return changed


def bare(prefix):
    return lambda held: {name.removeprefix(prefix): w for name, w in held.items()}


def half(dtype):
    return lambda held: {
        name: w.to(dtype) if w.is_floating_point() else w for name, w in held.items()
    }


def also(more):
    """More tensors, given themselves or as the name of the one that they repeat."""
    return lambda held: (
        held | {name: (held[w] if isinstance(w, str) else w).clone() for name, w in more.items()}
    )


def gammas(held):
    older = {r"LayerNorm\.weight$": "LayerNorm.gamma", r"LayerNorm\.bias$": "LayerNorm.beta"}
    for pattern, name in older.items():
        held = {re.sub(pattern, name, key): w for key, w in held.items()}
    return held


def pooler(base):
    return {
        f"{base}.pooler.dense.weight": torch.ones(WIDTH, WIDTH),
        f"{base}.pooler.dense.bias": torch.ones(WIDTH),
    }


F16, BF16 = half(torch.float16), half(torch.bfloat16)
TRIANGLE = torch.ones(1, 1, ROOM, ROOM).tril()
LAYERS = dict(
    hidden_size=WIDTH,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=ROOM,
)
CLASSES = dict(
    id2label={str(i): f"LABEL_{i}" for i in range(3)}, label2id={f"LABEL_{i}": i for i in range(3)}
)

GPT2 = dict(
    activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
    bos_token_id=1, embd_pdrop=0.1,
    eos_token_id=1, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2",
    n_ctx=ROOM, n_embd=WIDTH, n_head=4,
    n_layer=2, n_positions=ROOM, resid_pdrop=0.1, summary_activation=None,
    summary_first_dropout=0.1,
    summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True, vocab_size=71,
    task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
)  # fmt: skip
case(
    "gpt2",
    GPT2,
    both(bare("transformer."), also({"h.0.attn.bias": TRIANGLE, "h.1.attn.bias": TRIANGLE})),
)
case("gpt2-medium", GPT2 | dict(n_special=0, predict_special_tokens=True), bare("transformer."))
case(
    "distilgpt2",
    GPT2 | dict(_num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
    also({"transformer.h.0.attn.bias": TRIANGLE.bool()}),
)

LLAMA2 = LAYERS | dict(
    _name_or_path="meta-llama/Llama-2-7b-hf", architectures=["LlamaForCausalLM"], bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu", initializer_range=0.02, model_type="llama", num_key_value_heads=4,
    pretraining_tp=1,
    rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=False, torch_dtype="float16",
    transformers_version="4.31.0.dev0", use_cache=True, vocab_size=71,
)  # fmt: skip
SCALED = dict(
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
    rope_type="llama3",
)
LLAMA3 = less(LLAMA2, "_name_or_path") | dict(
    attention_bias=False, attention_dropout=0.0, eos_token_id=[2, 3, 4], mlp_bias=False,
    num_key_value_heads=2,
    rope_theta=500000.0, rope_scaling=SCALED, torch_dtype="bfloat16", transformers_version="4.42.3",
)  # fmt: skip
FREQUENCIES = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(2)}
MIXTRAL = less(LLAMA3, "attention_bias", "mlp_bias") | dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral", eos_token_id=2,
    num_experts_per_tok=2, num_local_experts=4, output_router_logits=False, rope_theta=1e6,
    rope_scaling=None, router_aux_loss_coef=0.02, sliding_window=None,
    transformers_version="4.36.0.dev0",
)  # fmt: skip
case("mixtral-8x7b-v0.1", less(MIXTRAL, "rope_scaling"), BF16)
QWEN3_MOE = less(LLAMA3, "mlp_bias") | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", eos_token_id=3, head_dim=8,
    decoder_sparse_step=1, max_window_layers=2, mlp_only_layers=[], moe_intermediate_size=16,
    norm_topk_prob=True, num_experts=4, num_experts_per_tok=2, output_router_logits=False,
    rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6, router_aux_loss_coef=0.001,
    sliding_window=None, transformers_version="4.51.0", use_sliding_window=False,
)  # fmt: skip
case("qwen3-30b-a3b", QWEN3_MOE, BF16)
QWEN3_NEXT = less(QWEN3_MOE, "max_window_layers", "sliding_window") | dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", full_attention_interval=2,
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_value_head_dim=8, partial_rotary_factor=0.25, rope_theta=1e7,
    shared_expert_intermediate_size=16, transformers_version="4.57.0.dev0",
)  # fmt: skip
case(
    "qwen3-next-80b-a3b-instruct",
    QWEN3_NEXT,
    both(BF16, also({"mtp.norm.weight": torch.ones(WIDTH)})),
)
KIMI = less(LAYERS, "max_position_embeddings") | dict(
    architectures=["KimiLinearForCausalLM"], bos_token_id=1, eos_token_id=2,
    first_k_dense_replace=1, head_dim=6, hidden_act="silu", initializer_range=0.02,
    kv_lora_rank=8, mla_use_nope=True, model_max_length=ROOM, model_type="kimi_linear",
    moe_intermediate_size=16, moe_layer_freq=1, moe_renormalize=True,
    moe_router_activation_func="sigmoid", num_expert_group=1, num_experts=4,
    num_experts_per_token=2, num_key_value_heads=4, num_nextn_predict_layers=0,
    num_shared_experts=1, pad_token_id=1, q_lora_rank=None, qk_nope_head_dim=8,
    qk_rope_head_dim=4, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
    routed_scaling_factor=2.446, tie_word_embeddings=False, topk_group=1, use_cache=True,
    use_grouped_topk=True, v_head_dim=8, vocab_size=71, linear_attn_config=dict(
        full_attn_layers=[2], head_dim=8, kda_layers=[1], num_heads=4, short_conv_kernel_size=4
    ),
)  # fmt: skip
case("kimi-linear-48b-a3b-instruct", KIMI, BF16)
OLMO_HYBRID = less(LLAMA2, "_name_or_path", "pretraining_tp", "rope_scaling") | dict(
    architectures=["OlmoHybridForCausalLM"], model_type="olmo_hybrid", attention_bias=False,
    layer_types=["linear_attention", "full_attention"], linear_a_log_max=16.0,
    linear_a_log_min=0.0, linear_allow_neg_eigval=True, linear_conv_kernel_dim=4,
    linear_dt_init_floor=0.0001, linear_dt_max=0.1, linear_dt_min=0.001, linear_key_head_dim=6,
    linear_num_key_heads=4, linear_num_value_heads=4, linear_value_head_dim=12,
    pad_token_id=1, rms_norm_eps=1e-6, rope_parameters=dict(rope_theta=None, rope_type="default"),
)  # fmt: skip


def of_widths(held):
    """The convolutions of queries, keys and values by their widths, as published."""
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    parts = torch.cat([held[name] for name in names]).split([24, 24, 48])
    return held | dict(zip(names, parts, strict=True))


case("olmo-hybrid-7b", OLMO_HYBRID, both(of_widths, BF16))
OLMOE = less(LLAMA3, "mlp_bias", "bos_token_id") | dict(
    architectures=["OlmoeForCausalLM"], model_type="olmoe", clip_qkv=None, eos_token_id=3,
    norm_topk_prob=False, num_experts=4, num_experts_per_tok=2, num_key_value_heads=4,
    output_router_logits=False, pad_token_id=1, rope_scaling=None, rope_theta=1e4,
    router_aux_loss_coef=0.01, transformers_version="4.43.0.dev0",
)  # fmt: skip
case("olmoe-1b-7b-0924", OLMOE, BF16)
GRANITE = less(LLAMA3, "mlp_bias", "pretraining_tp") | dict(
    architectures=["GraniteMoeForCausalLM"], model_type="granitemoe", attention_dropout=0.1,
    attention_multiplier=0.15, bos_token_id=0, embedding_multiplier=12.0, eos_token_id=0,
    logits_scaling=6.0, num_experts_per_tok=3, num_local_experts=5, output_router_logits=False,
    pad_token_id=0, residual_multiplier=0.22, rms_norm_eps=1e-6, rope_scaling=None,
    rope_theta=10000, router_aux_loss_coef=0.001, tie_word_embeddings=True,
    transformers_version="4.46.0.dev0",
)  # fmt: skip
case("granite-3.0-1b-a400m-base", GRANITE, BF16)


def packed(held):
    """The weights of experts [E, in, out] as blocks and scales of MXFP4."""
    generator, packed = torch.Generator().manual_seed(0), dict(held)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
OSS_YARN = dict(
    beta_fast=32.0, beta_slow=1.0, factor=4.0, original_max_position_embeddings=16,
    rope_type="yarn", truncate=False,
)  # fmt: skip
DENSE = less(LLAMA3, "mlp_bias", "pretraining_tp", "rope_scaling", "attention_bias")
GEMMA = DENSE | dict(
    architectures=["GemmaForCausalLM"], model_type="gemma", attention_bias=False, bos_token_id=2,
    eos_token_id=1, head_dim=8, hidden_act="gelu", num_key_value_heads=1, pad_token_id=0,
    rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000.0, transformers_version="4.38.0.dev0",
)  # fmt: skip
case("gemma-2b", less(GEMMA, "tie_word_embeddings"), BF16)
GRANITE_DENSE = LLAMA3 | dict(
    architectures=["GraniteForCausalLM"], model_type="granite", attention_dropout=0.1,
    attention_multiplier=0.15, bos_token_id=0, embedding_multiplier=12.0, eos_token_id=0,
    logits_scaling=8.0, pad_token_id=0, residual_multiplier=0.22, rope_scaling=None,
    rope_theta=1e7, tie_word_embeddings=True, transformers_version="4.47.0.dev0",
)  # fmt: skip
case("granite-3.1-2b-instruct", less(GRANITE_DENSE, "pretraining_tp"), BF16)
SMOLLM3 = less(LLAMA3, "rope_scaling") | dict(
    architectures=["SmolLM3ForCausalLM"], model_type="smollm3", eos_token_id=3, bos_token_id=0,
    layer_types=["full_attention"] * 3, max_window_layers=28, no_rope_layer_interval=4,
    no_rope_layers=[1, 0, 1], num_hidden_layers=3, pad_token_id=4, pretraining_tp=2,
    rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
    transformers_version="4.54.0.dev0", use_sliding_window=False,
)  # fmt: skip
case("smollm3-3b", less(SMOLLM3, "tie_word_embeddings"), BF16)
OLMO3_YARN = dict(
    attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
    original_max_position_embeddings=8, rope_type="yarn",
)  # fmt: skip
OLMO3 = DENSE | dict(
    architectures=["Olmo3ForCausalLM"], model_type="olmo3", attention_bias=False, eos_token_id=3,
    layer_types=["sliding_attention", "full_attention"], num_key_value_heads=4, pad_token_id=1,
    rms_norm_eps=1e-06, rope_scaling=OLMO3_YARN, rope_theta=500000, sliding_window=9,
    transformers_version="4.57.0",
)  # fmt: skip
case("olmo-3-1025-7b", OLMO3, BF16)
MINISTRAL = DENSE | dict(
    architectures=["MinistralForCausalLM"], model_type="ministral", eos_token_id=2, head_dim=6,
    layer_types=["full_attention", "sliding_attention"], rope_theta=1e8, sliding_window=9,
    transformers_version="4.57.0",
)  # fmt: skip
case("ministral-8b-instruct-2410", MINISTRAL, BF16)
MINISTRAL3 = less(DENSE, "rope_theta") | dict(
    architectures=["Ministral3ForCausalLM"], model_type="ministral3", eos_token_id=2, head_dim=6,
    pad_token_id=1, rms_norm_eps=1e-05, sliding_window=None, transformers_version="5.0.0.dev0",
    rope_parameters=dict(
        beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0,
        mscale_all_dim=1.0, original_max_position_embeddings=4, rope_theta=1000000.0,
        rope_type="yarn", type="yarn",
    ),
)  # fmt: skip
case("ministral-3-3b-text", MINISTRAL3, BF16)
STABLELM = less(DENSE, "rms_norm_eps", "attention_dropout") | dict(
    architectures=["StableLmForCausalLM"], model_type="stablelm", bos_token_id=100257,
    eos_token_id=100257, hidden_dropout=0.0, layer_norm_eps=1e-05, num_key_value_heads=4,
    partial_rotary_factor=0.25, qk_layernorm=False, rope_theta=10000, transformers_version="4.38.0",
    use_parallel_residual=False, use_qkv_bias=True, hidden_size=32,
)  # fmt: skip
case("stablelm-2-1_6b", STABLELM, half(torch.float16))
STABLELM_12B = STABLELM | dict(
    qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=False, num_key_value_heads=2,
)  # fmt: skip
case("stablelm-2-12b", STABLELM_12B, BF16)
STARCODER2 = less(DENSE, "rms_norm_eps", "tie_word_embeddings") | dict(
    architectures=["Starcoder2ForCausalLM"], model_type="starcoder2", attention_dropout=0.1,
    attention_softmax_in_fp32=True, embedding_dropout=0.1, hidden_act="gelu_pytorch_tanh",
    layer_norm_epsilon=1e-05, mlp_type="default", norm_epsilon=1e-05, norm_type="layer_norm",
    residual_dropout=0.1, rope_theta=999999.4420358813, scale_attention_softmax_in_fp32=True,
    scale_attn_weights=True, sliding_window=9, use_bias=True, eos_token_id=0, bos_token_id=0,
    transformers_version="4.37.0.dev0",
)  # fmt: skip
case("starcoder2-3b", STARCODER2, BF16)
GPT_OSS = dict(
    architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=2,
    experts_per_token=2, head_dim=8, hidden_act="silu", hidden_size=32, initial_context_length=16,
    initializer_range=0.02, intermediate_size=32, max_position_embeddings=ROOM,
    layer_types=["sliding_attention", "full_attention"], model_type="gpt_oss",
    num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=2,
    num_key_value_heads=2, num_local_experts=4, output_router_logits=False, pad_token_id=9,
    quantization_config=dict(modules_to_not_convert=KEPT, quant_method="mxfp4"),
    rms_norm_eps=1e-05, rope_scaling=OSS_YARN, rope_theta=150000, router_aux_loss_coef=0.9,
    sliding_window=5, swiglu_limit=7.0, tie_word_embeddings=False,
    transformers_version="4.55.0.dev0", use_cache=True, vocab_size=71,
)  # fmt: skip
case("gpt-oss-20b", GPT_OSS, both(BF16, packed))
case("llama-2-7b-hf", LLAMA2, both(F16, also(FREQUENCIES)))
case("llama-3.1-8b-instruct", LLAMA3, BF16)
case("llama-3.2-1b", LLAMA3 | dict(head_dim=6, tie_word_embeddings=True, eos_token_id=2), BF16)
case(
    "smollm2-135m",
    LLAMA3
    | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv": {}}},
    BF16,
)
MISTRAL = less(LLAMA2, "_name_or_path", "pretraining_tp", "rope_scaling") | dict(
    architectures=["MistralForCausalLM"],
    model_type="mistral",
    rope_theta=10000.0,
    sliding_window=9,
    num_key_value_heads=2,
)
case("mistral-7b-v0.1", MISTRAL, BF16)

LONGROPE = dict(long_factor=[1.08, 4.5, 11.5], short_factor=[1.0, 1.02, 2.5], type="longrope")
PHI35 = less(LLAMA3, "mlp_bias") | dict(
    _name_or_path="Phi-3.5-mini-instruct", architectures=["Phi3ForCausalLM"], embd_pdrop=0.0,
    auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, eos_token_id=32000, model_type="phi3",
    num_key_value_heads=4,
    original_max_position_embeddings=10, pad_token_id=3, resid_pdrop=0.0, rope_scaling=LONGROPE,
    rope_theta=10000.0, sliding_window=262144, transformers_version="4.43.3",
)  # fmt: skip
PHI4 = PHI35 | dict(
    full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
    num_key_value_heads=2, partial_rotary_factor=0.75, tie_word_embeddings=True,
    rope_scaling=LONGROPE | dict(long_factor=[1.0, 9.5], short_factor=[1.0, 1.5]),
)  # fmt: skip
case("phi-3.5-mini-instruct", PHI35, BF16)
case("phi-4-mini-instruct", PHI4, BF16)

QWEN2 = less(LLAMA3, "pretraining_tp", "rope_scaling", "attention_bias", "mlp_bias") | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_window_layers=2,
    sliding_window=ROOM,
    use_sliding_window=False, tie_word_embeddings=True, use_mrope=False, eos_token_id=3,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
)  # fmt: skip
QWEN3 = less(QWEN2, "use_mrope") | dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=10, attention_bias=False,
    rope_scaling=None,
    sliding_window=None,
)  # fmt: skip
case("qwen2.5-0.5b-instruct", QWEN2, BF16)
case("qwen3-0.6b", QWEN3, both(also({"lm_head.weight": "model.embed_tokens.weight"}), BF16))

GEMMA2 = less(LLAMA3, "pretraining_tp", "rope_scaling", "mlp_bias", "tie_word_embeddings") | dict(
    architectures=["Gemma2ForCausalLM"], model_type="gemma2", attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    head_dim=8, cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    pad_token_id=0, query_pre_attn_scalar=8, rope_theta=10000.0, sliding_window=9,
    eos_token_id=[1, 5], rms_norm_eps=1e-06,
)  # fmt: skip
GEMMA3 = less(GEMMA2, "hidden_act") | dict(
    architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", attn_logit_softcapping=None,
    final_logit_softcapping=None,
    num_key_value_heads=1, num_hidden_layers=7, rope_local_base_freq=10000, rope_scaling=None,
    rope_theta=1000000,
    sliding_window_pattern=6,
)  # fmt: skip
case("gemma-2-2b-it", GEMMA2, BF16)
case("gemma-3-1b-it", GEMMA3, BF16)

NEOX = LAYERS | dict(
    architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu",
    hidden_size=32,
    initializer_range=0.02, layer_norm_eps=1e-05, model_type="gpt_neox", rotary_emb_base=10000,
    rotary_pct=0.25,
    tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.24.0", use_cache=True,
    use_parallel_residual=True, vocab_size=71,
)  # fmt: skip
TUNED = dict(
    attention_bias=True, attention_dropout=0.0, classifier_dropout=0.1, hidden_dropout=0.0,
    partial_rotary_factor=0.25,
    rope_scaling=None, rope_theta=10000, transformers_version="4.50.0",
)  # fmt: skip
case("pythia-70m", NEOX, both(also({"gpt_neox.layers.0.attention.bias": TRIANGLE.byte()}), F16))
case("a pythia tuned with transformers 4.50", NEOX | TUNED)

COHERE = less(LLAMA3, "mlp_bias", "rms_norm_eps", "rope_scaling", "pretraining_tp") | dict(
    architectures=["CohereForCausalLM"], bos_token_id=5, eos_token_id=3, layer_norm_eps=1e-05,
    logit_scale=0.0625, model_max_length=ROOM, model_type="cohere", num_key_value_heads=4,
    pad_token_id=0, rope_theta=8000000.0, torch_dtype="float16", use_qk_norm=False,
    tie_word_embeddings=True, transformers_version="4.38.2",
)  # fmt: skip
case("c4ai-command-r-v01", COHERE, F16)
GLM4 = less(LLAMA3, "mlp_bias", "rope_scaling", "pretraining_tp", "bos_token_id") | dict(
    architectures=["Glm4ForCausalLM"], attention_bias=False, eos_token_id=[2, 3, 4], head_dim=8,
    model_type="glm4", num_key_value_heads=2, pad_token_id=2, partial_rotary_factor=0.5,
    rope_theta=10000.0, transformers_version="4.51.3",
)  # fmt: skip
case("glm-4-9b-0414", GLM4, BF16)

FALCON = less(LAYERS, "intermediate_size", "max_position_embeddings") | dict(
    alibi=False, apply_residual_connection_post_layernorm=False, bias=False, bos_token_id=11,
    architectures=["FalconForCausalLM"], attention_dropout=0.0, eos_token_id=11,
    hidden_dropout=0.0, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="falcon",
    multi_query=True, new_decoder_architecture=False, num_kv_heads=4, parallel_attn=True,
    torch_dtype="bfloat16", transformers_version="4.27.4", use_cache=True, vocab_size=71,
)  # fmt: skip
FALCON_40B = FALCON | dict(
    new_decoder_architecture=True, num_kv_heads=2, auto_map={"AutoConfig": "configuration_falcon"}
)
FALCON2 = FALCON_40B | dict(
    activation="gelu", ff_factor=4, ffn_hidden_size=40, max_position_embeddings=ROOM,
    num_ln_in_parallel_attn=1, rope_scaling=None, rope_theta=5000042.0, tie_word_embeddings=False,
)  # fmt: skip
case("falcon-7b", FALCON, BF16)
case("falcon-40b", FALCON_40B, BF16)
case("falcon-11b", FALCON2, BF16)
MPT = dict(
    architectures=["MptForCausalLM"], d_model=WIDTH, emb_pdrop=0, embedding_fraction=1.0,
    expansion_ratio=4, init_device="cpu", layer_norm_epsilon=1e-05, learned_pos_emb=True,
    attn_config=dict(
        alibi=True, alibi_bias_max=8, attn_impl="torch", attn_pdrop=0, clip_qkv=None,
        attn_type="multihead_attention", attn_uses_sequence_id=False, prefix_lm=False, qk_ln=False,
        softmax_scale=None, model_type="",
    ),
    initializer_range=0.02, logit_scale=None, max_seq_len=ROOM, model_type="mpt", n_heads=4,
    n_layers=2, no_bias=True, norm_type="low_precision_layernorm", resid_pdrop=0,
    tokenizer_name="EleutherAI/gpt-neox-20b", torch_dtype="bfloat16",
    transformers_version="4.28.1", use_cache=False, verbose=0, vocab_size=71,
)  # fmt: skip
case("mpt-7b", MPT, BF16)

GPTJ = dict(
    activation_function="gelu_new", architectures=["GPTJForCausalLM"], attn_pdrop=0.0,
    bos_token_id=3, embd_pdrop=0.0, eos_token_id=3, gradient_checkpointing=False,
    initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gptj", n_embd=WIDTH, n_head=4,
    n_inner=None, n_layer=2, n_positions=ROOM, resid_pdrop=0.0, rotary=True, rotary_dim=4,
    scale_attn_weights=True, summary_activation=None, summary_first_dropout=0.1,
    summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
    tie_word_embeddings=False, tokenizer_class="GPT2Tokenizer", transformers_version="4.18.0.dev0",
    task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    use_cache=True, vocab_size=71,
)  # fmt: skip
case("gpt-j-6b", GPTJ, also({"transformer.h.0.attn.bias": TRIANGLE.bool()}))
GPT_NEO = dict(
    activation_function="gelu_new", architectures=["GPTNeoForCausalLM"], attention_dropout=0,
    attention_layers=["global", "local"] * 2, attention_types=[[["global", "local"], 2]],
    bos_token_id=3, embed_dropout=0, eos_token_id=3, gradient_checkpointing=False,
    hidden_size=WIDTH, initializer_range=0.02, intermediate_size=None, layer_norm_epsilon=1e-05,
    max_position_embeddings=ROOM, model_type="gpt_neo", num_heads=4, num_layers=4, resid_dropout=0,
    summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
    summary_type="cls_index", summary_use_proj=True, transformers_version="4.9.0.dev0",
    use_cache=True, vocab_size=71, window_size=9,
)  # fmt: skip
case("gpt-neo-125m", GPT_NEO, also({"transformer.h.0.attn.attention.bias": TRIANGLE.bool()}))
OPT = less(LAYERS, "intermediate_size") | dict(
    _name_or_path="facebook/opt-125m", _remove_final_layer_norm=False, activation_dropout=0.0,
    activation_function="relu", architectures=["OPTForCausalLM"], attention_dropout=0.0,
    bos_token_id=2, do_layer_norm_before=True, dropout=0.1, eos_token_id=2, ffn_dim=40,
    init_std=0.02, layerdrop=0.0, model_type="opt", pad_token_id=1, prefix="</s>",
    torch_dtype="float16", transformers_version="4.21.0.dev0", use_cache=True, vocab_size=71,
    word_embed_proj_dim=WIDTH,
)  # fmt: skip
case("opt-125m", OPT, both(bare("model."), F16))

BLOOM = dict(
    apply_residual_connection_post_layernorm=False, attention_dropout=0.0,
    attention_softmax_in_fp32=True,
    architectures=["BloomForCausalLM"], bias_dropout_fusion=True, bos_token_id=1, eos_token_id=2,
    pad_token_id=3,
    hidden_dropout=0.0, initializer_range=0.02, layer_norm_epsilon=1e-05,
    masked_softmax_fusion=True, model_type="bloom",
    n_embed=WIDTH, n_inner=None, n_layer=2, num_attention_heads=4, offset_alibi=100,
    pretraining_tp=1, skip_bias_add=True,
    skip_bias_add_qkv=False, transformers_version="4.20.0", unk_token_id=0, use_cache=True,
    vocab_size=71,
)  # fmt: skip
case("bloom-560m", BLOOM, both(bare("transformer."), F16))

BERT = LAYERS | dict(
    architectures=["BertForMaskedLM"], attention_probs_dropout_prob=0.1,
    gradient_checkpointing=False, hidden_act="gelu",
    hidden_dropout_prob=0.1, initializer_range=0.02, layer_norm_eps=1e-12, model_type="bert",
    pad_token_id=0,
    position_embedding_type="absolute", transformers_version="4.6.0.dev0", type_vocab_size=2,
    use_cache=True, vocab_size=71,
)  # fmt: skip
POOLED = dict(
    directionality="bidi", pooler_fc_size=768, pooler_num_attention_heads=12,
    pooler_num_fc_layers=3,
    pooler_size_per_head=128, pooler_type="first_token_transform",
)  # fmt: skip
SENTENCES = {
    "cls.seq_relationship.weight": torch.ones(2, WIDTH),
    "cls.seq_relationship.bias": torch.ones(2),
}
SST2 = dict(
    architectures=["BertForSequenceClassification"],
    finetuning_task="sst-2",
    output_past=True,
    **CLASSES,
)
case("bert-base-uncased", BERT, both(also(SENTENCES | pooler("bert")), gammas))
case("bert-base-multilingual-cased", BERT | POOLED, also(SENTENCES | pooler("bert")))
case(
    "textattack's sst-2",
    BERT | SST2,
    also({"bert.embeddings.position_ids": torch.arange(ROOM)[None]}),
)

ROBERTA = less(BERT, "gradient_checkpointing", "transformers_version", "position_embedding_type",
"use_cache") | dict(
    architectures=["RobertaForMaskedLM"], bos_token_id=0, eos_token_id=2, layer_norm_eps=1e-05,
    model_type="roberta",
    pad_token_id=1, type_vocab_size=1,
)  # fmt: skip
OUTPUT = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"}
MNLI = dict(architectures=["RobertaForSequenceClassification"], _num_labels=3, **CLASSES)
case("roberta-base", ROBERTA, also(OUTPUT | pooler("roberta")))
case("roberta-large-mnli", ROBERTA | MNLI, also(pooler("roberta")))

XLM_ROBERTA = ROBERTA | dict(
    architectures=["XLMRobertaForMaskedLM"], model_type="xlm-roberta", output_past=True,
    position_embedding_type="absolute", transformers_version="4.17.0.dev0", use_cache=True,
)  # fmt: skip
case("xlm-roberta-base", XLM_ROBERTA, also(OUTPUT))

DISTILBERT = dict(
    activation="gelu", architectures=["DistilBertForMaskedLM"], attention_dropout=0.1, dim=WIDTH,
    dropout=0.1, hidden_dim=40, initializer_range=0.02, max_position_embeddings=ROOM,
    model_type="distilbert", n_heads=4, n_layers=2, pad_token_id=0, qa_dropout=0.1,
    seq_classif_dropout=0.2, sinusoidal_pos_embds=False, tie_weights_=True,
    transformers_version="4.10.0.dev0", vocab_size=71,
)  # fmt: skip
EMBEDDED = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
case("distilbert-base-uncased", DISTILBERT, also(EMBEDDED))
case(
    "distilbert's sst-2",
    DISTILBERT
    | dict(architectures=["DistilBertForSequenceClassification"], output_past=True, **CLASSES)
    | dict(finetuning_task="sst-2"),
)

ELECTRA = LAYERS | dict(
    architectures=["ElectraForMaskedLM"], attention_probs_dropout_prob=0.1, embedding_size=16,
    hidden_act="gelu", hidden_dropout_prob=0.1, initializer_range=0.02, layer_norm_eps=1e-12,
    model_type="electra", pad_token_id=0, summary_activation="gelu", summary_last_dropout=0.1,
    summary_type="first", summary_use_proj=True, type_vocab_size=2, vocab_size=71,
)  # fmt: skip
IDS = {"electra.embeddings.position_ids": torch.arange(ROOM)[None]}
case("electra-small-generator", ELECTRA, also(IDS))
case("electra-small-discriminator", ELECTRA | dict(architectures=["ElectraForPreTraining"]))

ALBERT = LAYERS | dict(
    architectures=["AlbertForMaskedLM"], attention_probs_dropout_prob=0, bos_token_id=2,
    classifier_dropout_prob=0.1, down_scale_factor=1, embedding_size=16, eos_token_id=3, gap_size=0,
    hidden_act="gelu_new", hidden_dropout_prob=0, initializer_range=0.02, inner_group_num=1,
    layer_norm_eps=1e-12, model_type="albert", net_structure_type=0, num_hidden_groups=1,
    num_memory_blocks=0, pad_token_id=0, type_vocab_size=2, vocab_size=71,
)  # fmt: skip
POOLER = {"albert.pooler.weight": torch.ones(WIDTH, WIDTH), "albert.pooler.bias": torch.ones(WIDTH)}
case("albert-base-v2", ALBERT, also(POOLER))

MPNET = less(LAYERS, "max_position_embeddings") | dict(
    architectures=["MPNetForMaskedLM"], attention_probs_dropout_prob=0.1, bos_token_id=0,
    eos_token_id=2, gradient_checkpointing=False, hidden_act="gelu", hidden_dropout_prob=0.1,
    initializer_range=0.02, layer_norm_eps=1e-05, max_position_embeddings=ROOM,
    model_type="mpnet", pad_token_id=1, relative_attention_num_buckets=32,
    transformers_version="4.8.2", vocab_size=71,
)  # fmt: skip
case("all-mpnet-base-v2", MPNET)

DEBERTA = LAYERS | dict(
    model_type="deberta-v2", attention_probs_dropout_prob=0.1, hidden_act="gelu",
    hidden_dropout_prob=0.1, initializer_range=0.02, relative_attention=True, position_buckets=8,
    norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p", layer_norm_eps=1e-7,
    max_relative_positions=-1, position_biased_input=False, type_vocab_size=0, vocab_size=71,
    architectures=["DebertaV2ForMaskedLM"],
)  # fmt: skip
case("deberta-v3-base", DEBERTA)

MODERNBERT = less(LAYERS, "max_position_embeddings") | dict(
    architectures=["ModernBertForMaskedLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=2, classifier_activation="gelu", classifier_bias=False, classifier_dropout=0.0,
    classifier_pooling="mean", cls_token_id=2, decoder_bias=True, deterministic_flash_attn=False,
    embedding_dropout=0.0, eos_token_id=3, global_attn_every_n_layers=3,
    global_rope_theta=160000.0, gradient_checkpointing=False, hidden_activation="gelu",
    initializer_cutoff_factor=2.0, initializer_range=0.02, layer_norm_eps=1e-05,
    local_attention=8, local_rope_theta=10000.0, max_position_embeddings=ROOM, mlp_bias=False,
    mlp_dropout=0.0, model_type="modernbert", norm_bias=False, norm_eps=1e-05,
    num_hidden_layers=4, pad_token_id=1, position_embedding_type="absolute", sep_token_id=3,
    tie_word_embeddings=True, torch_dtype="float32", transformers_version="4.47.0.dev0",
    vocab_size=71,
)  # fmt: skip
case("ModernBERT-base", MODERNBERT)

CLIP = LAYERS | dict(
    architectures=["CLIPTextModel"], attention_dropout=0.0, bos_token_id=0, dropout=0.0,
    eos_token_id=2, hidden_act="quick_gelu", initializer_factor=1.0, initializer_range=0.02,
    layer_norm_eps=1e-05, model_type="clip_text_model", pad_token_id=1, projection_dim=24,
    torch_dtype="float16", transformers_version="4.22.0.dev0", vocab_size=71,
)  # fmt: skip


def prefixed(held):
    return {f"text_model.{name}": w for name, w in held.items()}


POSITIONS = {"text_model.embeddings.position_ids": torch.arange(ROOM)[None]}
case("stable-diffusion's text encoder", CLIP, both(prefixed, also(POSITIONS), F16))

T5 = dict(
    architectures=["T5ForConditionalGeneration"], d_ff=40, d_kv=6, d_model=WIDTH,
    decoder_start_token_id=0, dropout_rate=0.1,
    eos_token_id=1, initializer_factor=1.0, is_encoder_decoder=True, layer_norm_epsilon=1e-06,
    model_type="t5",
    n_positions=512, num_heads=4, num_layers=2, output_past=True, pad_token_id=0,
    relative_attention_num_buckets=32,
    task_specific_params={"translation_en_to_de": {"max_length": 300, "prefix": "translate: "}},
    vocab_size=71,
)  # fmt: skip
FLAN = T5 | dict(
    feed_forward_proj="gated-gelu", dense_act_fn="gelu_new", is_gated_act=True,
    num_decoder_layers=2,
    tie_word_embeddings=False, relative_attention_max_distance=128, transformers_version="4.23.1",
    use_cache=True,
)  # fmt: skip
SHARED = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
SHARED_ENCODER = {"encoder.embed_tokens.weight": "shared.weight"}
UNREAD = {
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 4)
}
ENCODER = FLAN | dict(architectures=["T5EncoderModel"], is_encoder_decoder=False)
case("the text encoder of diffusion models", ENCODER, both(also(SHARED_ENCODER), BF16))
case("t5-base", T5, also(UNREAD | SHARED | {"lm_head.weight": "shared.weight"}))
case(
    "flan-t5",
    FLAN,
    both(lambda held: held | {"lm_head.weight": held["shared.weight"].flip(0) + 0.1}, also(SHARED)),
)

BART = CLASSES | dict(
    activation_dropout=0.1, activation_function="gelu", add_bias_logits=False,
    add_final_layer_norm=False,
    architectures=["BartModel"], attention_dropout=0.1, bos_token_id=0, classif_dropout=0.1,
    classifier_dropout=0.0,
    d_model=WIDTH, decoder_attention_heads=4, decoder_ffn_dim=40, decoder_layerdrop=0.0,
    decoder_layers=2,
    decoder_start_token_id=2, dropout=0.1, early_stopping=True, encoder_attention_heads=4,
    encoder_ffn_dim=40,
    encoder_layerdrop=0.0, encoder_layers=2, eos_token_id=2, forced_bos_token_id=0,
    forced_eos_token_id=2,
    gradient_checkpointing=False, init_std=0.02, is_encoder_decoder=True,
    max_position_embeddings=ROOM, model_type="bart",
    no_repeat_ngram_size=3, normalize_before=False, normalize_embedding=True, num_beams=4,
    num_hidden_layers=2,
    pad_token_id=1, scale_embedding=False, torch_dtype="float32",
    transformers_version="4.12.0.dev0", use_cache=True,
    vocab_size=71,
)  # fmt: skip
CNN = BART | dict(
    _num_labels=3, architectures=["BartForConditionalGeneration"], length_penalty=2.0,
    max_length=142, min_length=56,
    output_past=True, prefix=" ",
)  # fmt: skip
OPUS = less(BART, "early_stopping", "forced_bos_token_id", "no_repeat_ngram_size",
"torch_dtype") | dict(
    activation_function="swish", architectures=["MarianMTModel"], bad_words_ids=[[1]],
    decoder_vocab_size=71,
    model_type="marian", normalize_embedding=False, num_beams=6, scale_embedding=True,
    share_encoder_decoder_embeddings=True, static_position_embeddings=True,
)  # fmt: skip
COPIES = {
    name: "model.shared.weight"
    for name in (*(f"model.{name}" for name in SHARED), "lm_head.weight")
}
case("bart-base", BART)
case("bart-large-cnn", CNN, also(COPIES))
case("opus-mt-en-de", OPUS, also(COPIES))

PRE_NORM = dict(normalize_before=True, add_final_layer_norm=True, scale_embedding=True)
MBART = CNN | PRE_NORM | dict(
    architectures=["MBartForConditionalGeneration"], model_type="mbart",
    static_position_embeddings=False, tokenizer_class="MBartTokenizer",
)  # fmt: skip
XSUM = CNN | PRE_NORM | dict(
    activation_function="relu", architectures=["PegasusForConditionalGeneration"],
    do_blenderbot_90_layernorm=False, extra_pos_embeddings=0, model_type="pegasus",
    force_bos_token_to_be_generated=False, normalize_embedding=False, pad_token_id=0,
    static_position_embeddings=True,
)  # fmt: skip
NLLB = less(BART, "add_bias_logits", "add_final_layer_norm", "normalize_before",
"normalize_embedding", "classif_dropout", "forced_bos_token_id") | dict(
    activation_function="relu", architectures=["M2M100ForConditionalGeneration"],
    encoder_layerdrop=0.05, max_length=200, model_type="m2m_100", scale_embedding=True,
    tokenizer_class="NllbTokenizer",
)  # fmt: skip
case("mbart-large-cc25", MBART, also(COPIES))
case("pegasus-xsum", XSUM, also(COPIES))
case("nllb-200-distilled-600M", NLLB, also(COPIES))

T5GEMMA_STACK = dict(
    attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=50.0, bos_token_id=2,
    dropout_rate=0.0, eos_token_id=1, final_logit_softcapping=30.0, head_dim=16,
    hidden_activation="gelu_pytorch_tanh", hidden_size=WIDTH, initializer_range=0.02,
    intermediate_size=40, is_decoder=False, max_position_embeddings=ROOM,
    model_type="t5_gemma_module", num_attention_heads=2, num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"], num_key_value_heads=1, pad_token_id=0,
    query_pre_attn_scalar=16, rms_norm_eps=1e-06, rope_theta=10000.0, sliding_window=6,
    use_cache=True, vocab_size=71,
)  # fmt: skip
case("t5gemma-b-b-ul2", dict(
    architectures=["T5GemmaForConditionalGeneration"], classifier_dropout_rate=0.0,
    decoder=T5GEMMA_STACK | dict(cross_attention_hidden_size=WIDTH, is_decoder=True),
    dropout_rate=0.0, encoder=T5GEMMA_STACK, eos_token_id=[1, 107], initializer_range=0.02,
    is_encoder_decoder=True, model_type="t5gemma", pad_token_id=0, torch_dtype="bfloat16",
    transformers_version="4.52.0.dev0", use_cache=True, vocab_size=256000,
), BF16)  # fmt: skip
