"""GPT-2, GPT-NeoX and BLOOM: decoders with layer norms and biases, whose queries, keys and values
are one matrix."""

from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.llama import ATTENTION, INV_FREQ
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import BY_HEAD, CONV, QKV, TensorRow, linear, norm

# GPT-2 (Radford et al. 2019).
GPT2_FIELDS = (
    fields.Constant(norm="layer", bias="all", positions="learned"),
    fields.Key("vocab_size", "vocab_size", 50257),
    fields.Key("n_positions", "max_length", 1024),
    fields.Key("n_embd", "d_model", 768),
    fields.Key("n_layer", "n_layers", 12),
    fields.Key("n_head", "n_heads", 12),
    fields.Key("n_inner", "d_ff"),
    fields.Key("layer_norm_epsilon", "norm_eps", 1e-5),
    fields.Choice("activation_function", "activation", fields.PLAIN, "gelu_new"),
    fields.Choice("scale_attn_weights", "attention_scale", {True: 0.0, False: 1.0}, True),
    fields.FixedKey("scale_attn_by_inverse_layer_idx", (False,)),
    fields.tied(True),
    fields.Dropout("resid_pdrop embd_pdrop attn_pdrop"),
    # Read by llama.cpp's converter.
    fields.AliasKey("n_ctx", "n_positions", "max_length"),
    fields.IgnoredKeys("reorder_and_upcast_attn summary_type summary_use_proj summary_activation"),
    fields.IgnoredKeys("summary_proj_to_labels summary_first_dropout"),
)

