"""Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786)."""

import dataclasses

from jaxformer.interop.fields import (
    GATED_NAMES,
    Biases,
    Choice,
    Constant,
    DivisibleHeads,
    FixedKey,
    IgnoredKeys,
    OptionalKey,
    Scale,
    Tied,
    Windows,
)
from jaxformer.interop.llama import ATTENTION, LAYER, LLAMA, TRUNK, sizes
from jaxformer.interop.rope import Rope
from jaxformer.interop.table import norm

LAYERS = 26
SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
ROWS = (
    *TRUNK,
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    *norm(LAYER + "post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(LAYER + "pre_feedforward_layernorm", "blocks.ffn_norm"),
    *norm(LAYER + "post_feedforward_layernorm", "blocks.ffn_output_norm"),
)
COMMON = (
    DivisibleHeads(),
    Constant(norm="rms1p", norm_placement="sandwich", embedding_scale="sqrt"),
    Choice("hidden_activation", "activation", GATED_NAMES, "gelu_pytorch_tanh"),
    IgnoredKeys("hidden_act"),
    Biases({"attention_bias": (ATTENTION, False)}),
    Scale("query_pre_attn_scalar", 256),
    FixedKey("use_bidirectional_attention", (False, None)),
    Tied(True),
)

GEMMA2 = dataclasses.replace(
    LLAMA,
    model_type="gemma2",
    architectures={"Gemma2ForCausalLM": {}},
    bases=("Gemma2Model",),
    fields=(
        *sizes(vocab_size=256000, max_position_embeddings=8192, **SIZES),
        *COMMON,
        OptionalKey("attn_logit_softcapping", "attention_soft_cap", 50.0),
        OptionalKey("final_logit_softcapping", "logit_soft_cap", 30.0),
        Rope(),
        Windows(LAYERS, every=2),
    ),
    rows=lambda config: ROWS,
)
GEMMA3 = dataclasses.replace(
    LLAMA,
    model_type="gemma3_text",
    architectures={"Gemma3ForCausalLM": {}},
    bases=("Gemma3TextModel",),
    fields=(
        *sizes(vocab_size=262208, max_position_embeddings=131072, **SIZES),
        *COMMON,
        Constant(query_key_norm="head"),
        FixedKey("attn_logit_softcapping", (None,)),  # transformers does not apply it
        OptionalKey("final_logit_softcapping", "logit_soft_cap"),
        Rope(theta=("rope_theta", 1_000_000.0), local=("rope_local_base_freq", 10_000.0)),
        Windows(LAYERS, every=6, period="sliding_window_pattern"),
    ),
    rows=lambda config: ROWS,
)
