"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783), and the decoders with its tensors: Mistral,
Phi-3, Qwen, OLMo 2 and Gemma."""

from collections.abc import Mapping, Sequence

from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import KeyMapping, Windows
from jaxformer.interop.rope import ORIGINAL, Length, Rope
from jaxformer.interop.tensor_files import TensorFiles
from jaxformer.interop.tensor_table import QKV, STACKED, TensorRow, linear, norm

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
    packed: Mapping[str, type[TensorFiles]] | None = None,
) -> Family:
    """A family of decoders with the tensors of Llama but for the norms; `name` begins the names of
    its classes in transformers, and `base` is the class without a head if it has another name.
    `packed` is as in `Family`."""
    return Family(
        model_type,
        {f"{name}ForCausalLM": {}},
        mappings,
        lambda config: rows,
        prefix="model.",
        bases=(base or f"{name}Model",),
        copies=tied_copy("lm_head.weight", "model.embed_tokens.weight"),
        ignored=(INV_FREQ,),
        packed=packed or {},
    )


RMS = fields.Constant(norm="rms")
LLAMA = llama_like(
    "llama",
    "Llama",
    ROWS,
    (
        *sizes(),
        fields.DivisibleHeads(),
        RMS,
        SILU,
        Rope(),
        fields.Biases({"attention_bias": (ATTENTION, False), "mlp_bias": (FFN, False)}),
        fields.tied(False),
    ),
)

# Mistral (arXiv:2310.06825): a window in every layer.
MISTRAL_SIZES = sizes(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072
)
MISTRAL = llama_like(
    "mistral",
    "Mistral",
    ROWS,
    (*MISTRAL_SIZES, RMS, SILU, Rope(), Windows(32, kinds=False), fields.tied(False)),
)

# Phi-3 (arXiv:2404.14219) and Phi-4-mini (arXiv:2503.01743): LongRoPE, and one matrix for queries,
# keys and values, and one for gate and up.
SEPARATE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PHI3_ROWS = (
    *(row for row in ROWS if row.hf.split(".")[-2] not in SEPARATE),
    *linear(LAYER + "self_attn.qkv_proj", QKV, STACKED),
    *linear(LAYER + "mlp.gate_up_proj", ("blocks.ffn.gate", "blocks.ffn.up"), STACKED),
)
PHI3_SIZES = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
PHI3 = llama_like(
    "phi3",
    "Phi3",
    PHI3_ROWS,
    (
        # The width of a head follows from the two others.
        *(row for row in sizes(**PHI3_SIZES) if row != fields.Key("head_dim", "head_dim")),
        fields.Dropout("resid_pdrop embd_pdrop"),
        fields.IgnoredKeys("full_attn_mod interpolate_factor"),
        RMS,
        SILU,
        Rope(
            fraction=("partial_rotary_factor", 1.0),
            original=(ORIGINAL, 4096),
            kinds=("default", "longrope"),
        ),
        Windows(32, kinds=False, default_window=None),
        fields.tied(False),
    ),
)

# Qwen 2 (arXiv:2407.10671), with biases of queries, keys and values, and Qwen 3 (arXiv:2505.09388),
# with their norms.
QWEN_SIZES = {
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
QWEN = (RMS, SILU, Rope(), Windows(32, switch=True), fields.tied(False))
HEAD_NORM = fields.Constant(query_key_norm="head")
QWEN2 = llama_like(
    "qwen2", "Qwen2", ROWS, (*sizes(**QWEN_SIZES), *QWEN, fields.Constant(bias="qkv"))
)
QWEN3 = llama_like(
    "qwen3", "Qwen3", ROWS, (*sizes(**QWEN_SIZES, head_dim=128), *QWEN, HEAD_NORM, ATTENTION_BIAS)
)

# OLMo 2 (arXiv:2501.00656): norms after each sublayer, and of queries and keys over all heads.
OLMO2_ROWS = (
    *TRUNK,
    *norm(LAYER + "post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(LAYER + "post_feedforward_layernorm", "blocks.ffn_output_norm"),
)
OLMO2 = llama_like(
    "olmo2",
    "Olmo2",
    OLMO2_ROWS,
    (
        *sizes(vocab_size=50304, rms_norm_eps=1e-5),
        fields.Constant(norm="rms", norm_placement="output", query_key_norm="width"),
        SILU,
        Rope(),
        ATTENTION_BIAS,
        fields.tied(False),
    ),
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
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    *norm(LAYER + "post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(LAYER + "pre_feedforward_layernorm", "blocks.ffn_norm"),
    *norm(LAYER + "post_feedforward_layernorm", "blocks.ffn_output_norm"),
)
GEMMA = (
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
    GEMMA_ROWS,
    (
        *sizes(vocab_size=256000, max_position_embeddings=8192, **GEMMA_SIZES),
        *GEMMA,
        fields.OptionalKey("attn_logit_softcapping", "attention_soft_cap", 50.0),
        fields.OptionalKey("final_logit_softcapping", "logit_soft_cap", 30.0),
        Rope(),
        Windows(GEMMA_LAYERS, every=2),
    ),
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
        fields.FixedKey("attn_logit_softcapping", (None,)),
        fields.OptionalKey("final_logit_softcapping", "logit_soft_cap"),
        Rope(theta=("rope_theta", 1_000_000.0), local=("rope_local_base_freq", 10_000.0)),
        Windows(GEMMA_LAYERS, every=6, period="sliding_window_pattern"),
    ),
    base="Gemma3TextModel",
)