GPT2_LAYER = "transformer.h.{}."
GPT2_ROWS = (
    TensorRow("transformer.wte.weight", "embed.tokens"),
    TensorRow("transformer.wpe.weight", "embed.positions"),
    *norm(GPT2_LAYER + "ln_1", "blocks.attention_norm"),
    *linear(GPT2_LAYER + "attn.c_attn", QKV, CONV),
    *linear(GPT2_LAYER + "attn.c_proj", "blocks.attention.out", CONV),
    *norm(GPT2_LAYER + "ln_2", "blocks.ffn_norm"),
    *linear(GPT2_LAYER + "mlp.c_fc", "blocks.ffn.up", CONV),
    *linear(GPT2_LAYER + "mlp.c_proj", "blocks.ffn.down", CONV),
    *norm("transformer.ln_f", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)

GPT2 = Family(
    "gpt2",
    {"GPT2LMHeadModel": {}},
    GPT2_FIELDS,
    lambda config: GPT2_ROWS,
    prefix="transformer.",
    bases=("GPT2Model",),
    copies=tied_copy("lm_head.weight", "transformer.wte.weight"),
    ignored=(r"\.attn\.(masked_)?bias$",),
)

# GPT-NeoX (arXiv:2204.06745), also the architecture of Pythia.
NEOX_FIELDS = (
    fields.Constant(norm="layer"),
    fields.DivisibleHeads(),
    fields.Key("vocab_size", "vocab_size", 50432),
    fields.Key("hidden_size", "d_model", 6144),
    fields.Key("num_hidden_layers", "n_layers", 44),
    fields.Key("num_attention_heads", "n_heads", 64),
    fields.Key("intermediate_size", "d_ff", 24576),
    fields.Key("layer_norm_eps", "norm_eps", 1e-5),
    Length(2048),
    fields.Choice("hidden_act", "activation", fields.PLAIN, "gelu"),
    fields.Choice(
        "use_parallel_residual", "residual", {True: "parallel", False: "sequential"}, True
    ),
    Rope(theta=("rotary_emb_base", 10_000.0), fraction=("rotary_pct", 0.25)),
    fields.AliasKey("rope_theta", "rotary_emb_base", "rope_theta", checked=True),
    fields.AliasKey("partial_rotary_factor", "rotary_pct", "rope_fraction", checked=True),
    fields.Biases({"attention_bias": (ATTENTION, True)}, always=frozenset({"ffn", "norm"})),
    fields.tied(False),
    fields.Dropout("attention_dropout hidden_dropout"),
)

NEOX_LAYER = "gpt_neox.layers.{}."
NEOX_ROWS = (
    TensorRow("gpt_neox.embed_in.weight", "embed.tokens"),
    *norm(NEOX_LAYER + "input_layernorm", "blocks.attention_norm"),
    *linear(NEOX_LAYER + "attention.query_key_value", QKV, BY_HEAD),
    *linear(NEOX_LAYER + "attention.dense", "blocks.attention.out"),
    *norm(NEOX_LAYER + "post_attention_layernorm", "blocks.ffn_norm"),
    *linear(NEOX_LAYER + "mlp.dense_h_to_4h", "blocks.ffn.up"),
    *linear(NEOX_LAYER + "mlp.dense_4h_to_h", "blocks.ffn.down"),
    *norm("gpt_neox.final_layer_norm", "final_norm"),
    TensorRow("embed_out.weight", "head.weight"),
)

GPT_NEOX = Family(
    "gpt_neox",
    {"GPTNeoXForCausalLM": {}},
    NEOX_FIELDS,
    lambda config: NEOX_ROWS,
    prefix="gpt_neox.",
    bases=("GPTNeoXModel",),
    copies=tied_copy("embed_out.weight", "gpt_neox.embed_in.weight"),
    ignored=(r"\.attention\.(masked_)?bias$", INV_FREQ),
)

# BLOOM (arXiv:2211.05100): ALiBi, and a norm after the embedding.
BLOOM_FIELDS = (
    fields.Constant(
        norm="layer", bias="all", positions="alibi", embedding_norm=True, activation="gelu_tanh"
    ),
    fields.Key("vocab_size", "vocab_size", 250880),
    fields.Key("hidden_size", "d_model", 64, instead="n_embed"),
    fields.Key("n_layer", "n_layers", 2, instead="num_hidden_layers"),
    fields.Key("n_head", "n_heads", 8, instead="num_attention_heads"),
    fields.Key("layer_norm_epsilon", "norm_eps", 1e-5),
    fields.Key("seq_length", "max_length", 2048),
    fields.FixedKey("apply_residual_connection_post_layernorm", (False,)),
    fields.tied(True),
    fields.Dropout("hidden_dropout attention_dropout"),
    # It would leave out biases with pretraining_tp > 1.
    fields.FixedKey("slow_but_exact", (False,)),
    fields.IgnoredKeys(
        "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi"
    ),
    fields.IgnoredKeys("pretraining_pp skip_bias_add skip_bias_add_qkv n_inner"),
)

BLOOM_LAYER = "transformer.h.{}."
BLOOM_ROWS = (
    TensorRow("transformer.word_embeddings.weight", "embed.tokens"),
    *norm("transformer.word_embeddings_layernorm", "embed.norm"),
    *norm(BLOOM_LAYER + "input_layernorm", "blocks.attention_norm"),
    *linear(BLOOM_LAYER + "self_attention.query_key_value", QKV, BY_HEAD),
    *linear(BLOOM_LAYER + "self_attention.dense", "blocks.attention.out"),
    *norm(BLOOM_LAYER + "post_attention_layernorm", "blocks.ffn_norm"),
    *linear(BLOOM_LAYER + "mlp.dense_h_to_4h", "blocks.ffn.up"),
    *linear(BLOOM_LAYER + "mlp.dense_4h_to_h", "blocks.ffn.down"),
    *norm("transformer.ln_f", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)

BLOOM = Family(
    "bloom",
    {"BloomForCausalLM": {}},
    BLOOM_FIELDS,
    lambda config: BLOOM_ROWS,
    prefix="transformer.",
    bases=("BloomModel",),
    copies=tied_copy("lm_head.weight", "transformer.word_embeddings.weight"),
)
