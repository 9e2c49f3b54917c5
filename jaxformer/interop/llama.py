"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783), and the decoders with its tensors: Mistral,
Ministral, Ministral 3, SmolLM3, Granite, StableLM, Phi-3, Qwen, OLMo 2 and 3, Command R, GLM-4, and
Gemma, whose norms multiply by 1 + weight."""

from jaxformer.interop.family import decoder_like
from jaxformer.interop.fields import (
    GATED_NAMES,
    SIZES,
    Biases,
    Choice,
    Constant,
    DivisibleHeads,
    Dropout,
    FixedKey,
    IgnoredKeys,
    Key,
    KeyMapping,
    KeyRule,
    OptionalKey,
    RotatedLayers,
    Windows,
    fixed,
    keys,
)
from jaxformer.interop.rope import ORIGINAL, Length, RopeKeys, TemperedRope
from jaxformer.interop.tensor_table import AS_STORED, TensorRow, block, norm, projections, with_rows

ATTENTION = frozenset({"qkv", "out"})
FFN = frozenset({"ffn"})
LAYER = "model.layers.{}."

# All but the norms of a layer, which the families place differently.
TRUNK = (
    *projections(LAYER + "self_attn", "o_proj"),
    TensorRow(LAYER + "self_attn.q_norm.weight", "blocks.attention.q_norm"),
    TensorRow(LAYER + "self_attn.k_norm.weight", "blocks.attention.k_norm"),
    *block(LAYER, gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),
    *norm("model.norm", "final_norm"),
)
ROWS = (
    *TRUNK,
    *block(LAYER, attention_norm="input_layernorm", ffn_norm="post_attention_layernorm"),
)


def sizes(without: str = "") -> tuple[KeyMapping, ...]:
    """Return the keys of all these families but those of `without`, separated by spaces."""
    sizes_of_all = (
        *keys(f"{SIZES} rms_norm_eps", num_key_value_heads=None, head_dim=None),
        Length(),
        Dropout("attention_dropout"),
    )
    left_out = without.split()
    return tuple(row for row in sizes_of_all if getattr(row, "hf", "") not in left_out)


SIZES_OF_ALL = sizes()


SILU = Choice("hidden_act", "activation", GATED_NAMES, "silu")
ATTENTION_BIAS = Biases({"attention_bias": (ATTENTION, False)})
RMS = Constant({"norm": "rms"})
USUAL = (RMS, SILU, RopeKeys())
BIAS_FLAGS = Biases({"attention_bias": (ATTENTION, False), "mlp_bias": (FFN, False)})
LLAMA = decoder_like("llama", "Llama", ROWS, (*SIZES_OF_ALL, DivisibleHeads(), *USUAL, BIAS_FLAGS))

# Granite (arXiv:2405.04324): Llama with multipliers.
MULTIPLIERS = (
    Key("embedding_multiplier", "embedding.multiplier", 1.0),
    Key("residual_multiplier", "residual_multiplier", 1.0),
    Key("logits_scaling", "head.divisor", 1.0),
    Key("attention_multiplier", "attention.scale", 1.0),
)
GRANITE = decoder_like(
    "granite", "Granite", ROWS, (*SIZES_OF_ALL, *MULTIPLIERS, *USUAL, BIAS_FLAGS)
)

# Mistral (arXiv:2310.06825): a window in every layer. Ministral: in those of layer_types.
MISTRAL = decoder_like("mistral", "Mistral", ROWS, (*SIZES_OF_ALL, *USUAL, Windows(kinds=False)))
MINISTRAL = decoder_like("ministral", "Ministral", ROWS, (*SIZES_OF_ALL, *USUAL, Windows()))

# Ministral 3 (2025): the text model, whose scores grow with the position.
MINISTRAL3 = decoder_like(
    "ministral3",
    "Ministral3",
    ROWS,
    (
        *SIZES_OF_ALL,
        RMS,
        SILU,
        TemperedRope(needed=True),
        Windows(kinds=False, default_window=None),
    ),
)

# StableLM (arXiv:2402.17834): layer norms, and RoPE of a quarter of a head.
LAYER_NORM_OF_HEADS = {False: "none", True: "layer", None: "none"}
STABLELM = decoder_like(
    "stablelm",
    "StableLm",
    with_rows(
        ROWS,
        TensorRow(LAYER + "self_attn.q_layernorm.norms.{}.weight", "blocks.attention.q_norm"),
        TensorRow(LAYER + "self_attn.k_layernorm.norms.{}.weight", "blocks.attention.k_norm"),
    ),
    (
        # The width of a head follows from the two others.
        *sizes("head_dim rms_norm_eps"),
        *keys(layer_norm_eps=1e-5),
        Dropout("hidden_dropout"),
        DivisibleHeads(),
        Constant({"norm": "layer"}),
        SILU,
        RopeKeys(fraction=("partial_rotary_factor", 0.25)),
        Biases({"use_qkv_bias": (frozenset({"qkv"}), False)}, always=frozenset({"norm"})),
        Choice("qk_layernorm", "attention.query_key_norm", LAYER_NORM_OF_HEADS, False),
        Choice(
            "use_parallel_residual",
            "residual",
            {False: "sequential", True: "parallel_shared"},
            False,
        ),
    ),
)

# Phi-3 (arXiv:2404.14219) and Phi-4-mini (arXiv:2503.01743): LongRoPE, and one matrix for queries,
# keys and values, and one for gate and up.
PHI3 = decoder_like(
    "phi3",
    "Phi3",
    with_rows(ROWS, *block(LAYER, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")),
    (
        # The width of a head follows from the two others.
        *sizes("head_dim"),
        Dropout("resid_pdrop embd_pdrop"),
        IgnoredKeys("full_attn_mod interpolate_factor"),
        RMS,
        SILU,
        RopeKeys(
            fraction=("partial_rotary_factor", 1.0),
            original=(ORIGINAL, 4096),
            kinds=("default", "longrope"),
        ),
        Windows(kinds=False, default_window=None),
    ),
)

# Qwen 2 (arXiv:2407.10671), with biases of queries, keys and values, and Qwen 3 (arXiv:2505.09388),
# with their norms.
QWEN = (*USUAL, Windows(switch=True))
HEAD_NORM = Constant({"attention.query_key_norm": "head"})
QWEN2 = decoder_like("qwen2", "Qwen2", ROWS, (*SIZES_OF_ALL, *QWEN, Constant({"bias": "qkv"})))
QWEN3 = decoder_like("qwen3", "Qwen3", ROWS, (*SIZES_OF_ALL, *QWEN, HEAD_NORM, ATTENTION_BIAS))

# SmolLM3: layers without positions (arXiv:2501.18795).
SMOLLM3 = decoder_like(
    "smollm3",
    "SmolLM3",
    ROWS,
    (
        *SIZES_OF_ALL,
        RMS,
        SILU,
        RopeKeys(theta=("rope_theta", 2_000_000.0)),
        RotatedLayers(switch=True, default_window=None),
        # Of the published files, which transformers does not read.
        IgnoredKeys("max_window_layers"),
        BIAS_FLAGS,
    ),
    is_tied=True,
)

# OLMo 2 (arXiv:2501.00656): norms after each sublayer, and of queries and keys over all heads. OLMo
# 3 (arXiv:2512.13961): the same with windows, whose layers are not scaled.
OLMO2_ROWS = (
    *TRUNK,
    *block(
        LAYER,
        attention_output_norm="post_attention_layernorm",
        ffn_output_norm="post_feedforward_layernorm",
    ),
)
OLMO2_KEYS = (
    *SIZES_OF_ALL,
    Constant({"norm": "rms", "norm_placement": "output", "attention.query_key_norm": "width"}),
    SILU,
    ATTENTION_BIAS,
)
OLMO2 = decoder_like("olmo2", "Olmo2", OLMO2_ROWS, (*OLMO2_KEYS, RopeKeys()))
OLMO3_THETA = ("rope_theta", 500_000.0)
OLMO3 = decoder_like(
    "olmo3",
    "Olmo3",
    OLMO2_ROWS,
    (
        *OLMO2_KEYS,
        RopeKeys(theta=OLMO3_THETA, local=OLMO3_THETA),
        # Written for older readers beside rope_parameters.
        IgnoredKeys("rope_theta"),
        Windows(every=4),
    ),
)


# Command R of Cohere and GLM-4: decoders with the tensors of Llama whose RoPE rotates neighboring
# dimensions.

INTERLEAVED_PAIRS = Constant({"rope.pairing": "interleaved"})


# Command R (Cohere 2024): attention and feed-forward read the same norm.
COHERE = decoder_like(
    "cohere",
    "Cohere",
    with_rows(
        TRUNK,
        TensorRow(LAYER + "self_attn.q_norm.weight", "blocks.attention.q_norm", AS_STORED),
        TensorRow(LAYER + "self_attn.k_norm.weight", "blocks.attention.k_norm", AS_STORED),
        *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    ),
    (
        # The width of a head follows from the two others.
        *sizes("head_dim rms_norm_eps"),
        DivisibleHeads(),
        Constant({"norm": "layer", "residual": "parallel_shared"}),
        *keys(layer_norm_eps=1e-5),
        # A factor of the logits, which are divided by its inverse here.
        KeyRule(
            lambda hf: {"head.divisor": 1 / hf.positive("logit_scale", 0.0625)},
            lambda config: {"logit_scale": 1 / config.head.divisor},
        ),
        SILU,
        RopeKeys(theta=("rope_theta", 500_000.0)),
        INTERLEAVED_PAIRS,
        ATTENTION_BIAS,
        Choice("use_qk_norm", "attention.query_key_norm", LAYER_NORM_OF_HEADS, False),
        IgnoredKeys("model_max_length"),
    ),
    is_tied=True,
)

# GLM-4 (arXiv:2406.12793), as of GLM-4-0414: norms before and after each sublayer.
GLM4 = decoder_like(
    "glm4",
    "Glm4",
    with_rows(
        TRUNK,
        *block(
            LAYER,
            gate_up="mlp.gate_up_proj",
            attention_norm="input_layernorm",
            attention_output_norm="post_self_attn_layernorm",
            ffn_norm="post_attention_layernorm",
            ffn_output_norm="post_mlp_layernorm",
        ),
    ),
    (
        *SIZES_OF_ALL,
        RMS,
        Constant({"norm_placement": "sandwich"}),
        SILU,
        RopeKeys(fraction=("partial_rotary_factor", 0.5)),
        INTERLEAVED_PAIRS,
        Biases({"attention_bias": (frozenset({"qkv"}), True)}),
    ),
)

# Gemma (arXiv:2403.08295): norms by 1 + weight, a scaled embedding, and wide heads.
ONE_SIDED = FixedKey("use_bidirectional_attention", (False, None))
GEMMA1 = decoder_like(
    "gemma",
    "Gemma",
    ROWS,
    (
        *SIZES_OF_ALL,
        Constant({"norm": "rms1p", "embedding.scale": "sqrt"}),
        # In files "gelu" stands for the approximation that the models were trained with.
        Choice(
            "hidden_act", "activation", {**GATED_NAMES, "gelu": "geglu_tanh"}, "gelu_pytorch_tanh"
        ),
        IgnoredKeys("hidden_activation"),
        RopeKeys(),
        ATTENTION_BIAS,
        ONE_SIDED,
    ),
    is_tied=True,
)

# Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786): norms before and
# after each sublayer.
GEMMA_ROWS = (
    *TRUNK,
    *block(
        LAYER,
        attention_norm="input_layernorm",
        attention_output_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        ffn_output_norm="post_feedforward_layernorm",
    ),
)
GEMMA_BLOCK = (
    DivisibleHeads(),
    Constant({"norm": "rms1p", "norm_placement": "sandwich", "embedding.scale": "sqrt"}),
    Choice("hidden_activation", "activation", GATED_NAMES, "gelu_pytorch_tanh"),
    IgnoredKeys("hidden_act"),
    ATTENTION_BIAS,
    # A whole number n: scores are multiplied by 1 / sqrt(n).
    KeyRule(
        lambda hf: {"attention.scale": hf.positive("query_pre_attn_scalar") ** -0.5},
        lambda config: {"query_pre_attn_scalar": round(config.attention.scale**-2)},
    ),
)
GEMMA = (*GEMMA_BLOCK, ONE_SIDED)
GEMMA2_CAPS = (
    OptionalKey("attn_logit_softcapping", "attention.soft_cap", 50.0),
    OptionalKey("final_logit_softcapping", "head.soft_cap", 30.0),
)

GEMMA2 = decoder_like(
    "gemma2",
    "Gemma2",
    GEMMA_ROWS,
    (*SIZES_OF_ALL, *GEMMA, *GEMMA2_CAPS, RopeKeys(), Windows(every=2)),
    is_tied=True,
)
GEMMA3 = decoder_like(
    "gemma3_text",
    "Gemma3",
    GEMMA_ROWS,
    (
        *SIZES_OF_ALL,
        *GEMMA,
        HEAD_NORM,
        # transformers does not apply it.
        *fixed(attn_logit_softcapping=None),
        OptionalKey("final_logit_softcapping", "head.soft_cap"),
        RopeKeys(theta=("rope_theta", 1_000_000.0), local=("rope_local_base_freq", 10_000.0)),
        Windows(every=6, period="sliding_window_pattern"),
    ),
    base="Gemma3TextModel",
    is_tied=True,
)
