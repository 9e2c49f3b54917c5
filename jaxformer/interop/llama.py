"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783), and what Mistral, Qwen, Gemma and OLMo share
with it."""

from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import (
    GATED_NAMES,
    Biases,
    Choice,
    Constant,
    DivisibleHeads,
    Dropout,
    Key,
    KeyMapping,
    Tied,
)
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.table import TensorRow, linear, norm

ATTENTION, FFN = frozenset({"qkv", "out"}), frozenset({"ffn"})
LAYER = "model.layers.{}."

# All but the norms of a layer, which each of the families places in its own way.
TRUNK = (
    TensorRow("model.embed_tokens.weight", "embed.tokens"),
    *linear(LAYER + "self_attn.q_proj", "blocks.attention.q"),
    *linear(LAYER + "self_attn.k_proj", "blocks.attention.k"),
    *linear(LAYER + "self_attn.v_proj", "blocks.attention.v"),
    *linear(LAYER + "self_attn.o_proj", "blocks.attention.out"),
    TensorRow(LAYER + "self_attn.q_norm.weight", "blocks.attention.q_norm"),
    TensorRow(LAYER + "self_attn.k_norm.weight", "blocks.attention.k_norm"),
    *linear(LAYER + "mlp.gate_proj", "blocks.ffn.gate"),
    *linear(LAYER + "mlp.up_proj", "blocks.ffn.up"),
    *linear(LAYER + "mlp.down_proj", "blocks.ffn.down"),
    *norm("model.norm", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)
ROWS = (
    *TRUNK,
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    *norm(LAYER + "post_attention_layernorm", "blocks.ffn_norm"),
)


def sizes(**default: float) -> tuple[KeyMapping, ...]:
    """The keys that all of them have; `default` has the values of keys that are left out."""
    return (
        Key("vocab_size", "vocab_size", default.get("vocab_size", 32000)),
        Key("hidden_size", "d_model", default.get("hidden_size", 4096)),
        Key("num_hidden_layers", "n_layers", default.get("num_hidden_layers", 32)),
        Key("num_attention_heads", "n_heads", default.get("num_attention_heads", 32)),
        Key("num_key_value_heads", "n_kv_heads", default.get("num_key_value_heads")),
        Key("head_dim", "head_dim", default.get("head_dim")),
        Key("intermediate_size", "d_ff", default.get("intermediate_size", 11008)),
        Key("rms_norm_eps", "norm_eps", default.get("rms_norm_eps", 1e-6)),
        Length(int(default.get("max_position_embeddings", 2048))),
        Dropout(("attention_dropout",)),
    )


SILU = Choice("hidden_act", "activation", GATED_NAMES, "silu")
INV_FREQ = r"rotary_emb\.inv_freq$"

LLAMA = Family(
    "llama",
    {"LlamaForCausalLM": {}},
    (
        *sizes(),
        DivisibleHeads(),
        Constant(norm="rms"),
        SILU,
        Rope(),
        Biases({"attention_bias": (ATTENTION, False), "mlp_bias": (FFN, False)}),
        Tied(False),
    ),
    lambda config: ROWS,
    prefix="model.",
    bases=("LlamaModel",),
    copies=tied_copy("lm_head.weight", "model.embed_tokens.weight"),
    ignored=(INV_FREQ,),
)
