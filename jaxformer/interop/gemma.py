"""Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786)."""

from jaxformer.interop import fields
from jaxformer.interop.llama import ATTENTION_BIAS, LAYER, TRUNK, llama_like, sizes
from jaxformer.interop.rope import Rope
from jaxformer.interop.tensor_table import norm

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
    fields.DivisibleHeads(),
    fields.Constant(norm="rms1p", norm_placement="sandwich", embedding_scale="sqrt"),
    fields.Choice("hidden_activation", "activation", fields.GATED_NAMES, "gelu_pytorch_tanh"),
    fields.IgnoredKeys("hidden_act"),
    ATTENTION_BIAS,
    fields.Scale("query_pre_attn_scalar", 256),
    fields.FixedKey("use_bidirectional_attention", (False, None)),
    fields.tied(True),
)

GEMMA2 = llama_like(
    "gemma2",
    "Gemma2",
    ROWS,
    (
        *sizes(vocab_size=256000, max_position_embeddings=8192, **SIZES),
        *COMMON,
        fields.OptionalKey("attn_logit_softcapping", "attention_soft_cap", 50.0),
        fields.OptionalKey("final_logit_softcapping", "logit_soft_cap", 30.0),
        Rope(),
        fields.Windows(LAYERS, every=2),
    ),
)
GEMMA3 = llama_like(
    "gemma3_text",
    "Gemma3",
    ROWS,
    (
        *sizes(vocab_size=262208, max_position_embeddings=131072, **SIZES),
        *COMMON,
        fields.Constant(query_key_norm="head"),
        # transformers does not apply it.
        fields.FixedKey("attn_logit_softcapping", (None,)),
        fields.OptionalKey("final_logit_softcapping", "logit_soft_cap"),
        Rope(theta=("rope_theta", 1_000_000.0), local=("rope_local_base_freq", 10_000.0)),
        fields.Windows(LAYERS, every=6, period="sliding_window_pattern"),
    ),
    base="Gemma3TextModel",
)
