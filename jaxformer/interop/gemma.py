"""Gemma 1, 2 and 3: decoders with the tensors of Llama, whose norms multiply by 1 + weight."""

from jaxformer.interop.fields import (
    GATED_NAMES,
    Choice,
    Constant,
    DivisibleHeads,
    FixedKey,
    IgnoredKeys,
    OptionalKey,
    Scale,
    Windows,
    fixed,
    tied,
)
from jaxformer.interop.llama import ATTENTION_BIAS, HEAD_NORM, LAYER, ROWS, TRUNK, llama_like, sizes
from jaxformer.interop.rope import Rope
from jaxformer.interop.tensor_table import block

# Gemma (arXiv:2403.08295): norms by 1 + weight, a scaled embedding, and wide heads.
GEMMA1_SIZES = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
ONE_SIDED = FixedKey("use_bidirectional_attention", (False, None))
GEMMA1 = llama_like(
    "gemma",
    "Gemma",
    ROWS,
    (
        *sizes(**GEMMA1_SIZES),
        Constant(norm="rms1p", embedding_scale="sqrt"),
        # In files "gelu" stands for the approximation that the models were trained with.
        Choice(
            "hidden_act", "activation", {**GATED_NAMES, "gelu": "geglu_tanh"}, "gelu_pytorch_tanh"
        ),
        IgnoredKeys("hidden_activation"),
        Rope(),
        ATTENTION_BIAS,
        ONE_SIDED,
        tied(True),
    ),
    covers='Gemma 1: `hidden_act="gelu"` is the approximation, as in transformers 5;'
    " biases by flag",
)

# Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786): norms before and
# after each sublayer.
GEMMA_LAYERS = 26
GEMMA_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": GEMMA_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
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
    Constant(norm="rms1p", norm_placement="sandwich", embedding_scale="sqrt"),
    Choice("hidden_activation", "activation", GATED_NAMES, "gelu_pytorch_tanh"),
    IgnoredKeys("hidden_act"),
    ATTENTION_BIAS,
    Scale("query_pre_attn_scalar", 256),
)
GEMMA = (*GEMMA_BLOCK, ONE_SIDED, tied(True))
GEMMA2_SIZES = sizes(vocab_size=256000, max_position_embeddings=8192, **GEMMA_SIZES)
GEMMA2_CAPS = (
    OptionalKey("attn_logit_softcapping", "attention_soft_cap", 50.0),
    OptionalKey("final_logit_softcapping", "logit_soft_cap", 30.0),
)

GEMMA2 = llama_like(
    "gemma2",
    "Gemma2",
    GEMMA_ROWS,
    (*GEMMA2_SIZES, *GEMMA, *GEMMA2_CAPS, Rope(), Windows(GEMMA_LAYERS, every=2)),
    covers="windows in every other layer; soft caps; norms before and after each sublayer",
)
GEMMA3 = llama_like(
    "gemma3_text",
    "Gemma3",
    GEMMA_ROWS,
    (
        *sizes(vocab_size=262208, max_position_embeddings=131072, **GEMMA_SIZES),
        *GEMMA,
        HEAD_NORM,
        # transformers does not apply it.
        *fixed(attn_logit_softcapping=None),
        OptionalKey("final_logit_softcapping", "logit_soft_cap"),
        Rope(theta=("rope_theta", 1_000_000.0), local=("rope_local_base_freq", 10_000.0)),
        Windows(GEMMA_LAYERS, every=6, period="sliding_window_pattern"),
    ),
    base="Gemma3TextModel",
    covers="the text model: windows by pattern; two RoPE bases; query-key norms; soft cap",
)
