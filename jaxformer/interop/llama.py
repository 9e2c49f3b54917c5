"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783), and what Mistral, Qwen, Gemma and OLMo share
with it."""

from collections.abc import Sequence

from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import KeyMapping
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import TensorRow, linear, norm

ATTENTION, FFN = frozenset({"qkv", "out"}), frozenset({"ffn"})
LAYER = "model.layers.{}."

# All but the norms of a layer, which the families place differently.
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

# Key, field, and the default of Llama.
SIZE_KEYS = (
    ("vocab_size", "vocab_size", 32000),
    ("hidden_size", "d_model", 4096),
    ("num_hidden_layers", "n_layers", 32),
    ("num_attention_heads", "n_heads", 32),
    ("num_key_value_heads", "n_kv_heads", None),
    ("head_dim", "head_dim", None),
    ("intermediate_size", "d_ff", 11008),
    ("rms_norm_eps", "norm_eps", 1e-6),
)


def sizes(**default: float) -> tuple[KeyMapping, ...]:
    """The keys of all these families; `default` has a family's own defaults."""
    return (
        *(fields.Key(hf, field, default.get(hf, usual)) for hf, field, usual in SIZE_KEYS),
        Length(int(default.get("max_position_embeddings", 2048))),
        fields.Dropout("attention_dropout"),
    )


SILU = fields.Choice("hidden_act", "activation", fields.GATED_NAMES, "silu")
ATTENTION_BIAS = fields.Biases({"attention_bias": (ATTENTION, False)})
INV_FREQ = r"rotary_emb\.inv_freq$"


def llama_like(
    model_type: str,
    name: str,
    rows: tuple[TensorRow, ...],
    mappings: Sequence[KeyMapping],
    base: str = "",
) -> Family:
    """A family of decoders with the tensors of Llama but for the norms; `name` begins the names of
    its classes in transformers, and `base` is the class without a head if it has another name."""
    return Family(
        model_type,
        {f"{name}ForCausalLM": {}},
        mappings,
        lambda config: rows,
        prefix="model.",
        bases=(base or f"{name}Model",),
        copies=tied_copy("lm_head.weight", "model.embed_tokens.weight"),
        ignored=(INV_FREQ,),
    )


FIELDS = (
    *sizes(),
    fields.DivisibleHeads(),
    fields.Constant(norm="rms"),
    SILU,
    Rope(),
    fields.Biases({"attention_bias": (ATTENTION, False), "mlp_bias": (FFN, False)}),
    fields.tied(False),
)
LLAMA = llama_like("llama", "Llama", ROWS, FIELDS)
